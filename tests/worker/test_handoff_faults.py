"""What happens to a hand-off when a part of it dies, stops or leaves.

Engines are simulated, and slow: a prompt takes half a second to compute, and its KV
another half to arrive after the first token.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import pytest_asyncio

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.control.node import ControlNode
from services.core import config as mesh_config
from services.core.keys import extend_keys, join_keys, root_key
from services.core.settings import MeshConfig
from services.core.tokens import pack, unpack
from services.runtime.channels import open_channel
from tests.router.meshes import run_process
from tests.runtime.waiting import eventually
from worker.messages import CoreLoad
from worker.node import Role, WorkerNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_TOKENS = 16
PROMPT_TOKENS = 512
NUM_OUTBOX = 12


def config_of(transport: str) -> MeshConfig:
    return mesh_config.parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "worker": {
                "engine": "simulated",
                "num_slots": 4,
                "max_context_tokens": 1024,
                "max_step_ms": 100,
                "num_inbox_blocks": 16,
                "num_outbox_blocks": NUM_OUTBOX,
                "handoff_transport": transport,
                "handoff_min_tokens": 64,
                "handoff_export_blocks": 0,
                "handoff_timeout_ms": 60_000,
                "simulated": {
                    "prefill_tokens_per_s": 1000,
                    "decode_step_ms": 2,
                    "num_blocks": 256,
                    "kv_bytes_per_token": 16 << 10,  # 8 MiB a prompt
                    "transfer_gb_per_s": 0.03,
                    "engine_transport": True,
                },
            },
        }
    )


# Returns when the hand-off has come so far, given its first token's event and the address of
# its prefill worker.
Stage = Callable[[asyncio.Event, str], Awaitable[None]]

NAMES = itertools.count()


class Workers(NamedTuple):
    """In this process, each with a core of its own."""

    control: ControlNode
    prefill: WorkerNode
    decode: WorkerNode

    async def idle(self) -> None:
        """Nothing is in use anywhere."""
        nodes = (self.prefill, self.decode)
        await eventually(lambda: all(node.is_idle for node in nodes), "the workers to be idle")
        await eventually(
            lambda: not any(in_use(node.load) for node in nodes), "all to be given back"
        )

    async def ready(self) -> None:
        """Both cores have their engines, and decode knows the prefill worker."""
        nodes = (self.prefill, self.decode)
        await eventually(lambda: all(node.load.num_blocks_total for node in nodes), "new cores")
        await self.until_known(self.prefill.address)
        await self.idle()

    async def until_known(self, prefill: str) -> None:
        await eventually(lambda: hands_off(self.decode.address, prefill), "a hand-off")


async def hands_off(decode: str, prefill: str) -> bool:
    request = ask(new_name(), prefill, num_tokens=96, max_tokens=2)
    try:
        return (await answer(decode, request)).finished.kv_path.handed_off
    except grpc.aio.AioRpcError:  # its core restarts
        return False


def new_name() -> int:
    """Of a prompt that nobody has seen."""
    return next(NAMES)


def in_use(load: CoreLoad | worker_pb2.Load) -> int:
    return load.num_running + load.num_waiting + load.num_blocks_reserved + load.num_outbox_blocks


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shared_memory", "engine"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        config = config_of(request.param)
        control = await stack.enter_async_context(ControlNode(config=config))
        prefill, decode = [
            await stack.enter_async_context(WorkerNode(control=control.address, role=role))
            for role in (Role.PREFILL, Role.DECODE)
        ]
        workers = Workers(control, prefill, decode)
        await workers.ready()
        yield workers


def ask(
    name: int, prefill: str = "", *, max_tokens: int = 12, num_tokens: int = PROMPT_TOKENS
) -> worker_pb2.GenerateRequest:
    random = np.random.default_rng(name)
    token_ids = pack(random.integers(100, 1000, num_tokens, dtype=np.uint32))
    root = root_key(model="test", block_tokens=BLOCK_TOKENS)
    return worker_pb2.GenerateRequest(
        token_ids=token_ids,
        prefix_keys=join_keys([root, *extend_keys(root, token_ids, BLOCK_TOKENS)]),
        sampling=common_pb2.SamplingParams(
            max_tokens=max_tokens, temperature=1.0, seed=7, ignore_eos=True
        ),
        prefill_address=prefill,
    )


class Answered(NamedTuple):
    token_ids: tuple[int, ...]
    finished: common_pb2.Finished


async def answer(
    address: str, request: worker_pb2.GenerateRequest, first: asyncio.Event | None = None
) -> Answered:
    ids = b""
    async with open_channel(address) as channel:
        async for response in worker_pb2_grpc.WorkerServiceStub(channel).Generate(request):
            ids += response.chunk.token_ids
            if first is not None:
                first.set()
    return Answered(tuple(unpack(ids, field="ids").tolist()), response.finished)


async def alone(workers: Workers, name: int, **options: Any) -> tuple[int, ...]:
    """The answer to a prompt that nothing is reused for and nobody else computes."""
    request = ask(name, **options)
    request.ClearField("prefix_keys")
    return (await answer(workers.prefill.address, request)).token_ids


async def load_of(address: str) -> worker_pb2.Load:
    async with open_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Watch(
            worker_pb2.WatchRequest(load_only=True)
        )
        load = (await anext(aiter(call))).snapshot.load
        call.cancel()
    return load


async def while_computing(first: asyncio.Event, prefill: str) -> None:
    async def is_computing() -> bool:
        return (await load_of(prefill)).num_running > 0

    await eventually(is_computing, "the prompt to be computed")


async def while_sending(first: asyncio.Event, prefill: str) -> None:
    """The first token is out, and its KV is on the way."""
    await first.wait()


STAGES = pytest.mark.parametrize("stage", [while_computing, while_sending])


def core_of(index: int) -> int:
    """The engine cores are this process's children, in the order of their nodes."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    pids = [int(pid) for pid in path.read_text().split()]
    cores = [pid for pid in pids if "worker.core" in Path(f"/proc/{pid}/cmdline").read_text()]
    return cores[index]


