"""An event loop whose time is virtual: nothing sleeps, hours pass in seconds.

When nothing is ready, time jumps to the next timer. What a program does in such a loop
follows from its input alone: sockets and threads, whose time is real, are refused.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")

# Not 0, which much code takes for "never".
START_S = 1_000.0


class Deadlock(RuntimeError):
    """Nothing is ready, no timer is set, and the program has not ended: it never will."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks and timers in the order of virtual time, which takes no time."""

    def __init__(self, start_s: float = START_S) -> None:
        self._now_s = start_s
        super().__init__(_Jump(self._pass))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    # Refused whatever the arguments.
    def call_soon_threadsafe(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time knows no threads: call from the loop itself")

    def run_in_executor(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("virtual time knows no threads: do it in the loop, or before")

    def _pass(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise Deadlock(
                "nothing is ready and no timer is set, so these tasks would wait for ever:"
                f" {', '.join(waiting) or 'none'}"
            )
        self._now_s += timeout_s


class _Jump(selectors.SelectSelector):
    """Waits by letting virtual time pass. No descriptor is ever ready."""

    def __init__(self, let_pass: Callable[[float | None], None]) -> None:
        super().__init__()
        self._let_pass = let_pass

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._let_pass(timeout)
        return []


def run(main: Coroutine[Any, Any, Result], *, start_s: float = START_S) -> Result:
    """As asyncio.run, in virtual time.

    Raises Deadlock when `main` can never end, and what a callback raises.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start_s)) as runner:
        return runner.run(_watched(main))


async def _watched(main: Coroutine[Any, Any, Result]) -> Result:
    """Ends with the first exception that a callback raises: here it is no accident."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    failures: list[BaseException] = []

    def fail(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failures.append(context.get("exception") or RuntimeError(context["message"]))
        task.cancel()

    loop.set_exception_handler(fail)
    try:
        return await main
    except asyncio.CancelledError:
        if failures:
            raise failures[0] from None
        raise
