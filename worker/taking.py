"""Taking KV blocks that another worker sends: into the inbox, verified, and on to the core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from firsttoken.worker.v1 import worker_pb2
from services.core.kvblocks import checksum
from worker.engines.contract import Bytes
from worker.front import EngineFront
from worker.messages import StagedBlock
from worker.stream import TokenStream


class HandoffFailed(Exception):
    """The rest of the prompt has to be computed here."""


class BlockTaker:
    """Takes the blocks of one call: into the inbox, verified, and on to the core."""

    def __init__(
        self,
        front: EngineFront,
        stream: TokenStream,
        first_block: int,
        num_tokens: int,
    ) -> None:
        self.first_block = first_block
        self._front = front
        self._stream = stream
        block_tokens = front.info.block_tokens
        self._sizes = [
            min(block_tokens, num_tokens - start) for start in range(0, num_tokens, block_tokens)
        ]
        self._next_block = first_block
        self._slots: list[int] = []
        # Blocks that the prefill worker was allowed to send, all in all.
        self.num_credited = 0
        self._taken: asyncio.Queue[worker_pb2.BlocksTaken | None] = asyncio.Queue()

    @property
    def complete(self) -> bool:
        return self._next_block == len(self._sizes)

    @property
    def _num_uncredited(self) -> int:
        return len(self._sizes) - self.first_block - self.num_credited

    async def reserve(self) -> None:
        """Waits for at least one slot."""
        self._credit(await self._front.inbox.acquire(self._num_uncredited))

    async def requests(
        self, start: worker_pb2.PrefillStart
    ) -> AsyncIterator[worker_pb2.PrefillRequest]:
        """What the prefill worker is told, until `close`."""
        yield worker_pb2.PrefillRequest(start=start)
        while (taken := await self._taken.get()) is not None:
            yield worker_pb2.PrefillRequest(taken=taken)

    async def take(self, block: worker_pb2.KvBlock, outbox: Bytes | None) -> None:
        """Raises HandoffFailed when it is not what was to come."""
        if self.complete or not self._slots or block.index != self._next_block:
            raise HandoffFailed(f"block {block.index} came instead of {self._next_block}")
        slot, size = self._slots[-1], self._sizes[block.index]
        await asyncio.to_thread(_copy, block, outbox, self._front.inbox_view(slot, size))
        self._slots.pop()
        self._next_block += 1
        before = self.num_credited
        self._credit(self._front.inbox.acquire_now(self._num_uncredited))
        starving = not self._slots and not self.complete
        self._stream.stage([StagedBlock(block.index, slot, size)], flush=starving)
        if starving:
            await self.reserve()
        credit = self.num_credited - before
        self._taken.put_nowait(worker_pb2.BlocksTaken(num_blocks=1, credit_blocks=credit))

    def close(self) -> None:
        """May be called twice."""
        self._taken.put_nowait(None)
        self._front.inbox.release(self._slots)
        self._slots = []

    def _credit(self, slots: list[int]) -> None:
        self._slots += slots
        self.num_credited += len(slots)


def _copy(block: worker_pb2.KvBlock, outbox: Bytes | None, into: Bytes) -> None:
    """In a thread: copying and hashing large arrays leaves the GIL to others."""
    if block.num_tokens and outbox is not None and block.HasField("outbox_slot"):
        if block.outbox_slot >= len(outbox):
            raise HandoffFailed(f"outbox slot {block.outbox_slot} does not exist")
        np.copyto(into, outbox[block.outbox_slot][: len(into)])
    elif len(block.data) == len(into):
        np.copyto(into, np.frombuffer(block.data, np.uint8))
    else:
        raise HandoffFailed(f"block {block.index} has {len(block.data)} bytes, not {len(into)}")
    if checksum(into) != block.checksum:
        raise HandoffFailed(f"block {block.index} does not verify")
