"""A part of a real trace: many workers, long prompts, the same each time."""

from __future__ import annotations

import itertools

from services.bench.workload_traces import read_trace
from services.core import config as mesh_config
from services.core.workload import Arrival
from services.simulation.mesh import MeshPlan, Replayed, replay
from tests.simulation.loads import errors, hit_rate


def first_minutes(strategy: str, arrivals: list[Arrival]) -> Replayed:
    worker = {
        "engine": "simulated",
        "num_slots": 64,
        "max_context_tokens": 1 << 18,
        "max_batch_tokens": 2048,
        "simulated": {"num_blocks": 5000, "prefill_tokens_per_s": 8000},
    }
    config = mesh_config.parse(
        {
            "mesh": {"block_tokens": 512},
            "router": {"routing_strategy": strategy},
            "worker": worker,
        }
    )
    return replay(arrivals, MeshPlan(config=config, num_workers=16))


def test_the_first_requests_of_a_real_trace_are_replayed_the_same_each_time() -> None:
    workload = read_trace("mooncake")
    assert workload.block_tokens == 512
    arrivals = list(itertools.islice(workload.arrivals, 800))
    aware = first_minutes("kv_aware", arrivals)
    assert errors(aware.outcomes) == []
    assert repr(aware) == repr(first_minutes("kv_aware", arrivals))
    in_turn = first_minutes("round_robin", arrivals)
    assert hit_rate(aware.outcomes) > 2 * hit_rate(in_turn.outcomes)
