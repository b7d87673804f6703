"""Routing strategies on one workload, beside a router that knows everything.

In the virtual clock: real routers' and workers' cores, and only time is simulated.
`route_live` measures the same over processes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.bench import oracle
from services.bench.workloads import rate_of
from services.core.config import flatten, nest, parse
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.core.workload import Workload
from services.simulation.mesh import MeshPlan, replay
from services.simulation.router import Outcome

# Of the H100 class: a model of some 8 to 70 billion parameters.
TIMING = {
    "worker.engine": "simulated",
    "worker.num_slots": 64,
    "worker.max_context_tokens": 1 << 20,
    "worker.simulated.prefill_tokens_per_s": 20_000.0,
    "worker.simulated.decode_step_ms": 10.0,
    "worker.simulated.decode_step_ms_per_seq": 0.0,
    # Little, so that real processes have room for many blocks.
    "worker.simulated.kv_bytes_per_token": 64,
}
# What a curve of the time to first token is made of.
PERCENTS = tuple(range(101))


class Result(NamedTuple):
    """What became of a request. Times of one that failed are NaN."""

    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    # None: its router expected nothing.
    predicted_tokens: int | None
    worker: str
    # Empty: it ended well.
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePlan:
    """`config`: all settings but the strategy. Blocks are the workload's."""

    config: MeshConfig
    strategies: Sequence[str]
    num_workers: int = 8
    # Of them, so many compute prompts for the others. In virtual time alone.
    num_prefill_workers: int = 0
    num_routers: int = 1
    seed: int = 0


def make_config(workload: Workload, *, num_blocks: int, changes: dict[str, Any]) -> MeshConfig:
    """Of a mesh of simulated engines; `changes` win. Raises InvalidArgument."""
    made = {
        **flatten(MeshConfig()),
        **TIMING,
        "mesh.block_tokens": workload.block_tokens,
        "worker.simulated.num_blocks": num_blocks,
        **changes,
    }
    return parse(nest(made))


def with_strategy(config: MeshConfig, strategy: str) -> MeshConfig:
    return parse(nest({**flatten(config), "router.routing_strategy": strategy}))


