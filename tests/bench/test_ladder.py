from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench import ladder_live, ladder_virtual
from services.bench.ladder import (
    NAMES,
    RUNGS,
    Headroom,
    Result,
    Rung,
    Trait,
    climb,
    compare,
    summarize,
)
from services.bench.ladder_load import Load
from services.cli.mesh import LocalMesh
from services.cli.plans import run_quiet_mesh
from services.core.config import change, parse
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig

CHATS = Load(
    num_prefixes=3,
    prefix_tokens=256,
    zipf=1.0,
    suffix_tokens=64,
    output_tokens=8,
    batch_share=0.25,
)


def served(ttft_s: float, *, cached: int = 0, batch: bool = False) -> Result:
    return Result(ttft_s, 0.01, 1_000, 10, cached, batch, "")


def lost(error: str) -> Result:
    return Result(math.nan, math.nan, 1_000, 0, 0, False, error)


# --- rungs


def test_each_rung_has_all_that_those_below_it_have() -> None:
    rungs, without_split = climb()

    assert tuple(rung.name for rung in rungs) == NAMES
    for below, rung in pairwise(rungs):
        assert below.traits <= rung.traits
        assert below.settings.keys() <= rung.settings.keys()
    assert rungs[-1].traits == set(Trait)
    assert rungs[0].settings["router.routing_strategy"] == "round_robin"
    assert rungs[-1].settings["router.routing_strategy"] == "kv_aware"
    assert without_split is not None
    assert without_split.traits == rungs[-1].traits - {Trait.SPLIT}
    assert without_split.settings == rungs[-1].settings


def test_some_rungs_stand_on_the_baseline_alone_and_in_their_order() -> None:
    rungs, without_split = climb(["split", "cache"])

    assert [rung.name for rung in rungs] == ["baseline", "cache", "split"]
    assert rungs[-1].settings == RUNGS[0].settings
    assert without_split is not None
    assert without_split.traits == {Trait.CACHE}
    # Nothing is left to compare: the baseline is measured anyway.
    assert climb(["split"]).without_split is None
    assert climb(["cache", "tiers"]).without_split is None


@pytest.mark.parametrize("names", [[], ["cache", "speculation"]])
def test_a_rung_that_is_not_there_is_answered_with_those_that_are(names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=f"--rungs: .*{', '.join(NAMES)}"):
        climb(names)


@pytest.mark.parametrize("rung", climb().rungs, ids=lambda rung: rung.name)
def test_settings_of_a_rung_are_settings_that_a_running_mesh_takes(rung: Rung) -> None:
    change(MeshConfig(), rung.settings)


# --- the load


@given(
    st.integers(1, 60),
    st.floats(0.5, 100),
    st.integers(1, 5),
    st.sampled_from([None, 700]),
    st.integers(0, 5),
)
def test_a_load_has_what_it_is_said_to_have(
    num_requests: int, seconds: float, burst: int, batch_tokens: int | None, seed: int
) -> None:
    load = Load(
        num_prefixes=3,
        prefix_tokens=256,
        zipf=1.0,
        suffix_tokens=64,
        output_tokens=8,
        batch_share=0.25,
        batch_tokens=batch_tokens,
        batch_burst=burst,
    )
    arrivals = load.arrivals(num_requests=num_requests, seconds=seconds, seed=seed)

    assert arrivals == load.arrivals(num_requests=num_requests, seconds=seconds, seed=seed)
    assert len(arrivals) == num_requests
    assert arrivals == sorted(arrivals, key=lambda each: each.at_s)
    assert all(0 <= each.at_s <= seconds for each in arrivals)
    batch = [each for each in arrivals if each.request_class == "batch"]
    assert len(batch) == round(num_requests / 4)
    assert all(each.prompt_tokens == (batch_tokens or 320) for each in batch)
    if batch_tokens:
        assert all(not each.chain for each in batch)
        assert max(Counter(each.at_s for each in batch).values(), default=0) <= burst
    chats = [each for each in arrivals if each.request_class != "batch"]
    assert all(len(each.chain) == 4 for each in chats)
    assert len({each.chain for each in chats}) <= 3


def test_each_prefix_comes_as_often_as_asked_in_a_row() -> None:
    arrivals = CHATS.each_prefix(2)
    assert len(arrivals) == 6
    assert [arrivals[index].chain == arrivals[index + 1].chain for index in range(5)] == [
        *(True, False, True, False, True)
    ]


# --- figures


def test_a_rung_tells_of_those_that_completed() -> None:
    results = [
        served(0.1, cached=500),
        served(0.3, batch=True),
        lost("QUEUE_FULL"),
        lost("WORKER_DIED"),
    ]
    row = summarize(RUNGS[0], results, 2.0, Headroom())

    assert (row["completed"], row["refused"], row["failed"]) == (2, 1, 1)
    assert row["ttft_mean_ms"] == pytest.approx(200)
    assert row["interactive_ttft_mean_ms"] == pytest.approx(100)
    assert row["tpot_mean_ms"] == pytest.approx(10)
    assert row["hit_rate"] == 0.25
    assert (row["requests_per_s"], row["output_tokens_per_s"]) == (1.0, 10.0)


