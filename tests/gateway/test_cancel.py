"""Clients that leave, clients that do not read, and a gateway that stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from services.core.config import flatten, nest, parse
from services.core.settings import MeshConfig
from tests.gateway.edges import (
    CHAT,
    Edge,
    chat_body,
    read_events,
    request_bytes,
    run_edge,
    run_gateway,
)
from tests.router.meshes import simulated
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = chat_body(max_tokens=2000, ignore_eos=True)


def configuration(**gateway: object) -> MeshConfig:
    timed = simulated(timing={"decode_step_ms": 2.0}, num_slots=16)
    return parse({**nest(flatten(timed)), "gateway": gateway})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[Edge]:
    async with run_edge(configuration(write_timeout_s=1.0)) as edge:
        yield edge


async def gone(edge: Edge) -> float:
    return await edge.metric("firsttoken_gateway_requests_total", status="499")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_client_that_leaves_frees_everything(
    edge: Edge, stream: bool, choices: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="services.gateway.app")
    before = await gone(edge)
    reader, writer = await edge.connect()
    writer.write(request_bytes(CHAT, {**ENDLESS, "n": choices, "stream": stream}))
    if stream:
        await reader.readuntil(b"assistant")
    await eventually(lambda: edge.node.gateway.routers.num_calls == choices)
    await eventually(lambda: edge.mesh.router.mesh.dispatcher.num_in_flight == choices)

    writer.close()

    await edge.idle()
    assert await gone(edge) == before + 1
    assert any(
        record.__dict__.get("firsttoken_fields", {}).get("status") == 499
        for record in caplog.records
    )


async def test_a_client_that_leaves_while_it_sends_frees_everything(edge: Edge) -> None:
    before = await gone(edge)
    for cut in (10, 150):
        _, writer = await edge.connect()
        writer.write(request_bytes(CHAT, chat_body(user="x" * 1000))[: cut + 100])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    await edge.idle()
    assert await gone(edge) == before + 2


async def test_a_client_that_does_not_read_holds_nobody_up(edge: Edge) -> None:
    """What it does not take fills the buffers on the way, and then it is let go."""
    reader, writer = await edge.connect()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    body = {**ENDLESS, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 8}
    writer.write(request_bytes(CHAT, body))
    await eventually(lambda: edge.mesh.router.mesh.dispatcher.num_in_flight == 8)

    answer = await edge.chat(max_tokens=5, ignore_eos=True)

    assert answer["usage"]["completion_tokens"] == 5
    await edge.idle()
    writer.close()
    assert not reader.at_eof()


async def test_a_client_that_reads_slowly_gets_all_of_it(edge: Edge) -> None:
    body = {**ENDLESS, "max_tokens": 300, "logprobs": True, "top_logprobs": 20, "stream": True}
    received = b""
    async with edge.http.stream("POST", CHAT, json=body) as response:
        async for part in response.aiter_raw():
            received += part
            await asyncio.sleep(0.001)

    *_, last = read_events(received)
    assert last["choices"][0]["finish_reason"] == "length"
    assert b'"usage"' not in received


async def test_the_time_for_an_answer_is_bounded(edge: Edge) -> None:
    async with run_edge(configuration(request_timeout_s=0.2)) as hasty:
        error = await hasty.refused(CHAT, ENDLESS)
        assert (error.status, error.type, error.code) == (504, "server_error", "deadline_exceeded")

        response = await hasty.http.post(CHAT, json={**ENDLESS, "stream": True})
        assert response.status_code == 200
        *_, last, nothing = response.content.split(b"\n\n")
        assert last.startswith(b'data: {"error":{"message":')
        assert b'"code":"deadline_exceeded"' in last
        assert nothing == b""
        assert b"[DONE]" not in response.content


async def test_a_gateway_that_stops_lets_answers_end(edge: Edge) -> None:
    body = {**ENDLESS, "max_tokens": 200, "stream": True}
    async with run_gateway(edge.mesh) as other:
        asking = asyncio.ensure_future(other.http.post(CHAT, json=body))
        await eventually(lambda: other.node.gateway.routers.num_calls)
        idle_reader, idle_writer = await other.connect()
        await eventually(lambda: other.node.server.num_connections == 2)

        await other.node.close()

        assert read_events((await asking).content)[-1]["choices"][0]["finish_reason"] == "length"
        assert await idle_reader.read() == b""
        idle_writer.close()
        with pytest.raises(httpx.ConnectError):
            await other.http.get("/health")


async def test_a_gateway_that_stops_does_not_wait_for_ever() -> None:
    async with run_edge(configuration(drain_s=0.1)) as edge, run_gateway(edge.mesh) as other:
        streamed = asyncio.ensure_future(other.http.post(CHAT, json={**ENDLESS, "stream": True}))
        whole = asyncio.ensure_future(other.http.post(CHAT, json=ENDLESS))
        await eventually(lambda: other.node.gateway.routers.num_calls == 2)
        await eventually(lambda: edge.mesh.router.mesh.dispatcher.num_in_flight == 2)

        await other.node.close()

        assert (await whole).status_code == 503
        assert (await whole).json()["error"]["code"] == "stopping"
        received = (await streamed).content
        assert b'"code":"stopping"' in received
        assert b"[DONE]" not in received


def open_sockets() -> int:
    """Of this process, which the whole mesh but its engine cores is in."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(descriptor).startswith("socket:")
    return found


async def test_two_hundred_streams_with_a_third_cancelled_leave_nothing(edge: Edge) -> None:
    seeded = random.Random(4)
    await edge.chat(max_tokens=1)
    await edge.idle()
    sockets, tasks = open_sockets(), len(asyncio.all_tasks())

    async def whole(number: int) -> None:
        body = chat_body(max_tokens=seeded.randint(5, 20), ignore_eos=True, stream=True)
        async with httpx.AsyncClient(base_url=edge.node.url, timeout=120, trust_env=False) as http:
            response = await http.post(CHAT, json=body)
            assert read_events(response.content)

    async def cut(number: int) -> None:
        _, writer = await edge.connect()
        writer.write(request_bytes(CHAT, {**ENDLESS, "stream": True, "n": 1 + number % 2}))
        await asyncio.sleep(seeded.random())
        if number % 3:
            writer.close()
        else:
            writer.transport.abort()

    await asyncio.gather(*(cut(n) if n % 3 == 0 else whole(n) for n in range(200)))

    await edge.idle()
    await eventually(lambda: open_sockets() <= sockets, "the sockets to be closed")
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, "the tasks to end")
    for name in ("requests_in_flight", "mesh_calls_in_flight"):
        expected = 1 if name == "requests_in_flight" else 0  # the request that asks
        assert await edge.metric(f"firsttoken_gateway_{name}") == expected
