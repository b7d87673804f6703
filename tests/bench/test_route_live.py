from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.bench import route, route_live
from services.bench.workloads import SharedPrefix, make
from services.cli.plans import run_quiet_mesh
from services.core.workload import Arrival

REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"


def chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


BROKEN_OFF = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunk(b'data: {"choices":[]}\n\n')
    + chunk(b'data: {"error":{"message":"the router is gone"}}\n\n')
    + chunk(b"")
)


async def test_real_processes_agree_with_virtual_time_about_what_is_cached() -> None:
    load = make(SharedPrefix(num_requests=60, rate_per_s=30, num_prefixes=5, prefix_tokens=500))
    fast = {
        "worker.simulated.prefill_tokens_per_s": 200_000.0,
        "worker.simulated.decode_step_ms": 1.0,
    }
    # Room for all: on a slow machine too, what is cached depends on the order alone, but for
    # a prefix that comes to be at one worker or at both.
    config = route.make_config(load, num_blocks=400, changes=fast)
    plan = route.RoutePlan(config=config, strategies=("round_robin", "kv_aware"), num_workers=2)
    virtual = await asyncio.to_thread(route.measure, load, plan)
    mesh = run_quiet_mesh(config, num_workers=2, with_kvstore=False, with_gateway=True)
    async with mesh as running:
        live = await route_live.measure(running.http, running.control, load, plan)

    assert json.loads(json.dumps(live, allow_nan=False)) == live
    assert (live["clock"], virtual["clock"]) == ("live", "virtual")
    assert live["workload"] == virtual["workload"]
    for seen, expected in zip(live["strategies"], virtual["strategies"], strict=True):
        assert (seen["strategy"], seen["served"]) == (expected["strategy"], 60)
        assert seen["hit_rate"] == pytest.approx(expected["hit_rate"], abs=0.08)
        assert seen["ttft_p50_ms"] > 0
        assert seen["late_p99_ms"] >= 0
    by_turns, by_cost = live["strategies"]
    assert by_turns["predicted_hit_rate"] is None
    assert by_cost["predicted_hit_rate"] == pytest.approx(by_cost["hit_rate"], abs=0.2)


@asynccontextmanager
async def edge(answer: bytes) -> AsyncIterator[str]:
    """An HTTP edge that gives each request this answer, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (REFUSAL, "429 Too Many Requests"),
        (b"", "the connection was closed"),
    ],
)
async def test_a_request_that_fails_has_a_reason_and_stops_no_other(
    answer: bytes, error: str
) -> None:
    arrivals = [Arrival(0.0, (), 10, 1), Arrival(0.01, (), 10, 1)]
    async with edge(answer) as url:
        sent = await route_live.send_all(url, arrivals, [b"[1]", b"[2]"], "salt")

    assert [each.result.error for each in sent] == [error, error]


async def test_an_answer_that_is_broken_off_fails_its_request_and_a_lost_connection_none() -> None:
    arrivals = [Arrival(0.0, (), 10, 2), Arrival(0.3, (), 10, 2)]
    async with edge(BROKEN_OFF) as url:
        sent = await route_live.send_all(url, arrivals, [b"[1]", b"[2]"], "salt")

    assert [each.result.error for each in sent] == ["the router is gone"] * 2
