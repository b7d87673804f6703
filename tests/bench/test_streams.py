from __future__ import annotations

import json
from dataclasses import replace

import pytest

from firsttoken.worker.v1 import worker_pb2
from services.bench import bubbles, streams
from services.bench.grpc_stream import Call
from services.bench.streams import Window
from services.bench.worker_load import Engine
from services.cli.plans import run_quiet_mesh

STEP_S = 0.02


async def test_streams_and_bubbles_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streams, bubbles):
        monkeypatch.setattr(module, "SETTLE_S", 0.1)
    config = replace(streams.CONFIG, worker=replace(streams.CONFIG.worker, num_slots=64))
    async with run_quiet_mesh(config, num_workers=1, with_kvstore=False) as mesh:
        async with streams.place(mesh.control, mesh.router, through="router") as at:
            document = await streams.measure(at, num_streams=[4], window_s=0.5)
        async with streams.place(mesh.control, mesh.router, through="worker") as at:
            slow = await streams.measure_slow(at, window_s=0.5, num_turns=1)
        idle = await bubbles.measure(mesh.router, mesh.control, step_ms=20.0, window_s=0.5)

    assert json.loads(json.dumps([document, slow, idle])) == [document, slow, idle]
    [row] = document["loads"]
    assert row["tokens_per_s"] > 0
    assert row["tokens_per_message"] >= 1
    assert row["tpot_p99_ms"] >= row["tpot_p50_ms"] >= streams.STEP_MS * 0.9
    assert set(row["cpu_us_per_token"]) >= {"worker front", "engine core", "router"}
    assert slow["slow_client_tokens"] <= 1
    assert slow["without"]["tokens"] > slow["slow_client_tokens"]
    for found in (idle["streams"], idle["load"]):
        assert found["steps"] > 0
        assert 0 < found["bubble_share"] < 1


@pytest.mark.parametrize("piece", [1, 4, 7, 100])
async def test_messages_are_found_however_they_come(piece: int) -> None:
    sent = [b"one", b"", b"three"]
    data = b"".join(b"\0" + len(each).to_bytes(4, "big") + each for each in sent)
    call = Call(1)
    call.pieces = [(float(at), data[at : at + piece]) for at in range(0, len(data), piece)]

    messages = list(call.messages())

    assert [message.data for message in messages] == sent
    assert [message.at_s for message in messages] == sorted(each.at_s for each in messages)


def test_what_comes_outside_the_window_does_not_count() -> None:
    engine = Engine(0, 0.0, {})
    even = [(at * STEP_S, 1) for at in range(100)]
    # Nothing for a while, then all at once.
    late = [*even[:50], (1.5, 26), *even[76:]]

    found = streams._distribution([even, late], [Window(0.5, 1.9, engine, {})])

    assert found["tokens"] == 2 * 70
    assert found["tpot_p50_ms"] == pytest.approx(STEP_S * 1e3)
    assert found["longest_gap_ms"] == pytest.approx((1.5 - 0.98) * 1e3)


def test_a_stream_that_stands_still_counts() -> None:
    found = streams._distribution([[]], [Window(0.0, 2.0, Engine(0, 0.0, {}), {})])

    assert found["tpot_p99_ms"] == 2000.0


def test_what_a_worker_counted_before_is_left_out() -> None:
    before = worker_pb2.Load(num_steps=10, engine_busy_s=1.0, bubble_s={"core": 0.5, "queue": 1.0})
    after = worker_pb2.Load(num_steps=30, engine_busy_s=1.4, bubble_s={"core": 0.6, "queue": 1.0})

    found = Engine.between(before, after).describe()

    assert (found["steps"], found["step_ms"]) == (20, pytest.approx(20.0))
    assert found["bubble_ms"] == {"core": pytest.approx(100.0)}
    assert found["bubble_share"] == pytest.approx(0.2)
