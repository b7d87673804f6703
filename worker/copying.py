"""Copying KV blocks in threads: the copy and the checksum of a large block drop the GIL."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from firsttoken.kvstore.v1 import kvstore_pb2
from services.core.kvblocks import Block, Bytes, Place, checksum, copy_block, difference

T = TypeVar("T")

NUM_THREADS = 2
# Copied in less time than a thread takes to wake up.
INLINE_BYTES = 128 << 10


class Copier:
    """An async context manager that owns the threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv copy")
        self._running: set[asyncio.Future[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        self._threads.shutdown()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def run(
        self,
        work: Callable[[], T],
        *,
        num_bytes: int | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> T:
        """`on_failure` is called when it raises or its caller is cancelled, once it has ended.

        A thread cannot be cancelled: until it ends it writes where it was told to.
        `num_bytes`: what it copies, if known; little is copied at once.
        """
        if num_bytes is not None and num_bytes <= INLINE_BYTES:
            try:
                return work()
            except BaseException:
                on_failure()
                raise
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(future)
        except BaseException:
            if future.done():
                on_failure()
            else:
                future.add_done_callback(lambda ended: _settle(ended, on_failure))
            raise


def _settle(ended: asyncio.Future[T], on_failure: Callable[[], None]) -> None:
    if not ended.cancelled():
        ended.exception()  # nobody else looks at it
    on_failure()


def copy_blocks(
    arena: Bytes | None,
    found: Sequence[kvstore_pb2.GetResponse],
    expected: Sequence[Block],
    into: Sequence[Bytes],
) -> list[str]:
    """For each block "", or the reason why what was copied must not be used."""
    copy = functools.partial(_copy_block, arena)
    return list(map(copy, found, expected, into))


def _copy_block(
    arena: Bytes | None, found: kvstore_pb2.GetResponse, expected: Block, into: Bytes
) -> str:
    if found.HasField("mapped"):
        if arena is None:
            return "place"
        place = Place(found.mapped.slot, found.mapped.generation)
        return copy_block(arena, place, expected, into)
    if not found.HasField("data"):
        return "missing"
    reason = difference(block_of(found.header), expected)
    if reason:
        return reason
    data = np.frombuffer(found.data, np.uint8)
    if data.shape != into.shape:
        return "size"
    np.copyto(into, data)
    return "" if checksum(into) == found.header.checksum else "checksum"


def block_of(header: kvstore_pb2.BlockHeader) -> Block:
    return Block(
        storage_key=header.storage_key,
        prefix_key=header.prefix_key,
        fingerprint=header.fingerprint,
        index=header.index,
        num_tokens=header.num_tokens,
        num_bytes=header.num_bytes,
    )
