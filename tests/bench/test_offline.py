"""What routing alone decides: `kv_aware` knows less than the oracle, and looks further ahead."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from services.bench import offline
from services.bench.workload_traces import read_trace
from services.bench.workloads import SharedPrefix, make
from services.core.workload import Workload


def first(name: str, num_requests: int | None) -> Workload:
    workload = read_trace(name)
    arrivals = tuple(itertools.islice(workload.arrivals, num_requests))
    return replace(workload, num_requests=len(arrivals), arrivals=arrivals)


@pytest.mark.parametrize(
    ("name", "num_requests", "num_blocks", "of_oracle"),
    [
        ("mooncake", None, None, 0.97),
        ("mooncake", None, 5_000, 0.97),
        ("agents", 300, None, 0.99),
        ("agents", 300, 5_000, 0.99),
        ("tau", None, None, 0.99),
        ("tau", None, 5_000, 0.99),
    ],
)
def test_kv_aware_finds_what_a_router_finds_that_knows_all(
    name: str, num_requests: int | None, num_blocks: int | None, of_oracle: float
) -> None:
    document = offline.measure(first(name, num_requests), num_workers=8, sizes=[num_blocks])
    ideal, ours = document["rows"]

    assert (ideal["router"], ours["router"]) == ("oracle", "kv_aware")
    assert ours["of_oracle"] >= of_oracle
    if name == "mooncake":
        assert 0.97 <= ours["work_min"] <= ours["work_max"] <= 1.03


def test_nothing_shared_leaves_nothing_to_find() -> None:
    load = make(SharedPrefix(num_requests=40, num_prefixes=40, prefix_tokens=64, zipf=0.01))
    alone = replace(load, arrivals=tuple(each._replace(chain=()) for each in load.arrivals))
    for row in offline.measure(alone, num_workers=4)["rows"]:
        assert (row["hit_rate"], row["of_oracle"]) == (0.0, 1.0)
        assert row["work_max"] < 1.2
