"""A hand-off whose KV the engines move themselves: what the prefill worker promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from firsttoken.worker.v1 import worker_pb2
from services.runtime.channels import open_channel
from tests.runtime.waiting import eventually
from tests.worker.test_handoff import Pair, ask, config_of, idle, run_pair
from worker.engines import open_engine
from worker.handles import params_from_proto
from worker.handoff import METHOD, choose_transport
from worker.taking import HandoffFailed
from worker.wire import Received, decode

BY_MEMORY = worker_pb2.KV_TRANSPORT_SHARED_MEMORY
BY_GRPC = worker_pb2.KV_TRANSPORT_GRPC
BY_ENGINE = worker_pb2.KV_TRANSPORT_ENGINE


@pytest.mark.parametrize(
    ("setting", "same_host", "ours", "theirs", "chosen"),
    [
        ("auto", True, "nixl", "nixl", BY_ENGINE),
        ("auto", False, "nixl", "nixl", BY_ENGINE),
        ("auto", True, "nixl", "ucx", BY_MEMORY),
        ("auto", True, "nixl", "", BY_MEMORY),
        ("auto", True, "", "", BY_MEMORY),
        ("auto", False, "nixl", "ucx", BY_GRPC),
        ("auto", False, "", "", BY_GRPC),
        ("shared_memory", True, "nixl", "nixl", BY_MEMORY),
        ("grpc", True, "nixl", "nixl", BY_GRPC),
        ("engine", False, "nixl", "nixl", BY_ENGINE),
    ],
)
def test_engines_move_kv_only_where_both_do_it_the_same_way(
    setting: str, same_host: bool, ours: str, theirs: str, chosen: int
) -> None:
    transport = choose_transport(setting, same_host=same_host, ours=ours, theirs=theirs)

    assert transport == chosen


@pytest.mark.parametrize(
    ("setting", "ours", "theirs", "reason"),
    [
        ("engine", "nixl", "ucx", "nixl here, ucx there"),
        ("engine", "", "", "none here, none there"),
        ("shared_memory", "", "", "another host"),
    ],
)
def test_what_cannot_be_as_the_setting_wants_it_fails(
    setting: str, ours: str, theirs: str, reason: str
) -> None:
    with pytest.raises(HandoffFailed, match=reason):
        choose_transport(setting, same_host=False, ours=ours, theirs=theirs)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with run_pair(config_of(handoff_timeout_ms=2000)) as pair:
        yield pair


def open_prefill(channel: grpc.aio.Channel, pair: Pair, transport: int = BY_ENGINE) -> Any:
    start = worker_pb2.PrefillStart(
        request=ask(pair, 1, handed_off=False),
        transport=transport,  # type: ignore[arg-type]
        fingerprint=pair.prefill.fingerprint,
    )

    async def requests() -> AsyncIterator[worker_pb2.PrefillRequest]:
        yield worker_pb2.PrefillRequest(start=start)
        await asyncio.Event().wait()

    call = channel.stream_stream(
        METHOD,
        request_serializer=worker_pb2.PrefillRequest.SerializeToString,
        response_deserializer=decode,
    )
    return call(requests())


async def first_token(call: Any) -> worker_pb2.FirstToken:
    received = await next_response(call)
    assert isinstance(received, Received)
    return received.response.first_token


async def next_response(call: Any) -> Any:
    """Signs of life aside."""
    while True:
        received = await call.read()
        if not isinstance(received, Received) or not received.response.HasField("progress"):
            return received


async def test_the_call_stays_open_until_the_engine_has_fetched(pair: Pair) -> None:
    """This process is the decode engine."""
    async with open_channel(pair.prefill.address) as channel:
        call = open_prefill(channel, pair)
        first = await first_token(call)
        await asyncio.sleep(0.3)

        assert not call.done()
        assert pair.prefill.load.num_running == 1
        config = config_of(num_slots=1)
        engine = await asyncio.to_thread(open_engine, config, cores_shared_by=1)
        assert engine.transport is not None
        engine.transport.fetch(0, params_from_proto(first.disaggregated_params))
        await eventually(lambda: engine.transport.ended(), "the KV")  # type: ignore[union-attr]

        assert await next_response(call) is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
        engine.close()
    await idle(pair)


async def test_kv_that_nobody_fetches_is_given_up_after_a_while(pair: Pair) -> None:
    async with open_channel(pair.prefill.address) as channel:
        call = open_prefill(channel, pair)
        await first_token(call)
        with pytest.raises(grpc.aio.AioRpcError, match="has taken no block") as caught:
            await next_response(call)

        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    await idle(pair)


async def test_a_call_that_is_cancelled_withdraws_the_offer(pair: Pair) -> None:
    async with open_channel(pair.prefill.address) as channel:
        call = open_prefill(channel, pair)
        first = await first_token(call)
        call.cancel()
        await idle(pair)
        engine = await asyncio.to_thread(open_engine, config_of(num_slots=1), cores_shared_by=1)
        assert engine.transport is not None
        engine.transport.fetch(0, params_from_proto(first.disaggregated_params))
        ended: list[Any] = []
        await eventually(lambda: ended.extend(engine.transport.ended()) or ended)  # type: ignore[union-attr, func-returns-value]
        engine.close()

    assert "not known there" in ended[0].error


async def test_an_engine_that_moves_nothing_is_not_asked_to() -> None:
    config = config_of(timing={"engine_transport": False})
    async with run_pair(config) as pair, open_channel(pair.prefill.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="cannot move KV") as caught:
            await open_prefill(channel, pair).read()

        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