@STAGES
@pytest.mark.parametrize("part", ["front", "core"])
async def test_a_prefill_worker_that_dies_changes_no_answer(
    workers: Workers, stage: Stage, part: str
) -> None:
    """Decode computes what has not come; another's hand-off goes on."""
    names = new_name(), new_name()
    expected = [await alone(workers, name) for name in names]
    await workers.idle()
    async with run_process("worker", workers.control.address, "--role", "prefill") as victim:
        await workers.until_known(victim.address)
        first = asyncio.Event()
        address = workers.decode.address
        disturbed = asyncio.create_task(answer(address, ask(names[0], victim.address), first))
        other = asyncio.create_task(answer(address, ask(names[1], workers.prefill.address)))
        await stage(first, victim.address)
        os.kill(victim.pid_of(part), signal.SIGKILL)
        answers = [await disturbed, await other]

    assert [each.token_ids for each in answers] == expected
    path = answers[0].finished.kv_path
    assert path.prefill_failed
    assert path.handed_off == (stage is while_sending)
    assert answers[1].finished.kv_path.reason == "the prompt was long enough"
    await workers.idle()


@STAGES
@pytest.mark.parametrize("part", ["front", "core"])
async def test_a_decode_worker_that_dies_frees_its_prefill_worker(
    workers: Workers, stage: Stage, part: str
) -> None:
    """Its caller hears of it and may go elsewhere; another's hand-off goes on."""
    lost, other_name = new_name(), new_name()
    expected = await alone(workers, other_name)
    await workers.idle()
    async with run_process("worker", workers.control.address, "--role", "decode") as victim:
        await answer(victim.address, ask(new_name(), num_tokens=32))
        first = asyncio.Event()
        prefill = workers.prefill.address
        disturbed = asyncio.create_task(answer(victim.address, ask(lost, prefill), first))
        other = asyncio.create_task(answer(workers.decode.address, ask(other_name, prefill)))
        await stage(first, prefill)
        os.kill(victim.pid_of(part), signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await disturbed
        answered = await other

        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert answered.token_ids == expected
        assert answered.finished.kv_path.handed_off
        await workers.idle()


@STAGES
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_core_that_dies_leaves_no_trace_in_its_front(
    workers: Workers, stage: Stage, role: str
) -> None:
    """With its next core, the same worker hands off as before."""
    lost, next_one = new_name(), new_name()
    expected = [await alone(workers, name) for name in (lost, next_one)]
    control = workers.control.address
    async with (
        run_process("worker", control, "--role", "prefill") as prefill,
        run_process("worker", control, "--role", "decode") as decode,
    ):
        await eventually(lambda: hands_off(decode.address, prefill.address), "a hand-off")
        first = asyncio.Event()
        running = asyncio.create_task(answer(decode.address, ask(lost, prefill.address), first))
        await stage(first, prefill.address)
        os.kill({"prefill": prefill, "decode": decode}[role].pid_of("core"), signal.SIGKILL)
        ended = await asyncio.gather(running, return_exceptions=True)
        await eventually(lambda: hands_off(decode.address, prefill.address), "a hand-off")
        answered = await answer(decode.address, ask(next_one, prefill.address))

        assert isinstance(ended[0], Answered) == (role == "prefill")
        assert not isinstance(ended[0], Answered) or ended[0].token_ids == expected[0]
        assert answered.token_ids == expected[1]
        assert answered.finished.kv_path.handed_off
        for each in (prefill, decode):
            await eventually(lambda each=each: has_nothing(each.address), "all to be given back")  # type: ignore[misc]


async def has_nothing(address: str) -> bool:
    load = await load_of(address)
    return not (in_use(load) + load.num_inbox_blocks)


async def test_a_decode_core_that_stands_still_slows_prefill_down(workers: Workers) -> None:
    """What is sent is what there is room for; nothing is lost when it goes on."""
    names = [new_name() for _ in range(4)]
    expected = [await alone(workers, name) for name in names]
    await workers.idle()
    prefill = workers.prefill
    running = [
        asyncio.create_task(answer(workers.decode.address, ask(name, prefill.address)))
        for name in names
    ]
    await eventually(lambda: prefill.load.num_running == len(names), "all to be prefilled")
    core = core_of(1)
    os.kill(core, signal.SIGSTOP)
    try:
        await stands_still(prefill)

        assert prefill.load.num_running == len(names)
        assert prefill.load.num_outbox_blocks <= NUM_OUTBOX
    finally:
        os.kill(core, signal.SIGCONT)
    answers = await asyncio.gather(*running)

    assert [each.token_ids for each in answers] == expected
    assert all(each.finished.kv_path.handed_off for each in answers)
    await workers.idle()


async def stands_still(node: WorkerNode) -> None:
    """Until a second has passed without a step."""
    loop = asyncio.get_running_loop()
    num_steps, since_s = node.load.num_steps, loop.time()
    async with asyncio.timeout(60):
        while loop.time() < since_s + 1.0:
            await asyncio.sleep(0.05)
            if node.load.num_steps != num_steps:
                num_steps, since_s = node.load.num_steps, loop.time()


async def while_queued(first: asyncio.Event, prefill: str) -> None:
    await asyncio.sleep(0)


async def while_decoding(first: asyncio.Event, prefill: str) -> None:
    await first.wait()
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("stage", [while_queued, while_computing, while_sending, while_decoding])
async def test_a_client_that_leaves_frees_both_workers(workers: Workers, stage: Stage) -> None:
    leaver, stayer = new_name(), new_name()
    expected = await alone(workers, stayer)
    await workers.idle()
    first = asyncio.Event()
    address, prefill = workers.decode.address, workers.prefill.address
    leaving = asyncio.create_task(answer(address, ask(leaver, prefill, max_tokens=400), first))
    staying = asyncio.create_task(answer(address, ask(stayer, prefill)))
    await stage(first, prefill)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)

    assert (await staying).token_ids == expected
    await workers.idle()
