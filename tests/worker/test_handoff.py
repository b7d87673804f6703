"""Two workers, each with a core of its own: one computes the prompt, the other answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.control.node import ControlNode
from services.core import config as mesh_config
from services.core.keys import extend_keys, join_keys, root_key
from services.core.settings import MeshConfig
from services.core.tokens import pack, unpack
from services.runtime.channels import open_channel
from worker.node import Role, WorkerNode

BLOCK_TOKENS = 16


TRANSPORTS = ("shared_memory", "grpc", "engine")


def config_of(*, timing: Mapping[str, Any] | None = None, **worker: Any) -> MeshConfig:
    simulated = {
        "prefill_tokens_per_s": 20000,
        "decode_step_ms": 1,
        "num_blocks": 256,
        "engine_transport": True,
        **(timing or {}),
    }
    return mesh_config.parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "worker": {
                "engine": "simulated",
                "max_context_tokens": 1024,
                "num_inbox_blocks": 16,
                "num_outbox_blocks": 16,
                "handoff_min_tokens": 64,
                "simulated": simulated,
                **worker,
            },
        }
    )


class Pair(NamedTuple):
    prefill: WorkerNode
    decode: WorkerNode
    stub: Any
    # As the setting says.
    transport: str

    @property
    def nodes(self) -> tuple[WorkerNode, WorkerNode]:
        return self.prefill, self.decode


@asynccontextmanager
async def run_pair(config: MeshConfig) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode(config=config))
        prefill, decode = [
            await stack.enter_async_context(WorkerNode(control=control.address, role=role))
            for role in (Role.PREFILL, Role.DECODE)
        ]
        channel = await stack.enter_async_context(open_channel(decode.address))
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        yield Pair(prefill, decode, stub, config.worker.handoff_transport)


@pytest.fixture(params=TRANSPORTS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with run_pair(config_of(handoff_transport=request.param)) as pair:
        yield pair


def ask(
    pair: Pair, name: int, *, num_tokens: int = 300, max_tokens: int = 8, handed_off: bool = True
) -> worker_pb2.GenerateRequest:
    random = np.random.default_rng(name)
    token_ids = pack(random.integers(100, 1000, num_tokens, dtype=np.uint32))
    root = root_key(model="test", block_tokens=BLOCK_TOKENS)
    return worker_pb2.GenerateRequest(
        token_ids=token_ids,
        prefix_keys=join_keys([root, *extend_keys(root, token_ids, BLOCK_TOKENS)]),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=7),
        prefill_address=pair.prefill.address if handed_off else "",
    )


class Answered(NamedTuple):
    token_ids: tuple[int, ...]
    finished: common_pb2.Finished


async def answer(pair: Pair, request: worker_pb2.GenerateRequest) -> Answered:
    responses = [response async for response in pair.stub.Generate(request)]
    ids = b"".join(response.chunk.token_ids for response in responses)
    return Answered(tuple(unpack(ids, field="ids").tolist()), responses[-1].finished)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def idle(pair: Pair) -> None:
    """Nothing is in use on either side."""
    await until(lambda: all(node.is_idle for node in pair.nodes))
    for node in pair.nodes:
        assert node.load.num_running == node.load.num_waiting == 0
        assert node.load.num_blocks_reserved == 0


def core_pid(pair: Pair, index: int) -> int:
    """The engine cores are this process's children, in the order they were started."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as children:
        pids = [int(pid) for pid in children.read().split()]
    cores = []
    for pid in pids:
        with open(f"/proc/{pid}/cmdline") as command:
            if "worker.core" in command.read():
                cores.append(pid)
    return cores[index]


