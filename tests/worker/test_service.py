"""A worker behind its gRPC server, with the simulated engine in a core of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from router.reports import SnapshotEvent, Tier
from router.watching import Holder
from services.control.node import ControlNode
from services.core import config as mesh_config
from services.core.errors import InvalidArgument
from services.core.keys import KEY_BYTES, extend_keys, join_keys, root_key, split_keys
from services.core.tokens import pack, unpack
from services.runtime.channels import MAX_MESSAGE_BYTES, open_channel
from tests.router.test_watching import Ears, watching
from tests.runtime.waiting import eventually
from tests.worker.test_watch import report
from worker.engines.contract import EngineInfo
from worker.node import WorkerNode
from worker.requests import check_request

MAX_CONTEXT = 256
# With this little room a client holds up the server at the first message it does not read.
NO_ROOM = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
CONFIG = mesh_config.parse(
    {
        "mesh": {"block_tokens": 16},
        "worker": {
            "engine": "simulated",
            "max_context_tokens": MAX_CONTEXT,
            "simulated": {"prefill_tokens_per_s": 20000, "decode_step_ms": 2, "num_blocks": 64},
        },
    }
)


INFO = EngineInfo(
    name="test",
    model="model",
    fingerprint=b"",
    vocabulary_size=49152,
    eos_token_ids=(2,),
    num_slots=1,
    max_context_tokens=MAX_CONTEXT,
    block_tokens=16,
    block_bytes=1,
    num_blocks=1,
    kv_in_pool=False,
)


class Running(NamedTuple):
    node: WorkerNode
    stub: Any  # worker_pb2_grpc.WorkerServiceAsyncStub, which exists for type checkers only
    control: Any


@pytest.fixture
async def worker() -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode(config=CONFIG))
        node = await stack.enter_async_context(WorkerNode(control=control.address))
        channel = await stack.enter_async_context(open_channel(node.address))
        to_control = await stack.enter_async_context(open_channel(control.address))
        yield Running(
            node,
            worker_pb2_grpc.WorkerServiceStub(channel),
            control_pb2_grpc.ControlServiceStub(to_control),
        )


def request(num_tokens: int = 40, max_tokens: int = 8, name: int = 1) -> worker_pb2.GenerateRequest:
    random = np.random.default_rng(name)
    token_ids = pack(random.integers(100, 1000, num_tokens, dtype=np.uint32))
    root = root_key(model="test", block_tokens=16)
    return worker_pb2.GenerateRequest(
        token_ids=token_ids,
        prefix_keys=join_keys([root, *extend_keys(root, token_ids, 16)]),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens),
    )


async def generate(worker: Running, wanted: worker_pb2.GenerateRequest) -> common_pb2.Finished:
    responses = [response async for response in worker.stub.Generate(wanted)]
    assert responses[-1].WhichOneof("event") == "finished"
    finished: common_pb2.Finished = responses[-1].finished
    count = sum(len(response.chunk.token_ids) // 4 for response in responses[:-1])
    assert count == finished.usage.completion_tokens
    return finished


async def violation(worker: Running, wanted: worker_pb2.GenerateRequest) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(worker, wanted)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    assert status is not None
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            return bad.field_violations[0].field, bad.field_violations[0].description
    raise AssertionError("no BadRequest")


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    assert status is not None
    found = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(found) for detail in status.details)
    return str(found.reason)


async def read_all(call: Any, into: list[worker_pb2.GenerateResponse]) -> None:
    async for response in call:
        into.append(response)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def idle(worker: Running) -> None:
    load = worker.node
    await until(lambda: load.load.num_running == load.load.num_waiting == 0)


async def test_an_answer_ends_with_usage_and_the_worker_s_part_of_the_ledger(
    worker: Running,
) -> None:
    finished = await generate(worker, request())

    assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert finished.usage.prompt_tokens == finished.usage.evaluated_prompt_tokens == 40
    assert finished.usage.completion_tokens == 8
    assert finished.engine == "simulated"
    ledger = finished.ledger
    owned = ledger.prefill_queue_ms + ledger.kv_load_ms + ledger.prefill_ms + ledger.transfer_ms
    assert 0 < owned + ledger.preprocess_ms <= ledger.total_ms
    assert ledger.queue_ms == ledger.route_ms == 0


def change(**fields: Any) -> worker_pb2.GenerateRequest:
    wanted = request()
    for name in fields:
        wanted.ClearField(name)  # type: ignore[arg-type]
    wanted.MergeFrom(worker_pb2.GenerateRequest(**fields))
    return wanted


def sampling(**fields: Any) -> worker_pb2.GenerateRequest:
    return change(sampling=common_pb2.SamplingParams(**fields))


BAD_REQUESTS = [
    (change(model="gpt-5"), "model"),
    (change(token_ids=b""), "token_ids"),
    (change(token_ids=b"\1\2\3"), "token_ids"),
    (change(token_ids=pack([1, 60_000])), "token_ids"),
    (change(token_ids=pack([5] * MAX_CONTEXT)), "token_ids"),
    (change(answer_ids=b"\1\2\3"), "answer_ids"),
    (change(answer_ids=pack([60_000])), "answer_ids"),
    (change(answer_ids=pack([5] * 9)), "answer_ids"),
    (change(prefix_keys=b"short"), "prefix_keys"),
    (change(prefix_keys=b"k" * 32), "prefix_keys"),
    (change(request_class=7), "request_class"),
    (sampling(max_tokens=0), "sampling.max_tokens"),
    (sampling(max_tokens=MAX_CONTEXT + 1), "sampling.max_tokens"),
    (sampling(temperature=float("nan")), "sampling.temperature"),
    (sampling(temperature=-1), "sampling.temperature"),
    (sampling(top_p=0), "sampling.top_p"),
    (sampling(min_p=1.5), "sampling.min_p"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    (sampling(presence_penalty=3), "sampling.presence_penalty"),
    (sampling(frequency_penalty=float("inf")), "sampling.frequency_penalty"),
    (sampling(logprobs=21), "sampling.logprobs"),
    (sampling(stop=["a"] * 17), "sampling.stop"),
    (sampling(stop=["a", ""]), "sampling.stop[1]"),
    (sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids"),
    (sampling(stop_token_ids=[1, 60_000]), "sampling.stop_token_ids[1]"),
    (sampling(stop_token_ids=[2**32 - 1]), "sampling.stop_token_ids[0]"),
]


@pytest.mark.parametrize(("wanted", "field"), BAD_REQUESTS, ids=map(str, range(len(BAD_REQUESTS))))
def test_a_bad_request_names_its_field(wanted: worker_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_request(wanted, INFO)

    assert [violation.field for violation in caught.value.violations] == [field]


async def test_a_bad_request_is_refused_with_its_field_and_bound(worker: Running) -> None:
    field, description = await violation(worker, sampling(max_tokens=0))

    assert field == "sampling.max_tokens"
    assert f"[1, {MAX_CONTEXT}]" in description


async def test_a_prompt_without_keys_is_answered_and_leaves_nothing(worker: Running) -> None:
    await generate(worker, change(prefix_keys=b""))
    await idle(worker)

    assert worker.node.load.num_blocks_cached == 0


async def test_an_answer_ends_where_the_context_does(worker: Running) -> None:
    finished = await generate(worker, request(MAX_CONTEXT - 10, max_tokens=200))

    assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert finished.usage.completion_tokens == 10


async def test_a_client_that_leaves_gives_everything_back(worker: Running) -> None:
    random = np.random.default_rng(0)
    for name, wait_s in enumerate(random.uniform(0, 0.05, 30)):
        call = worker.stub.Generate(request(200, max_tokens=50, name=name))
        try:
            async with asyncio.timeout(wait_s):
                async for _ in call:
                    pass
        except TimeoutError:
            pass
        call.cancel()
    await idle(worker)

    await until(lambda: worker.node.num_streams == 0)
    assert worker.node.load.num_blocks_reserved == 0


async def test_a_client_that_does_not_read_loses_its_slot_and_is_told(worker: Running) -> None:
    changes = {"worker.max_unread_tokens": "16"}
    await worker.control.SetConfig(control_pb2.SetConfigRequest(changes=changes))
    unread = request(max_tokens=200)
    unread.sampling.MergeFrom(common_pb2.SamplingParams(ignore_eos=True, logprobs=20))
    async with grpc.aio.insecure_channel(worker.node.address, options=NO_ROOM) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Generate(unread)
        await until(lambda: worker.node.num_streams == 1)
        await until(lambda: worker.node.num_streams == 0)
        await idle(worker)
        assert worker.node.is_idle
        assert (await generate(worker, request())).usage.completion_tokens == 8

        received: list[worker_pb2.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError, match="reads too slowly") as raised:
            await read_all(call, received)

    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(raised.value) == "SLOW_CLIENT"
    assert 16 < sum(len(response.chunk.token_ids) for response in received) // 4 < 200


async def test_a_deadline_ends_the_request_in_the_engine_too(worker: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in worker.stub.Generate(request(max_tokens=200), timeout=0.1):
            pass
    await idle(worker)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert worker.node.load.num_running == 0


async def test_a_watcher_learns_which_blocks_were_stored(worker: Running) -> None:
    wanted = request(40)
    call = worker.stub.Watch(worker_pb2.WatchRequest())
    snapshot = await call.read()
    await generate(worker, wanted)
    while (event := await call.read()).WhichOneof("event") == "load":
        pass
    call.cancel()

    assert snapshot.snapshot.prefix_keys == b""
    assert event.sequence == snapshot.sequence + 1
    assert split_keys(event.stored.prefix_keys)[:2] == split_keys(wanted.prefix_keys)[1:]


async def test_a_router_hears_of_more_blocks_than_one_message_can_carry(worker: Running) -> None:
    num = MAX_MESSAGE_BYTES // KEY_BYTES + 1
    hub, ears = worker.node._front.hub, Ears()
    hub.apply(report(stored=[key.to_bytes(KEY_BYTES, "big") for key in range(num)]))
    async with watching(ears) as following:
        following.follow([Holder("w", worker.node.address, Tier.WORKER)])
        await eventually(lambda: len(ears.held.get("w", ())) == num)
        hub.apply(report(stored=[num.to_bytes(KEY_BYTES, "big")]))
        await eventually(lambda: len(ears.held["w"]) == num + 1)
        assert following.num_broken == 0
    snapshots = [each.event for each in ears.reports["w"] if isinstance(each.event, SnapshotEvent)]
    assert [each.continues for each in snapshots] == [False] + [True] * (len(snapshots) - 1)
    assert [each.load is None for each in snapshots] == [each.continues for each in snapshots]


async def test_a_watcher_of_load_gets_no_keys(worker: Running) -> None:
    await generate(worker, request(40))
    call = worker.stub.Watch(worker_pb2.WatchRequest(load_only=True))
    snapshot = await call.read()
    await generate(worker, request(40, name=2))
    event = await call.read()
    call.cancel()

    assert snapshot.snapshot.prefix_keys == b""
    assert event.WhichOneof("event") == "load"
    assert event.load.prompt_tokens_evaluated > 0


async def test_who_follows_plans_without_a_word_is_left_alone(worker: Running) -> None:
    call = worker.stub.FollowPlans()
    await call.done_writing()

    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_draining_finishes_what_runs_and_refuses_what_comes(worker: Running) -> None:
    running = aiter(worker.stub.Generate(request(max_tokens=100)))
    await anext(running)

    too_soon = await worker.stub.Drain(worker_pb2.DrainRequest(), timeout=0.15)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(worker, request())
    drained = await worker.stub.Drain(worker_pb2.DrainRequest(), timeout=20)
    rest = [response async for response in running]
    members = (await worker.control.ListMembers(control_pb2.ListMembersRequest())).members

    assert too_soon.num_running == 1
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert drained.num_running == 0
    assert rest[-1].HasField("finished")
    assert [member.state for member in members] == [control_pb2.MEMBER_STATE_DRAINING]


async def test_stopping_ends_watches_and_finishes_requests(worker: Running) -> None:
    watch = aiter(worker.stub.Watch(worker_pb2.WatchRequest()))
    await anext(watch)
    running = aiter(worker.stub.Generate(request(max_tokens=50)))
    responses = [await anext(running)]

    stopping = asyncio.ensure_future(worker.node.close())
    responses += [response async for response in running]
    events = [event async for event in watch]
    await stopping

    ids = b"".join(response.chunk.token_ids for response in responses)
    assert len(unpack(ids, field="ids")) == 50
    assert responses[-1].HasField("finished")
    assert events
