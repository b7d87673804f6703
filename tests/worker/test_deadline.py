from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from worker.deadline import Deadline

LONG_S = 30.0


async def ends(
    timeout_s: float,
    prepare: Callable[[Deadline], None] = lambda deadline: None,
    *,
    paused_s: float = 0.0,
    then_s: float = 0.0,
) -> bool:
    """Whether what lasts `paused_s` and `then_s` is ended."""
    deadline = Deadline(timeout_s)
    try:
        async with deadline:
            prepare(deadline)
            with deadline.paused():
                await asyncio.sleep(paused_s)
            await asyncio.sleep(then_s)
    except TimeoutError:
        assert deadline.expired
        return True
    return False


def held(patience_s: float) -> Callable[[Deadline], None]:
    def prepare(deadline: Deadline) -> None:
        deadline.hold()
        deadline.be_patient(patience_s)

    return prepare


async def test_a_load_ends_at_its_timeout() -> None:
    assert await ends(0.02, then_s=LONG_S)


async def test_patience_counts_only_while_the_engine_is_held() -> None:
    assert await ends(LONG_S, held(0.02), then_s=LONG_S)
    assert not await ends(LONG_S, lambda deadline: deadline.be_patient(0.02), then_s=0.1)


async def test_an_engine_that_computes_needs_no_patience() -> None:
    def prepare(deadline: Deadline) -> None:
        held(0.05)(deadline)
        deadline.be_patient(math.inf)

    assert not await ends(LONG_S, prepare, then_s=0.1)


async def test_a_pause_does_not_count_toward_the_timeout() -> None:
    assert not await ends(0.2, paused_s=0.4)
    assert await ends(0.05, paused_s=0.1, then_s=LONG_S)


async def test_a_pause_does_not_stretch_patience() -> None:
    assert await ends(LONG_S, held(0.02), paused_s=LONG_S)
