"""Answers whose worker is killed in their midst: whether they go on as they would have."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import grpc

from firsttoken.client import Answer, MeshClient, Options
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.bench.processes import POLL_S, kill, list_members, until
from services.bench.reuse import WORDS
from services.core.config import parse
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel
from services.runtime.startup import StartupError
from services.runtime.tasks import end_tasks

# Few slots, so that it can be seen that none is lost.
CONFIG: MeshConfig = parse({"worker": {"num_slots": 2}, "router": {"routing_strategy": "random"}})
NUM_WORKERS = 3

GREEDY: Options = {"max_tokens": 64, "ignore_eos": True}
SEEDED: Options = {**GREEDY, "temperature": 0.8, "top_p": 0.95, "seed": 7}
WAYS = {"greedy": GREEDY, "seeded": SEEDED}
NUM_PROMPTS, PROMPT_WORDS = 5, 150
# Tokens after which a worker is killed: never so late that the answer may be whole.
EARLIEST, LATEST = 2, 40
# An answer may end before its worker can be killed; then it is told again.
MOST_TRIES_EACH = 3

READY_TIMEOUT_S = 180.0
IDLE_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 5.0
WORKER, KVSTORE = control_pb2.MEMBER_ROLE_WORKER, control_pb2.MEMBER_ROLE_KVSTORE
Control: TypeAlias = control_pb2_grpc.ControlServiceStub


class Case(NamedTuple):
    way: str
    prompt: str


class Told(NamedTuple):
    """An answer, and how long it stood still when its worker was killed."""

    answer: Answer
    stall_ms: float
    # Between two messages, else.
    interval_ms: float


async def measure(client: MeshClient, control: str, *, num_migrations: int = 20) -> dict[str, Any]:
    """Kills workers of the mesh: one that runs on this machine and starts them again.

    Raises StartupError where that cannot be.
    """
    chance = random.Random(0)
    cases = [
        Case(way, f"{' '.join(chance.choices(WORDS, k=PROMPT_WORDS))}\n\nOnce upon a time,")
        for _ in range(NUM_PROMPTS)
        for way in WAYS
    ]
    undisturbed: dict[Case, Answer] = {}
    told: list[tuple[Case, Told]] = []
    async with open_channel(control) as channel:
        stub = Control(channel)
        num_workers = len(await _ready_workers(stub))
        if num_workers < 2:
            raise StartupError(f"there must be two workers that answer; there are {num_workers}")
        for number in itertools.count():
            if len(told) == num_migrations:
                break
            if number == MOST_TRIES_EACH * num_migrations:
                raise StartupError("answers end before their workers can be killed")
            case = cases[len(told) % len(cases)]
            if case not in undisturbed:
                undisturbed[case] = await client.complete(case.prompt, **_options(case))
            one = await _disturb(
                client, control, stub, case, after=chance.randint(EARLIEST, LATEST)
            )
            await until(lambda: _are_ready(stub, num_workers), READY_TIMEOUT_S)
            if one.answer.migrations:
                told.append((case, one))
        at_once, num_slots = await _fill(client, stub)
        left = await _left(stub)
    return {**_compare(undisturbed, told), "slots": num_slots, "in_use_at_once": at_once, **left}


def _compare(undisturbed: dict[Case, Answer], told: Sequence[tuple[Case, Told]]) -> dict[str, Any]:
    equal = [_said(one.answer) == _said(undisturbed[case]) for case, one in told]
    stalls_ms = [one.stall_ms for _, one in told]
    return {
        "benchmark": "migration",
        "engine": told[0][1].answer.engine,
        "migrations": sum(one.answer.migrations for _, one in told),
        "answers": len(told),
        "equal": sum(equal),
        "equal_by_way": {
            way: sum(same for same, (case, _) in zip(equal, told, strict=True) if case.way == way)
            for way in WAYS
        },
        "prompt_tokens": statistics.median(one.answer.usage.prompt_tokens for _, one in told),
        "loaded_blocks": sum(one.answer.kv_path.loaded_blocks for _, one in told),
        "stall_ms": statistics.median(stalls_ms),
        "longest_stall_ms": max(stalls_ms),
        "interval_ms": statistics.median(one.interval_ms for _, one in told),
        # An answer from nothing, for comparison.
        "ttft_ms": statistics.median(answer.ttft_ms for answer in undisturbed.values()),
    }


def _said(answer: Answer) -> tuple[Any, ...]:
    usage = answer.usage
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return (answer.text, answer.token_ids, answer.finish_reason, counts)


def _options(case: Case) -> Options:
    """The salt keeps a request from what others have left in the caches."""
    return {**WAYS[case.way], "cache_salt": f"bench migration {random.getrandbits(64):x}"}


async def _disturb(
    client: MeshClient, control: str, stub: Control, case: Case, *, after: int
) -> Told:
    """Kills the worker that answers, once `after` tokens have come."""
    num_tokens, killed_s = 0, 0.0
    times_s: list[float] = []
    finding = asyncio.create_task(_find_at_work(stub))
    try:
        async with client.generate(case.prompt, **_options(case)) as stream:
            async for piece in stream:
                num_tokens += len(piece.token_ids)
                times_s.append(time.monotonic())
                if not killed_s and num_tokens >= after and finding.done():
                    kill([finding.result()], control)
                    killed_s = time.monotonic()
    finally:
        await end_tasks([finding])
    gaps = [(end_s - start_s, end_s) for start_s, end_s in pairwise(times_s)]
    stall_s = max((gap_s for gap_s, end_s in gaps if end_s > killed_s), default=0.0)
    interval_s = statistics.median([gap_s for gap_s, _ in gaps] or [0.0])
    return Told(stream.answer, stall_s * 1e3, interval_s * 1e3)


async def _find_at_work(stub: Control) -> control_pb2.Member:
    """The first worker that runs a request: the one that answers, if there is but one."""
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        while True:
            workers = await _ready_workers(stub)
            loads = await asyncio.gather(*(_load(worker.address) for worker in workers))
            for worker, load in zip(workers, loads, strict=True):
                if load.num_running:
                    return worker
            await asyncio.sleep(POLL_S)


async def _fill(client: MeshClient, stub: Control) -> tuple[int, int]:
    """As many requests as there are slots: the most that ran at once, and the slots."""
    num_slots = sum(worker.worker.num_slots for worker in await _ready_workers(stub))
    most = 0

    async def all_run() -> bool:
        nonlocal most
        workers = await _ready_workers(stub)
        loads = await asyncio.gather(*(_load(worker.address) for worker in workers))
        most = max(most, sum(load.num_running for load in loads))
        return most == num_slots

    async with AsyncExitStack() as stack:
        for number in range(num_slots):
            stream = client.generate(f"Tale {number}:", max_tokens=1000, ignore_eos=True)
            await stack.enter_async_context(stream)
        with suppress(TimeoutError):  # `most` says it
            await until(all_run, IDLE_TIMEOUT_S)
    return most, num_slots


async def _left(stub: Control) -> dict[str, int]:
    """What is still held when nothing runs any more: zeros, unless something leaks."""
    counts: dict[str, int] = {}

    async def nothing_left() -> bool:
        loads = [await _load(each.address) for each in await list_members(stub, WORKER)]
        reserved = [await _num_reserved(each.address) for each in await list_members(stub, KVSTORE)]
        counts.update(
            left_running=sum(load.num_running for load in loads),
            left_waiting=sum(load.num_waiting for load in loads),
            left_blocks_reserved=sum(load.num_blocks_reserved for load in loads),
            left_places_reserved=sum(reserved),
        )
        return not any(counts.values())

    with suppress(TimeoutError):  # the counts say it
        await until(nothing_left, IDLE_TIMEOUT_S)
    return counts


async def _ready_workers(stub: Control) -> list[control_pb2.Member]:
    """Those that answer."""
    return [
        member
        for member in await list_members(stub, WORKER)
        if member.state == control_pb2.MEMBER_STATE_READY
        and member.worker.role != control_pb2.WORKER_ROLE_PREFILL
    ]


async def _are_ready(stub: Control, num_workers: int) -> bool:
    return len(await _ready_workers(stub)) == num_workers


async def _load(address: str) -> worker_pb2.Load:
    """Nothing runs where nobody answers."""
    async with open_channel(address) as channel:
        watching = worker_pb2_grpc.WorkerServiceStub(channel).Watch(
            worker_pb2.WatchRequest(load_only=True), timeout=LOAD_TIMEOUT_S
        )
        try:
            async for response in watching:
                return response.snapshot.load
        except grpc.aio.AioRpcError:
            pass
        finally:
            watching.cancel()
    return worker_pb2.Load()


async def _num_reserved(address: str) -> int:
    async with open_channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        return (await stub.GetStats(kvstore_pb2.GetStatsRequest())).num_reserved
