"""Who may use which slots of the inbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable


class Inbox:
    """Slots lent first come, first served. `num_free` is all of them when nothing is on its way."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def acquire(self, count: int, *, at_least: int = 1) -> list[int]:
        """Up to `count` slots: waits for `at_least`, behind those who came before."""
        at_least = min(at_least, count, self.num_slots)
        while self._waiting or len(self._free) < at_least:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()  # the turn was ours to pass on
                raise
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
            if len(self._free) >= at_least:
                break
        taken, self._free = self._free[:count], self._free[count:]
        self._wake()
        return taken

    def acquire_now(self, count: int) -> list[int]:
        """Up to `count` slots, none if others wait."""
        if self._waiting:
            return []
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, slots: Iterable[int]) -> None:
        self._free += slots
        assert len(self._free) <= self.num_slots, "a slot of the inbox was released twice"
        self._wake()

    def _wake(self) -> None:
        if self._free and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
            else:
                self._wake()
