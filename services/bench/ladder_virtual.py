"""The ladder on simulated engines, in virtual time: real routers' and workers' cores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from router.reports import LoadEvent
from services.bench.ladder import (
    Headroom,
    Ladder,
    Result,
    Rung,
    Trait,
    compare,
    summarize,
)
from services.bench.ladder_load import LOAD_SHARE, Load
from services.bench.route import TIMING
from services.core.config import flatten, nest, parse
from services.core.settings import MeshConfig
from services.core.workload import Arrival
from services.simulation.clock import run
from services.simulation.mesh import MeshPlan, VirtualMesh
from services.simulation.router import Outcome
from services.simulation.store import StorePlan
from services.simulation.worker import VirtualWorker

NUM_WORKERS = 8
# Of them, where some compute prompts for the others.
NUM_PREFILL_WORKERS = 4
STORE = StorePlan(workers_per_node=4)
# KV of a model of 8 billion parameters in 8 bits, over a link of 50 GB/s. Its prefixes are
# more than the workers' caches hold beside the documents.
MESH = {
    **TIMING,
    "worker.simulated.kv_bytes_per_token": 65_536,
    "worker.simulated.transfer_gb_per_s": 50.0,
    "worker.simulated.num_blocks": 1_024,
    "kvstore.capacity_mb": 65_536,
}
# Chats, and documents that are summarized meanwhile.
LOAD = Load(
    num_prefixes=96,
    prefix_tokens=4_000,
    zipf=0.8,
    suffix_tokens=128,
    output_tokens=256,
    batch_share=0.03,
    batch_tokens=12_000,
    batch_burst=8,
)
# Of the time that is measured; before it, so that caches are as they stay.
WARM_UP = 0.5
CAPACITY_REQUESTS = 400
SAMPLE_S = 0.05


def measure(
    ladder: Ladder,
    *,
    seconds: float,
    load: Load = LOAD,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """`seconds`: virtual, of load on each rung. `tell` hears how far it is."""
    tell("what the baseline can do …")
    capacity_per_s = _capacity(ladder.rungs[0], load)
    rate_per_s = LOAD_SHARE * capacity_per_s
    warm_s = WARM_UP * seconds
    whole_s = warm_s + seconds
    num_requests = max(1, round(rate_per_s * whole_s))
    arrivals = load.arrivals(num_requests=num_requests, seconds=whole_s)

    def measure_rung(rung: Rung) -> dict[str, Any]:
        tell(f"{rung.name} …")
        return run(_serve(rung, arrivals, warm_s))

    rows = [measure_rung(rung) for rung in ladder.rungs]
    without_split = None
    if ladder.without_split is not None:
        tell("all but the split:")
        without_split = measure_rung(ladder.without_split)
    measured = [arrival for arrival in arrivals if arrival.at_s >= warm_s]
    config = _config(ladder.rungs[0])
    return {
        "benchmark": "ladder",
        "engine": "simulated",
        "clock": "virtual",
        "seconds": seconds,
        "capacity_per_s": capacity_per_s,
        "rate_per_s": rate_per_s,
        "requests": len(measured),
        "batch_requests": sum(arrival.request_class == "batch" for arrival in measured),
        "load": load.describe(),
        "mesh": {
            "workers": NUM_WORKERS,
            "prefill_workers": NUM_PREFILL_WORKERS,
            "blocks_per_worker": config.worker.simulated.num_blocks,
            "slots_per_worker": config.worker.num_slots,
            "prefill_tokens_per_s": config.worker.simulated.prefill_tokens_per_s,
            "decode_step_ms": config.worker.simulated.decode_step_ms,
            "store_mb_per_node": config.kvstore.capacity_mb,
        },
        **compare(rows, without_split),
    }


def _config(rung: Rung) -> MeshConfig:
    return parse(nest({**flatten(MeshConfig()), **MESH, **rung.settings}))


def _plan(rung: Rung) -> MeshPlan:
    num_prefill = NUM_PREFILL_WORKERS if Trait.SPLIT in rung.traits else 0
    return MeshPlan(
        config=_config(rung),
        num_workers=NUM_WORKERS - num_prefill,
        num_prefill_workers=num_prefill,
        store=STORE if Trait.STORE in rung.traits else None,
    )


def _capacity(baseline: Rung, load: Load) -> float:
    """Requests a second, of many that are all there at once."""
    arrivals = load.arrivals(num_requests=CAPACITY_REQUESTS, seconds=1.0)

    async def serve() -> float:
        mesh = VirtualMesh(_plan(baseline))
        try:
            await mesh.serve(_as_told(each, baseline)._replace(at_s=0.0) for each in arrivals)
            return len(arrivals) / mesh.now_s
        finally:
            mesh.close()

    return run(serve())


async def _serve(rung: Rung, arrivals: Sequence[Arrival], warm_s: float) -> dict[str, Any]:
    mesh = VirtualMesh(_plan(rung))
    headroom = Headroom()
    sampling = asyncio.create_task(_sample(mesh, headroom, warm_s))
    try:
        outcomes = await mesh.serve(_as_told(arrival, rung) for arrival in arrivals)
    finally:
        sampling.cancel()
        mesh.close()
    results = [
        _result(outcome, arrival)
        for outcome, arrival in zip(outcomes, arrivals, strict=True)
        if arrival.at_s >= warm_s
    ]
    end_s = max(outcome.finished_s for outcome in outcomes)
    return summarize(rung, results, end_s - warm_s, headroom)


def _as_told(arrival: Arrival, rung: Rung) -> Arrival:
    """As the mesh hears of it."""
    if Trait.CACHE not in rung.traits:
        arrival = arrival._replace(chain=())
    if Trait.CLASSES not in rung.traits:
        arrival = arrival._replace(request_class="interactive")
    return arrival


async def _sample(mesh: VirtualMesh, headroom: Headroom, from_s: float) -> None:
    await asyncio.sleep(from_s)
    while True:
        pools = [worker.pool for worker in mesh.workers]
        headroom.see(
            held=sum(pool.num_reserved + pool.num_pinned for pool in pools),
            occupied=sum(pool.num_reserved + pool.num_cached for pool in pools),
            num_blocks=sum(pool.num_blocks for pool in pools),
            running=sum(_num_running(worker) for worker in mesh.workers),
            num_slots=sum(worker.info.num_slots for worker in mesh.workers),
        )
        await asyncio.sleep(SAMPLE_S)


def _num_running(worker: VirtualWorker) -> int:
    report = worker.hub.load_report()
    assert report is not None
    assert isinstance(report.event, LoadEvent)
    return report.event.num_running


def _result(outcome: Outcome, arrival: Arrival) -> Result:
    return Result(
        ttft_s=outcome.ttft_s,
        tpot_s=outcome.tpot_s,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=arrival.output_tokens,
        cached_tokens=outcome.cached_tokens,
        batch=arrival.request_class == "batch",
        error=outcome.error,
    )
