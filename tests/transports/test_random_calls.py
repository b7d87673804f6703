"""Random calls at once, against what each may give. The seeds are fixed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import grpc
import pytest

from tests.runtime.waiting import eventually
from tests.transports.ground import (
    MANY_MANY,
    MANY_ONE,
    ONE_MANY,
    POOLED,
    SHAPES,
    Ground,
    Plan,
    take,
)

Code = grpc.StatusCode
NUM_ROUNDS, CALLS_A_ROUND, CUTS_A_ROUND = 6, 25, 3
SIZES_BYTES = (0, 1, 100, 5_000, 70_000)
RARE_BYTES = 600_000


class Drawn(NamedTuple):
    """`cancel_after_s`, `timeout_s`: None where nobody ends it. `reads_after_s`: when its
    replies begin to be read."""

    shape: str
    plan: Plan
    requests: list[bytes]
    timeout_s: float | None
    cancel_after_s: float | None
    reads_after_s: float

    def allows(self, outcome: Code, *, is_cut: bool) -> bool:
        """`is_cut`: connections are cut meanwhile."""
        is_ended = is_cut or self.timeout_s is not None or self.cancel_after_s is not None
        # grpc.aio 1.76 hides the reason where a request could not be sent for it: INTERNAL or,
        # for an iterator of requests, a cancellation of its own.
        is_hidden = is_ended and self.shape in (MANY_ONE, MANY_MANY)
        allowed = {
            Code.OK: self.plan.hold_at is None,
            Code.CANCELLED: self.cancel_after_s is not None or is_hidden,
            Code.DEADLINE_EXCEEDED: self.timeout_s is not None,
            Code.UNAVAILABLE: is_cut,
            Code.INTERNAL: is_hidden,
        }
        return allowed.get(outcome, False)


def draw(source: random.Random, number: int) -> Drawn:
    shape = source.choice(SHAPES)

    def size() -> int:
        return RARE_BYTES if source.random() < 0.03 else source.choice(SIZES_BYTES)

    many = source.randint(0, 8)
    requests = [source.randbytes(size()) for _ in range(many)]
    sizes = tuple(size() for _ in range(many if shape in (ONE_MANY, MANY_MANY) else 1))
    num_stops = len(sizes) + (shape in (ONE_MANY, MANY_MANY))
    hold_at = source.randrange(num_stops) if source.random() < 0.25 else None
    timeout_s = source.uniform(0.001, 0.1) if source.random() < 0.3 else None
    cancels = source.random() < 0.3 or (hold_at is not None and timeout_s is None)
    cancel_after_s = source.uniform(0, 0.06) if cancels else None
    reads_after_s = source.choice((0.0, 0.0, 0.02))
    if shape not in (MANY_ONE, MANY_MANY):
        requests = [source.randbytes(size())]
    plan = Plan(number, sizes, hold_at)
    return Drawn(shape, plan, requests, timeout_s, cancel_after_s, reads_after_s)


async def spread(requests: Sequence[bytes]) -> AsyncIterator[bytes]:
    for each in requests:
        await asyncio.sleep(0)
        yield each


async def carry_out(ground: Ground, drawn: Drawn) -> Code:
    """Its status, its replies seen to be what they must."""
    streams = drawn.shape in (MANY_ONE, MANY_MANY)
    requests: Any = spread(drawn.requests) if streams else drawn.requests[0]
    call = ground.begin(
        drawn.shape, drawn.plan, requests, timeout=drawn.timeout_s, wait_for_ready=True
    )
    if drawn.cancel_after_s is not None:
        asyncio.get_running_loop().call_later(drawn.cancel_after_s, call.cancel)
    expected = drawn.plan.replies(drawn.shape, drawn.requests)
    await asyncio.sleep(drawn.reads_after_s)
    got: list[bytes] = []
    try:
        if drawn.shape in (ONE_MANY, MANY_MANY):
            async for reply in call:
                got.append(reply)
        else:
            got = await take(drawn.shape, call)
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        assert got == expected[: len(got)]
    else:
        assert got == expected
    return Code(await call.code())


async def cut_now_and_then(ground: Ground, source: random.Random) -> None:
    assert ground.proxy is not None
    for _ in range(CUTS_A_ROUND):
        await asyncio.sleep(source.uniform(0.002, 0.04))
        ground.proxy.cut(gently=source.random() < 0.5)


@pytest.mark.parametrize("seed", [1])
async def test_each_call_gives_its_bytes_or_what_its_faults_allow(
    proxied: Ground, seed: int
) -> None:
    source = random.Random(f"{seed} {proxied.transport.name}")
    seen: set[Code] = set()
    assert await proxied.answers()
    num_tasks = len(asyncio.all_tasks())
    for number in range(NUM_ROUNDS):
        is_cut = number % 2 == 1
        calls = [draw(source, number * CALLS_A_ROUND + each) for each in range(CALLS_A_ROUND)]
        cutting = asyncio.create_task(cut_now_and_then(proxied, source)) if is_cut else None
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*(carry_out(proxied, drawn) for drawn in calls))
            if cutting is not None:
                await cutting
        for drawn, outcome in zip(calls, outcomes, strict=True):
            assert drawn.allows(outcome, is_cut=is_cut), (drawn, outcome)
        seen |= set(outcomes)
        # A cut that a channel has not noticed yet belongs to this round.
        await eventually(lambda: answers_everywhere(proxied))
        await eventually(proxied.is_at_rest)

    assert seen >= {Code.OK, Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE}
    assert max(proxied.service.begun[each] for each in range(NUM_ROUNDS * CALLS_A_ROUND)) == 1
    assert "failed" not in proxied.service.ended.values()
    await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks + 4 * POOLED.max_channels)


async def answers_everywhere(ground: Ground) -> bool:
    """On each channel, which are taken in turn."""
    try:
        return all([await ground.answers() for _ in range(POOLED.max_channels)])
    except grpc.aio.AioRpcError:
        return False