def enough_blocks(workload: Workload, num_at_once: int) -> int:
    """So many that a worker never forgets, whatever comes to it."""
    keys: set[bytes] = set()
    num_own = longest = 0
    for arrival in workload.arrivals:
        keys.update(arrival.chain)
        total = arrival.prompt_tokens + arrival.output_tokens
        num_all = -(-total // workload.block_tokens)
        num_own += num_all - len(arrival.chain)
        longest = max(longest, num_all)
    return len(keys) + num_own + num_at_once * longest


def measure(
    workload: Workload, plan: RoutePlan, *, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """`tell` hears how far it is."""
    document = describe(workload, plan, clock="virtual")
    for strategy in plan.strategies:
        tell(f"{strategy} …")
        began_s = time.perf_counter()
        replayed = replay(
            workload.arrivals,
            MeshPlan(
                config=with_strategy(plan.config, strategy),
                num_workers=plan.num_workers - plan.num_prefill_workers,
                num_prefill_workers=plan.num_prefill_workers,
                num_routers=plan.num_routers,
                seed=plan.seed,
            ),
        )
        took_s = time.perf_counter() - began_s
        results = [_result(outcome) for outcome in replayed.outcomes]
        work = [totals.uncached_tokens for totals in replayed.workers.values()]
        add_strategy(document, strategy, results, work, replayed.duration_s)
        document["strategies"][-1]["took_s"] = took_s
    return document


def check_fits(workload: Workload, config: MeshConfig) -> None:
    """Raises InvalidArgument when a worker could not take some of the requests at all."""
    longest = max(each.prompt_tokens + each.output_tokens for each in workload.arrivals)
    num_needed = -(-longest // workload.block_tokens)
    if num_needed > config.worker.simulated.num_blocks:
        raise InvalidArgument.of(
            "worker.simulated.num_blocks",
            f"must be at least {num_needed}, for the longest prompt with its answer; got"
            f" {config.worker.simulated.num_blocks}",
        )
    if longest > config.worker.max_context_tokens:
        raise InvalidArgument.of(
            "worker.max_context_tokens", f"must be at least {longest}, for the longest request"
        )


def describe(workload: Workload, plan: RoutePlan, *, clock: str) -> dict[str, Any]:
    """The document's head: what is measured, and what could be reached."""
    arrivals = list(workload.arrivals)
    worker = plan.config.worker
    check_fits(workload, plan.config)
    rate_per_s = rate_of(workload)
    ideal = oracle.route(
        arrivals,
        block_tokens=workload.block_tokens,
        num_workers=plan.num_workers,
        num_blocks=worker.simulated.num_blocks,
    )
    return {
        "benchmark": "route",
        "clock": clock,
        "workload": {
            "name": workload.name,
            "requests": len(arrivals),
            "rate_per_s": rate_per_s if math.isfinite(rate_per_s) else None,
            "prompt_tokens": statistics.fmean(each.prompt_tokens for each in arrivals),
            "output_tokens": statistics.fmean(each.output_tokens for each in arrivals),
        },
        "mesh": {
            "workers": plan.num_workers,
            "prefill_workers": plan.num_prefill_workers,
            "routers": plan.num_routers,
            "block_tokens": workload.block_tokens,
            "blocks_per_worker": worker.simulated.num_blocks,
            "slots_per_worker": worker.num_slots,
            "prefill_tokens_per_s": worker.simulated.prefill_tokens_per_s,
            "decode_step_ms": worker.simulated.decode_step_ms,
            "decode_step_ms_per_seq": worker.simulated.decode_step_ms_per_seq,
            "decode_overlap": worker.simulated.decode_overlap,
        },
        "oracle": {
            "hit_rate": ideal.hit_rate,
            "work_max": ideal.most_work,
            "work_min": ideal.least_work,
        },
        "strategies": [],
        "ttft_curve_ms": {},
    }


def add_strategy(
    document: dict[str, Any],
    strategy: str,
    results: Sequence[Result],
    work: Sequence[int],
    duration_s: float,
) -> None:
    """`work`: uncached prompt tokens of each worker."""
    row = {"strategy": strategy, **summarize(results, work, duration_s)}
    ideal: float = document["oracle"]["hit_rate"]
    row["of_oracle"] = None if row["hit_rate"] is None else _ratio(row["hit_rate"], ideal)
    document["strategies"].append(row)
    ttfts_ms = sorted(each.ttft_s * 1e3 for each in results if not each.error)
    if ttfts_ms:
        curve = [percentile(ttfts_ms, percent) for percent in PERCENTS]
        document["ttft_curve_ms"][strategy] = curve


def summarize(results: Sequence[Result], work: Sequence[int], duration_s: float) -> dict[str, Any]:
    """Figures of those that ended well; None where there are none."""
    served = [each for each in results if not each.error]
    failed = Counter(each.error for each in results if each.error)
    row: dict[str, Any] = {"served": len(served), "failed": failed.total()}
    if failed:
        row["failures"] = dict(failed.most_common())
    prompt_tokens = sum(each.prompt_tokens for each in served)
    row["hit_rate"] = _ratio(sum(each.cached_tokens for each in served), prompt_tokens)
    ttfts_ms = sorted(each.ttft_s * 1e3 for each in served)
    row["ttft_mean_ms"] = statistics.fmean(ttfts_ms) if served else None
    for percent in (50, 95, 99):
        row[f"ttft_p{percent}_ms"] = percentile(ttfts_ms, percent) if served else None
    streamed = [each.tpot_s * 1e3 for each in served if each.output_tokens > 1]
    row["tpot_ms"] = statistics.fmean(streamed) if streamed else None
    row["requests_per_s"] = len(served) / duration_s
    row["output_tokens_per_s"] = sum(each.output_tokens for each in served) / duration_s
    mean = statistics.fmean(work)
    row["work_max"] = _ratio(max(work), mean)
    row["work_min"] = _ratio(min(work), mean)
    return {**row, **_predictions(served)}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between two neighbours where it falls between them."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _predictions(served: Sequence[Result]) -> dict[str, float | None]:
    """What routers expected to be cached, beside what was; and by how much they were wrong."""
    asked = [(each, each.predicted_tokens) for each in served if each.predicted_tokens is not None]
    total = sum(each.prompt_tokens for each, _ in asked)
    return {
        "predicted_hit_rate": _ratio(sum(predicted for _, predicted in asked), total),
        "actual_hit_rate": _ratio(sum(each.cached_tokens for each, _ in asked), total),
        "mispredicted": _ratio(
            sum(abs(each.cached_tokens - predicted) for each, predicted in asked), total
        ),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _result(outcome: Outcome) -> Result:
    return Result(
        ttft_s=outcome.ttft_s,
        tpot_s=outcome.tpot_s,
        prompt_tokens=outcome.arrival.prompt_tokens,
        output_tokens=outcome.arrival.output_tokens,
        cached_tokens=outcome.cached_tokens,
        predicted_tokens=outcome.predicted_tokens,
        worker=outcome.worker,
        error=outcome.error,
    )