async def expected(pair: Pair, request: worker_pb2.GenerateRequest) -> tuple[int, ...]:
    """The answer of the prefill worker on its own, with nothing reused."""
    alone = worker_pb2.GenerateRequest()
    alone.CopyFrom(request)
    alone.ClearField("prefill_address")
    alone.ClearField("prefix_keys")
    async with open_channel(pair.prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return (await answer(pair._replace(stub=stub), alone)).token_ids


async def test_a_handed_off_prompt_gives_the_same_answer_and_decode_computes_nothing(
    pair: Pair,
) -> None:
    request = ask(pair, 1)
    handed_off = await answer(pair, request)
    await idle(pair)
    path = handed_off.finished.kv_path

    assert (path.handed_off, path.prefill_worker_id) == (True, pair.prefill.id)
    assert path.transport == pair.transport
    assert path.handoff_gap_ms > 0
    assert handed_off.finished.usage.evaluated_prompt_tokens == 300
    assert pair.prefill.load.prompt_tokens_evaluated == 300
    assert pair.decode.load.prompt_tokens_evaluated == 0
    assert handed_off.finished.handoff_ms > 0
    assert handed_off.token_ids == await expected(pair, request)


async def test_eight_at_once_through_a_small_inbox_answer_as_alone(pair: Pair) -> None:
    """Each prompt has more blocks than the whole inbox."""
    requests = [ask(pair, name, num_tokens=400 + name) for name in range(8)]
    alone = [await expected(pair, request) for request in requests]
    await idle(pair)
    evaluated = pair.decode.load.prompt_tokens_evaluated

    together = await asyncio.gather(*(answer(pair, request) for request in requests))
    await idle(pair)

    assert [answered.token_ids for answered in together] == alone
    reasons = {answered.finished.kv_path.reason for answered in together}
    assert reasons == {"the prompt was long enough"}
    assert pair.decode.load.prompt_tokens_evaluated == evaluated


async def test_only_blocks_that_decode_lacks_are_sent(pair: Pair) -> None:
    await answer(pair, ask(pair, 1, num_tokens=320, handed_off=False))
    await idle(pair)
    evaluated = pair.decode.load.prompt_tokens_evaluated
    longer = ask(pair, 1, num_tokens=640)  # the same beginning

    answered = await answer(pair, longer)
    await idle(pair)

    assert answered.finished.kv_path.handed_off
    assert pair.decode.load.prompt_tokens_cached == 320
    assert pair.decode.load.prompt_tokens_evaluated == evaluated
    assert answered.token_ids == await expected(pair, longer)


async def test_a_short_uncached_part_is_computed_where_it_is_decoded(pair: Pair) -> None:
    await answer(pair, ask(pair, 1, num_tokens=320))
    await idle(pair)
    answered = await answer(pair, ask(pair, 1, num_tokens=330))

    assert not answered.finished.kv_path.handed_off
    assert "below" in answered.finished.kv_path.reason
    assert answered.finished.usage.cached_tokens == 320


async def test_an_answer_that_began_elsewhere_is_handed_off_with_what_was_told(
    pair: Pair,
) -> None:
    """The prompt and the told part of the answer end within different blocks."""
    request = ask(pair, 1, max_tokens=40)
    whole = await expected(pair, request)
    request.answer_ids = pack(whole[:9])
    resumed = await answer(pair, request)
    await idle(pair)

    assert resumed.finished.kv_path.handed_off
    assert not resumed.finished.kv_path.prefill_failed
    assert resumed.token_ids == whole[9:]
    assert pair.decode.load.prompt_tokens_evaluated == 0


async def test_a_first_token_that_ends_the_answer_cancels_the_transfer(pair: Pair) -> None:
    before = pair.decode.load
    answered = await answer(pair, ask(pair, 1, max_tokens=1))
    await idle(pair)
    load = pair.decode.load

    assert len(answered.token_ids) == 1
    assert answered.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert load.prompt_tokens_evaluated == before.prompt_tokens_evaluated
    assert load.decode_tokens_evaluated == before.decode_tokens_evaluated


async def test_clients_that_leave_at_any_moment_free_both_sides(pair: Pair) -> None:
    random = np.random.default_rng(0)
    for name, wait_s in enumerate(random.uniform(0, 0.08, 40)):
        call = pair.stub.Generate(ask(pair, name, num_tokens=600, max_tokens=50))
        try:
            async with asyncio.timeout(wait_s):
                async for _ in call:
                    pass
        except TimeoutError:
            pass
        call.cancel()
    await idle(pair)

    request = ask(pair, 99)
    assert (await answer(pair, request)).token_ids == await expected(pair, request)


async def test_decode_computes_itself_when_the_prefill_core_dies(pair: Pair) -> None:
    request = ask(pair, 1, num_tokens=900)
    alone = await expected(pair, request)
    running = asyncio.ensure_future(answer(pair, request))
    await until(lambda: pair.prefill.num_streams > 0)
    os.kill(core_pid(pair, 0), signal.SIGKILL)
    answered = await running

    assert answered.token_ids == alone
    assert answered.finished.kv_path.prefill_failed
    assert "prefill worker lost" in answered.finished.kv_path.reason


async def test_a_prefill_worker_that_is_gone_costs_nothing_but_its_help(pair: Pair) -> None:
    request = ask(pair, 1)
    request.prefill_address = "127.0.0.1:1"
    answered = await answer(pair, request)

    assert len(answered.token_ids) == 8
    assert not answered.finished.kv_path.handed_off
    assert "gone" in answered.finished.kv_path.reason


async def test_the_ledger_adds_up_across_the_hand_off(pair: Pair) -> None:
    ledger = (await answer(pair, ask(pair, 1))).finished.ledger
    owned = ledger.prefill_queue_ms + ledger.kv_load_ms + ledger.prefill_ms + ledger.transfer_ms

    assert ledger.prefill_ms >= 300 / 20000 * 1e3
    assert 0 < owned <= ledger.total_ms + 0.001


async def test_a_decode_worker_that_takes_nothing_slows_prefill_down() -> None:
    """The prefill worker holds its outbox and its slots, and no byte more."""
    async with run_pair(config_of(num_outbox_blocks=4, num_slots=2)) as pair:
        async with open_channel(pair.prefill.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            calls = [open_prefill(stub, pair, name) for name in range(6)]
            await until(lambda: pair.prefill.load.num_waiting == 4)

            assert pair.prefill.load.num_running == 2
            for call in calls:
                call.cancel()
        await idle(pair)


async def test_a_call_that_cannot_be_served_is_refused_with_its_field(pair: Pair) -> None:
    refused: list[dict[str, Any]] = [
        {"transport": worker_pb2.KV_TRANSPORT_UNSPECIFIED},
        {"fingerprint": "00"},
        {"credit_blocks": 0},
        {"first_block": 99},
    ]
    for number, wrong in enumerate(refused):
        [field] = wrong
        async with open_channel(pair.prefill.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = open_prefill(stub, pair, number, **wrong)
            with pytest.raises(grpc.aio.AioRpcError, match=f"start.{field}") as refusal:
                await call.read()

        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await idle(pair)


def open_prefill(stub: Any, pair: Pair, name: int, **fields: Any) -> Any:
    """A decode worker that gives credit for one block, and never for more."""
    usual = {
        "credit_blocks": 1,
        "transport": worker_pb2.KV_TRANSPORT_GRPC,
        "fingerprint": pair.prefill.fingerprint,
    }
    request = ask(pair, name, handed_off=False)
    start = worker_pb2.PrefillStart(request=request, **{**usual, **fields})

    async def requests() -> AsyncIterator[worker_pb2.PrefillRequest]:
        yield worker_pb2.PrefillRequest(start=start)
        await asyncio.Event().wait()

    return stub.Prefill(requests())
