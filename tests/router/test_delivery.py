"""Clients that do not read what they asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from services.core.settings import MeshConfig
from tests.router.meshes import Mesh, idle, run_mesh, run_workers, simulated
from tests.runtime.waiting import eventually

# With this little room a client holds up the server at the first message it does not read.
NO_ROOM = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
NUM_SLOTS = 4


def config(router: Mapping[str, Any] | None = None) -> MeshConfig:
    return simulated(router=router, num_slots=NUM_SLOTS)


def large() -> inference_pb2.GenerateRequest:
    """Its answer is a megabyte and more."""
    sampling = common_pb2.SamplingParams(max_tokens=1900, ignore_eos=True, logprobs=20)
    return inference_pb2.GenerateRequest(text="hi", sampling=sampling)


@asynccontextmanager
async def unread(mesh: Mesh, count: int) -> AsyncIterator[list[Any]]:
    async with grpc.aio.insecure_channel(mesh.router.address, options=NO_ROOM) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(large()) for _ in range(count)]
        yield calls
        for call in calls:
            call.cancel()


async def collect(call: Any, into: list[inference_pb2.GenerateResponse]) -> None:
    async for message in call:
        into.append(message)


def num_tokens_of(messages: list[inference_pb2.GenerateResponse]) -> int:
    return sum(len(message.chunk.token_ids) for message in messages) // 4


async def test_clients_that_do_not_read_leave_the_workers_to_others() -> None:
    async with (
        run_mesh(config()) as mesh,
        run_workers(mesh, 1),
        unread(mesh, 2 * NUM_SLOTS) as calls,
    ):
        await mesh.complete()
        await eventually(lambda: not mesh.at_work())

        received = [message async for message in calls[0]]
        assert received[-1].finished.usage.completion_tokens == 1900
        assert num_tokens_of(received) == 1900


async def test_an_answer_that_grows_too_large_unread_ends_and_says_so() -> None:
    limited = config({"max_unread_bytes": 10_000})
    async with (
        run_mesh(limited) as mesh,
        run_workers(mesh, 1),
        unread(mesh, 1) as [call],
    ):
        await eventually(mesh.at_work)
        await eventually(lambda: not mesh.at_work())

        received: list[inference_pb2.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError, match="reads too slowly") as raised:
            await collect(call, received)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < num_tokens_of(received) < 1900
        await idle(mesh.router)


async def test_clients_that_leave_unread_answers_are_nothing_to_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_mesh(config()) as mesh, run_workers(mesh, 1):
        for pause_s in (0.0, 0.05, 0.3):
            async with unread(mesh, NUM_SLOTS):
                await asyncio.sleep(pause_s)
            await idle(mesh.router)
        await mesh.complete()

    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
