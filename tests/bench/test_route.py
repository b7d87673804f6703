from __future__ import annotations

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.route import (
    Result,
    RoutePlan,
    enough_blocks,
    make_config,
    measure,
    percentile,
    summarize,
)
from services.bench.workloads import Chats, SharedPrefix, make
from services.core.errors import InvalidArgument

LOAD = make(SharedPrefix(num_requests=150, num_prefixes=12, prefix_tokens=1_000, rate_per_s=60.0))


def served(ttft_s: float, cached: int, predicted: int | None = None, worker: str = "a") -> Result:
    return Result(ttft_s, 0.01, 1_000, 10, cached, predicted, worker, "")


def test_one_document_compares_strategies_with_an_oracle() -> None:
    config = make_config(LOAD, num_blocks=100, changes={})
    told: list[str] = []
    plan = RoutePlan(config=config, strategies=("round_robin", "kv_aware"), num_workers=4)
    document = measure(LOAD, plan, tell=told.append)
    rows = {row["strategy"]: row for row in document["strategies"]}

    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert told == ["round_robin …", "kv_aware …"]
    assert [row["served"] for row in rows.values()] == [150, 150]
    assert rows["round_robin"]["hit_rate"] < rows["kv_aware"]["hit_rate"]
    assert rows["kv_aware"]["ttft_p50_ms"] < rows["round_robin"]["ttft_p50_ms"]
    # Only a router that expects something can be wrong.
    assert rows["round_robin"]["predicted_hit_rate"] is None
    assert rows["kv_aware"]["mispredicted"] < 0.1
    assert document["mesh"]["blocks_per_worker"] == 100
    assert document["mesh"]["block_tokens"] == LOAD.block_tokens
    assert document["ttft_curve_ms"].keys() == rows.keys()


def test_the_same_seed_measures_the_same() -> None:
    chats = make(Chats(num_requests=80))
    config = make_config(chats, num_blocks=100, changes={})
    plan = RoutePlan(config=config, strategies=("random", "kv_aware"), num_workers=3)
    documents = [measure(chats, plan) for _ in range(2)]
    for document in documents:
        for row in document["strategies"]:
            del row["took_s"]

    assert documents[0] == documents[1]


def test_a_cache_that_is_called_unlimited_forgets_nothing() -> None:
    num_blocks = enough_blocks(LOAD, 64)
    config = make_config(LOAD, num_blocks=num_blocks, changes={})
    plan = RoutePlan(config=config, strategies=("round_robin",), num_workers=1)
    [row] = measure(LOAD, plan)["strategies"]
    seen: set[bytes] = set()
    hits = 0
    for arrival in LOAD.arrivals:
        hits += sum(key in seen for key in arrival.chain)
        seen.update(arrival.chain)
    # Two that arrive at once may both compute a block, or one wait for the other's.
    assert row["hit_rate"] == pytest.approx(
        hits * LOAD.block_tokens / sum(each.prompt_tokens for each in LOAD.arrivals), rel=0.02
    )


def test_requests_that_no_worker_could_take_are_refused_before_all_else() -> None:
    config = make_config(LOAD, num_blocks=8, changes={})
    with pytest.raises(InvalidArgument, match="must be at least 19"):
        measure(LOAD, RoutePlan(config=config, strategies=("random",)))
    config = make_config(LOAD, num_blocks=80, changes={"worker.max_context_tokens": 1_000})
    with pytest.raises(InvalidArgument, match="must be at least 1160"):
        measure(LOAD, RoutePlan(config=config, strategies=("random",)))


def test_figures_are_of_those_that_were_served() -> None:
    lost = Result(math.nan, math.nan, 1_000, 10, 0, None, "", "QUEUE_FULL")
    results = [served(0.1, 500, 600), served(0.3, 0), lost]
    row = summarize(results, work=[1_500, 500], duration_s=2.0)

    assert (row["served"], row["failed"], row["failures"]) == (2, 1, {"QUEUE_FULL": 1})
    assert row["hit_rate"] == 0.25
    assert row["ttft_mean_ms"] == pytest.approx(200)
    assert row["requests_per_s"] == 1.0
    assert (row["work_max"], row["work_min"]) == (1.5, 0.5)
    assert (row["predicted_hit_rate"], row["actual_hit_rate"]) == (0.6, 0.5)
    assert row["mispredicted"] == pytest.approx(0.1)


def test_there_are_no_figures_of_nothing() -> None:
    row = summarize([], work=[0, 0], duration_s=1.0)
    assert row["hit_rate"] is row["ttft_p50_ms"] is row["tpot_ms"] is row["work_max"] is None


@given(st.lists(st.floats(0, 1e6), min_size=2), st.integers(1, 99))
def test_percentiles_are_those_of_the_standard_library(values: list[float], percent: int) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
    assert percentile(sorted(values), percent) == pytest.approx(expected, abs=1e-6)
