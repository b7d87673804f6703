"""Calls to other processes, and how one is told that its peer is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import grpc

T = TypeVar("T")

# CANCELLED, since a server that stops answers so; we never see it for our own cancels.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Hop(NamedTuple):
    """What a call to another process carries besides its message."""

    # Seconds until the request's deadline, now; None without one.
    time_remaining: Callable[[], float | None]
    metadata: tuple[tuple[str, str], ...]
    # Injected on the way there.
    delay_ms: float


class PeerLost(Exception):
    """The process called is not there, or says that it cannot serve."""


async def answer_of(peer: Awaitable[T]) -> T:
    """What the peer answers. Raises PeerLost where another one might do better.

    Every other status of the peer's passes as the AioRpcError that it is.
    """
    try:
        return await peer
    except grpc.aio.AioRpcError as error:
        if error.code() not in _GONE:
            raise
        raise PeerLost(error.details() or error.code().name) from error
    except asyncio.CancelledError:
        # grpc.aio raises this also where the channel was closed under the call. Only
        # where this task is being cancelled is it meant for the task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerLost("the channel to it was closed") from None
