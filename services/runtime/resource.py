"""What every part that owns tasks, sockets or other parts has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self


class Resource(ABC):
    """An async context manager that leaves what it has entered in reverse, also when
    opening fails halfway.
    """

    _stack: AsyncExitStack | None = None

    @abstractmethod
    async def _open(self, stack: AsyncExitStack) -> None:
        """Enter on `stack` what is to be left."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """May be called twice."""
        if self._stack is not None:
            await self._stack.aclose()