def test_shares_of_rungs_add_up_to_the_whole_those_that_lose_included() -> None:
    times_s = (1.0, 0.4, 0.5, 0.2)
    rows = [
        summarize(rung, [served(each), served(each)], 1.0, Headroom())
        for rung, each in zip(RUNGS, times_s, strict=False)
    ]
    document = compare(rows, None)

    baseline, *above = rows
    assert "ttft_mean_ms_change" not in baseline
    assert [row["ttft_mean_ms_change"] for row in above] == pytest.approx([-600, 100, -300])
    assert [row["ttft_mean_ms_share"] for row in above] == pytest.approx([0.75, -0.125, 0.375])
    assert [row["ttft_p95_ms_of_baseline"] for row in above] == pytest.approx([-0.6, 0.1, -0.3])
    assert document["whole"]["ttft_mean_ms"] == pytest.approx(-0.8)
    assert document["equal_completions"]


def test_rungs_that_served_different_numbers_are_not_called_equal() -> None:
    rows = [
        summarize(RUNGS[0], [served(1.0), served(1.0)], 1.0, Headroom()),
        summarize(RUNGS[1], [served(0.1), lost("QUEUE_FULL")], 1.0, Headroom()),
    ]
    assert not compare(rows, None)["equal_completions"]
    [whole, _] = rows
    assert not compare([whole], rows[1])["equal_completions"]


def test_where_nothing_was_served_nothing_is_made_up() -> None:
    rows = [summarize(rung, [lost("QUEUE_FULL")], 1.0, Headroom()) for rung in RUNGS[:2]]
    document = compare(rows, None)

    assert rows[1]["ttft_mean_ms"] is rows[1]["ttft_mean_ms_change"] is rows[1]["hit_rate"] is None
    assert document["whole"]["ttft_mean_ms"] is None
    json.dumps(document, allow_nan=False)


def test_headroom_is_the_least_and_what_was_held_the_most() -> None:
    headroom = Headroom()
    for held, occupied, running in ((5, 60, 1), (20, 90, 3), (0, 70, 0)):
        headroom.see(held=held, occupied=occupied, num_blocks=100, running=running, num_slots=8)

    assert headroom.figures() == {
        "blocks": 100,
        "blocks_held_peak": 20,
        "blocks_free_least": 10,
        "slots": 8,
        "running_peak": 3,
    }


# --- measured


def test_the_virtual_ladder_tells_what_each_rung_gives() -> None:
    told: list[str] = []
    document = ladder_virtual.measure(climb(), seconds=4.0, tell=told.append)
    rows = {row["rung"]: row for row in document["rungs"]}

    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert tuple(rows) == NAMES
    assert [line.removesuffix(" …") for line in told if line[:-2] in NAMES][: len(NAMES)] == [
        *NAMES
    ]
    assert document["equal_completions"]
    assert rows["baseline"]["completed"] == document["requests"]
    assert 0 < document["batch_requests"] < document["requests"]
    assert all(row["refused"] == row["failed"] == 0 for row in rows.values())
    assert rows["baseline"]["hit_rate"] == 0
    assert rows["cache"]["hit_rate"] < rows["routing"]["hit_rate"]
    # Prompts computed elsewhere do not hold answers up.
    assert rows["split"]["tpot_p95_ms"] < rows["routing"]["tpot_p95_ms"]
    assert document["whole"]["ttft_mean_ms"] < -0.5
    for row in rows.values():
        assert 0 < row["blocks_held_peak"] <= row["blocks"]
        assert 0 <= row["blocks_free_least"] < row["blocks"]
        assert 0 < row["running_peak"] <= row["slots"]


def test_tiers_find_again_what_small_caches_forgot() -> None:
    load = replace(ladder_virtual.LOAD, output_tokens=16, batch_share=0.3)
    document = ladder_virtual.measure(climb(["cache", "tiers"]), seconds=6.0, load=load)
    _, cache, tiers = document["rungs"]

    assert tiers["hit_rate"] > 1.5 * cache["hit_rate"]
    assert tiers["ttft_mean_ms"] < cache["ttft_mean_ms"]


def test_the_same_ladder_measures_the_same() -> None:
    ladder = climb(["cache", "split"])
    documents = [ladder_virtual.measure(ladder, seconds=1.0) for _ in range(2)]
    assert documents[0] == documents[1]


async def test_the_ladder_stands_on_real_processes_too() -> None:
    fast = {
        "engine": "simulated",
        "simulated": {"prefill_tokens_per_s": 4_000.0, "decode_step_ms": 2.0, "num_blocks": 64},
    }
    config = parse({"worker": fast, "kvstore": {"local_redis_mb": 0}})

    def open_mesh(num_workers: int, num_prefill: int) -> AbstractAsyncContextManager[LocalMesh]:
        return run_quiet_mesh(config, num_workers=num_workers, num_prefill_workers=num_prefill)

    document = await ladder_live.measure(climb(), open_mesh, seconds=1.0, load=CHATS, config=config)
    rows = {row["rung"]: row for row in document["rungs"]}

    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert (document["clock"], document["engine"]) == ("real", "simulated")
    assert tuple(rows) == NAMES
    assert document["equal_completions"]
    assert document["rate_per_s"] == pytest.approx(0.6 * document["capacity_per_s"])
    for row in (*rows.values(), document["without_split"]):
        assert row["completed"] == document["requests"]
        assert 0 < row["running_peak"] <= row["slots"] == 16
    assert rows["baseline"]["hit_rate"] == 0
    assert rows["routing"]["hit_rate"] > 0.5
