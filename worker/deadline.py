"""When a load ends at the latest."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self


class Deadline:
    """Ends a load after `timeout_s`, or when the engine has been held for `patience_s`.

    An async context manager like asyncio.timeout: it raises TimeoutError.
    """

    def __init__(self, timeout_s: float) -> None:
        self._patience_s = math.inf
        self._held_since_s = math.inf
        self._latest_s = time.monotonic() + timeout_s
        self._scope = asyncio.timeout(timeout_s)
        self._open = False

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open = False
        await self._scope.__aexit__(kind, error, trace)

    @property
    def expired(self) -> bool:
        return self._scope.expired()

    @property
    def left_s(self) -> float:
        """If the engine were held from now on."""
        return min(self._latest_s - time.monotonic(), self._patience_s)

    def be_patient(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._rearm()

    def hold(self) -> None:
        """The engine waits from now on."""
        self._held_since_s = time.monotonic()
        self._rearm()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """This time does not count toward the timeout. The engine's patience goes on."""
        latest_s, began_s = self._latest_s, time.monotonic()
        self._latest_s = math.inf
        self._rearm()
        try:
            yield
        finally:
            self._latest_s = latest_s + time.monotonic() - began_s
            self._rearm()

    def _rearm(self) -> None:
        if not self._open or self.expired:
            return
        until_s = min(self._latest_s, self._held_since_s + self._patience_s)
        if math.isinf(until_s):
            self._scope.reschedule(None)
        else:
            left_s = until_s - time.monotonic()
            self._scope.reschedule(asyncio.get_running_loop().time() + left_s)
