"""Meshes with something wrong in them, and healthy ones, under virtual time.

Each fault has a size: how wrong it is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.core.settings import MeshConfig
from services.core.workload import Arrival
from services.simulation.faults import BadReports, Death, Fault, Partition, SlowWorker
from services.simulation.feeds import Trouble
from services.simulation.mesh import MeshPlan, replay
from services.simulation.store import StorePlan
from tests.observer.windows import Seen, observe
from tests.simulation.loads import BLOCK_TOKENS, chain, configure

# Of the load, before the window begins.
WARM_UP = 0.2
CAPACITY_REQUESTS = 100


def chats(
    num_requests: int,
    rate: float,
    seed: int,
    *,
    num_prefixes: int = 16,
    prefix_tokens: int = 1024,
    suffix_tokens: int = 128,
    output_tokens: int = 32,
    zipf: float = 1.0,
    unique_share: float = 0.0,
    document_share: float = 0.0,
    document_tokens: int = 8000,
) -> list[Arrival]:
    """Poisson; lengths vary. Some prompts share nothing, some are documents."""
    chance = random.Random(seed)
    num_blocks = prefix_tokens // BLOCK_TOKENS
    prefixes = [chain(f"p{index}", num_blocks) for index in range(num_prefixes)]
    weights = [1 / (1 + index) ** zipf for index in range(num_prefixes)]
    at_s, arrivals = 0.0, []
    for _ in range(num_requests):
        at_s += chance.expovariate(rate)
        output = max(2, int(chance.expovariate(1 / output_tokens)))
        prompt = prefix_tokens + max(8, int(chance.expovariate(1 / suffix_tokens)))
        (prefix,) = chance.choices(prefixes, weights)
        kind = chance.random()
        if kind < document_share:
            prefix, prompt = (), document_tokens
        elif kind < document_share + unique_share:
            prefix = ()
        arrivals.append(Arrival(at_s, prefix, prompt, output))
    return arrivals


def config(
    strategy: str = "kv_aware",
    *,
    worker: dict[str, Any] | None = None,
    simulated: dict[str, Any] | None = None,
    **router: Any,
) -> MeshConfig:
    timing = {
        "num_blocks": 1024,
        "prefill_tokens_per_s": 20_000,
        "decode_step_ms": 10,
        "decode_step_ms_per_seq": 0,
        "transfer_gb_per_s": 1e6,
        **(simulated or {}),
    }
    return configure(strategy=strategy, worker={"simulated": timing, **(worker or {})}, **router)


def see(
    arrivals: Sequence[Arrival],
    mesh: MeshConfig | None = None,
    *,
    warm_up: float = WARM_UP,
    **plan: Any,
) -> Seen:
    """Four workers, unless the plan says otherwise."""
    made = MeshPlan(**{"config": mesh or config(), "num_workers": 4, **plan})
    return observe(arrivals, made, warm_s=warm_up * arrivals[-1].at_s)


def healthy(seed: int, *, share: float, num_workers: int, **load: Any) -> Seen:
    """At this share of what such a mesh can do."""
    plan = MeshPlan(config=config(max_wait_interactive_s=0.0), num_workers=num_workers)
    at_once = [each._replace(at_s=0.0) for each in chats(CAPACITY_REQUESTS, 1.0, seed, **load)]
    rate = share * CAPACITY_REQUESTS / replay(at_once, plan).duration_s
    return see(chats(220, rate, seed, **load), plan.config, num_workers=num_workers)


# --- faults


def few_slots(num_slots: int) -> Seen:
    return see(chats(220, 20 * num_slots, 1), config(worker={"num_slots": num_slots}))


def blind_routing(strategy: str) -> Seen:
    load = chats(220, 40, 3, num_prefixes=40, prefix_tokens=2048)
    return see(load, config(strategy, simulated={"num_blocks": 8192}))


def small_caches(num_blocks: int) -> Seen:
    load = chats(220, 16, 4, num_prefixes=40, prefix_tokens=2048)
    return see(load, config(simulated={"num_blocks": num_blocks}), num_workers=2)


def prompts_beside_answers(share: float) -> Seen:
    """Prompts that nobody shares, all alike in length, beside answers."""
    load = chats(220, 10, 5, document_share=share, document_tokens=12_000)
    worker = {"max_batch_tokens": 8192, "max_step_ms": 60_000, "max_context_tokens": 32_768}
    return see(load, config(worker=worker), num_workers=2)


def documents(document_tokens: int) -> Seen:
    """A few long prompts among short ones with short answers."""
    load = chats(220, 12, 5, document_share=0.1, document_tokens=document_tokens, output_tokens=8)
    worker = {"max_context_tokens": 65_536, "max_batch_tokens": 32_768, "max_step_ms": 60_000}
    return see(load, config(worker=worker), num_workers=2)


def slow_store(gb_per_s: float) -> Seen:
    """It has room for all that is ever computed, and brings it in slowly."""
    load = chats(180, 8, 4, num_prefixes=40, prefix_tokens=2048)
    simulated = {"num_blocks": 192, "kv_bytes_per_token": 65_536}
    mesh = config(worker={"kv_load": "always"}, simulated=simulated)
    mesh = replace(mesh, kvstore=replace(mesh.kvstore, capacity_mb=16_384))
    return see(load, mesh, store=StorePlan(workers_per_node=4, gb_per_s=gb_per_s))


def slow_beginning(factor: float) -> Seen:
    faults = tuple(SlowWorker(0.0, index, factor, 3.0) for index in range(4))
    return see(chats(360, 30, 4), faults=faults, warm_up=0.0)


def restart(prefix_tokens: int) -> Seen:
    """All workers begin anew, with empty caches."""
    load = chats(360, 30, 4, num_prefixes=40, prefix_tokens=prefix_tokens)
    faults: tuple[Fault, ...] = tuple(Death(5.0, index, 0.5) for index in range(4))
    return see(load, config(simulated={"num_blocks": 4096}), faults=faults)


def hot_prefix(zipf: float) -> Seen:
    load = chats(260, 120, 4, zipf=zipf)
    worker = {"num_slots": 64}
    mesh = config(
        "prefix_aware",
        worker=worker,
        simulated={"decode_step_ms_per_seq": 0.5},
        concurrency_threshold=64,
    )
    return see(load, mesh)


def unseen_workers(rate: float) -> Seen:
    """Two of four come back while no news of members reaches the router."""
    faults = (Death(0.1, 0, 0.3), Death(0.1, 1, 0.3), Partition(0.2, 0, 1e5))
    return see(chats(260, rate, 5), faults=faults)


def slow_worker(factor: float) -> Seen:
    return see(chats(220, 16, 4), num_workers=2, faults=(SlowWorker(0.0, 0, factor, 1e5),))


def split(num_prefill: int, num_decode: int, rate: float, output_tokens: int) -> Seen:
    load = chats(
        180,
        rate,
        4,
        num_prefixes=200,
        prefix_tokens=4096,
        zipf=0.2,
        output_tokens=output_tokens,
    )
    mesh = config(simulated={"num_blocks": 2048})
    return see(load, mesh, num_workers=num_decode, num_prefill_workers=num_prefill)


def deaf_router(lost: float) -> Seen:
    load = chats(220, 24, 4, num_prefixes=40, prefix_tokens=2048)
    return see(load, faults=(BadReports(0.0, Trouble(lost=lost), 1e5),))


def slow_decoding(step_ms: float) -> Seen:
    return see(chats(150, 0.5, 4), config(simulated={"decode_step_ms": step_ms}))


def idle_mesh(num_workers: int) -> Seen:
    return see(chats(150, 0.5, 4), num_workers=num_workers)


def overload(rate: float) -> Seen:
    mesh = config(max_wait_interactive_s=0.0)
    return see(chats(200, rate, 4, unique_share=1.0), mesh, num_workers=2)
