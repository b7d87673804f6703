"""The client against a real mesh."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import grpc
import pytest
import pytest_asyncio
from grpc.aio import AioRpcError, Metadata

from firsttoken.client import GenerationStream, MeshClient, MeshError, _finish_reason
from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from tests.conftest import Mesh, MeshFactory
from tests.router.meshes import endless, idle, simulated

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(mesh_of: MeshFactory) -> AsyncIterator[Mesh]:
    async with mesh_of(simulated(timing={"decode_step_ms": 3.0})) as mesh:
        yield mesh


async def drain(stream: GenerationStream) -> None:
    async for _ in stream:
        pass


async def test_streams_pieces_that_add_up_to_the_answer(mesh: Mesh) -> None:
    stream = mesh.client.generate("Once upon a time", max_tokens=6, ignore_eos=True)
    pieces = [piece async for piece in stream]

    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == stream.answer.text
    assert sum((piece.token_ids for piece in pieces), ()) == stream.answer.token_ids


async def test_ends_once_and_for_all(mesh: Mesh) -> None:
    stream = mesh.client.generate("Once", max_tokens=2)
    _ = [piece async for piece in stream]

    assert [piece async for piece in stream] == []
    stream.cancel()
    assert stream.answer is stream.answer


async def test_has_no_answer_before_the_end(mesh: Mesh) -> None:
    async with endless(mesh.client) as stream:
        await anext(stream)
        with pytest.raises(RuntimeError, match="not complete"):
            _ = stream.answer


async def test_an_end_that_it_does_not_know_has_its_number() -> None:
    finished = common_pb2.Finished.FromString(b"\x08\x63")

    assert _finish_reason(finished.finish_reason) == "99"


async def test_gives_logprobs_when_asked(mesh: Mesh) -> None:
    answer = await mesh.client.complete("Once", max_tokens=3, logprobs=2, ignore_eos=True)

    assert [each.chosen.token_id for each in answer.logprobs] == list(answer.token_ids)
    for each in answer.logprobs:
        assert each.top[0] == each.chosen  # greedy
        assert each.top[0].logprob > each.top[1].logprob


async def test_says_what_ended_the_answer(mesh: Mesh) -> None:
    free = await mesh.client.complete("Once", max_tokens=8, ignore_eos=True)
    stop = free.text[2:5]
    answer = await mesh.client.complete("Once", max_tokens=8, ignore_eos=True, stop=stop)

    assert (free.finish_reason, free.stop_string, free.stop_token_id) == ("length", None, None)
    assert (answer.finish_reason, answer.stop_string) == ("stop", stop)
    assert answer.text == free.text[: free.text.index(stop)]


async def test_leaving_the_stream_stops_the_request(mesh: Mesh) -> None:
    async with endless(mesh.client) as stream:
        await anext(stream)
    await idle(mesh.router)


async def test_cancelling_the_stream_stops_the_request_and_says_so(mesh: Mesh) -> None:
    stream = endless(mesh.client)
    await anext(stream)
    stream.cancel()
    with pytest.raises(MeshError) as failure:
        await drain(stream)

    assert failure.value.code is grpc.StatusCode.CANCELLED
    await idle(mesh.router)


async def test_cancelling_the_task_stops_the_request(mesh: Mesh) -> None:
    task = asyncio.ensure_future(mesh.client.complete("On", max_tokens=2000, ignore_eos=True))
    await asyncio.wait({task}, timeout=0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(mesh.router)


async def test_a_timeout_of_asyncio_stays_one(mesh: Mesh) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await mesh.client.complete("On", max_tokens=2000, ignore_eos=True)
    await idle(mesh.router)


async def test_closing_the_client_ends_its_requests(mesh: Mesh) -> None:
    async with MeshClient(mesh.router.address) as client:
        stream = endless(client)
        await anext(stream)
    with pytest.raises(MeshError) as failure:
        await drain(stream)

    assert failure.value.code is grpc.StatusCode.CANCELLED
    await idle(mesh.router)


@pytest.mark.parametrize("num_chunks", [0, 1])
async def test_a_failure_after_the_first_token_calls_no_decoding_transfer(num_chunks: int) -> None:
    told = common_pb2.Ledger(queue_ms=1.0, total_ms=1.5).SerializeToString()
    failure = AioRpcError(
        grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(("firsttoken-ledger-bin", told))
    )
    chunk = inference_pb2.GenerateResponse(chunk=common_pb2.Chunk(token_ids=bytes(4)))
    call = AsyncMock()
    call.read.side_effect = [*[chunk] * num_chunks, failure]
    with pytest.raises(MeshError) as caught:
        await drain(GenerationStream(call, time.monotonic() - 60.0))

    assert bool(caught.value.ledger) is not bool(num_chunks)
    assert sum(caught.value.ledger.values()) == pytest.approx(caught.value.elapsed_ms, abs=0.51)


async def test_refuses_to_work_unless_entered(mesh: Mesh) -> None:
    client = MeshClient(mesh.router.address)
    with pytest.raises(RuntimeError, match="enter the MeshClient first"):
        client.generate("hi")


@pytest.mark.parametrize("deadline_s", [0, -1, math.nan, math.inf, 1e300])
async def test_refuses_a_deadline_that_is_none(mesh: Mesh, deadline_s: float) -> None:
    with pytest.raises(ValueError, match=r"deadline_s must be in \(0, 31622400\]"):
        mesh.client.generate("hi", deadline_s=deadline_s)


async def test_says_that_nobody_answers() -> None:
    async with MeshClient("127.0.0.1:1") as client:
        with pytest.raises(MeshError) as failure:
            await client.complete("hi")

    assert failure.value.code is grpc.StatusCode.UNAVAILABLE
    assert failure.value.message
