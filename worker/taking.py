"""Taking KV blocks that another worker sends: into the inbox, verified, and on to the core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import numpy as np

from firsttoken.worker.v1 import worker_pb2
from services.core.kvblocks import checksum
from worker.copying import Copier
from worker.engines.contract import Bytes
from worker.front import EngineFront
from worker.handles import params_from_proto
from worker.messages import StagedBlock
from worker.stream import TokenStream
from worker.wire import Received


class HandoffFailed(Exception):
    """The rest of the prompt has to be computed here."""


class BlockTaker:
    """Takes the blocks of one call: into the inbox, verified, and on to the core.

    Or has the engine fetch them, where the engines move KV themselves. `start`: what the
    prefill worker is to be told; `outbox`: its memory, if that can be read here.
    """

    def __init__(
        self,
        front: EngineFront,
        copier: Copier,
        stream: TokenStream,
        start: worker_pb2.PrefillStart,
        num_tokens: int,
        outbox: Bytes | None,
    ) -> None:
        self._start = start
        self._outbox = outbox
        self._by_engine = start.transport == worker_pb2.KV_TRANSPORT_ENGINE
        self._front = front
        self._copier = copier
        self._stream = stream
        block_tokens = front.info.block_tokens
        self._sizes = [
            min(block_tokens, num_tokens - start) for start in range(0, num_tokens, block_tokens)
        ]
        # The block that comes next, and how many bytes of it have come.
        self._next_block = start.first_block
        self._num_filled = 0
        self._slots: list[int] = []
        # Blocks that the prefill worker was allowed to send, all in all.
        self._num_credited = 0
        self._taken: asyncio.Queue[worker_pb2.BlocksTaken | None] = asyncio.Queue()

    @property
    def complete(self) -> bool:
        return self._next_block == len(self._sizes)

    @property
    def _num_uncredited(self) -> int:
        return len(self._sizes) - self._start.first_block - self._num_credited

    async def reserve(self) -> None:
        """Waits for room for at least one block, before the prefill worker is called.

        The engine has room for what it fetches itself.
        """
        if not self._by_engine:
            self._start.credit_blocks = await self._acquire()

    async def requests(self) -> AsyncIterator[worker_pb2.PrefillRequest]:
        """What the prefill worker is told, until `close`."""
        yield worker_pb2.PrefillRequest(start=self._start)
        while (taken := await self._taken.get()) is not None:
            yield worker_pb2.PrefillRequest(taken=taken)

    async def take(self, received: Received) -> None:
        """Blocks, or where to fetch them, if a response has any.

        Raises HandoffFailed when what came is not what was to come.
        """
        response = received.response
        if response.first_token.HasField("disaggregated_params"):
            await self._have_fetched(response.first_token.disaggregated_params)
        elif response.HasField("blocks"):
            await self._take_blocks(received)

    async def _have_fetched(self, params: worker_pb2.DisaggregatedParams) -> None:
        if not self._by_engine:
            raise HandoffFailed("its engine would have its KV fetched, unasked")
        self._stream.fetch(params_from_proto(params))
        if error := await self._stream.transferred():
            raise HandoffFailed(f"the engine could not fetch its KV: {error}")
        self._next_block = len(self._sizes)
        if not self._front.info.hears_of_fetch:
            num_blocks = len(self._sizes) - self._start.first_block
            self._tell(num_blocks=num_blocks, credit_blocks=0)

    async def _take_blocks(self, received: Received) -> None:
        parts = self._plan(received)
        # Nobody else may have the slots while a thread writes into them, not even when
        # this call has ended meanwhile.
        slots, self._slots = self._slots, []
        await self._copier.run(
            lambda: _copy_all(parts, self._outbox),
            num_bytes=sum(part.num_bytes for part in parts),
            on_failure=lambda: self._front.inbox.release(slots),
        )
        ended = [part.block.index for part in parts if part.ends]
        self._slots = slots[len(ended) :]
        self._next_block += len(ended)
        self._num_filled = 0 if parts[-1].ends else parts[-1].end
        if ended:
            await self._hand_on(
                [
                    StagedBlock(index, slot, self._sizes[index])
                    for index, slot in zip(ended, slots, strict=False)
                ]
            )

    async def _hand_on(self, staged: list[StagedBlock]) -> None:
        credit = self._credit(self._front.inbox.acquire_now(self._num_uncredited))
        starving = not self._slots and not self.complete
        self._stream.stage(staged, flush=starving)
        # At once: others wait for the outbox, and this call perhaps for their inbox slots.
        self._tell(num_blocks=len(staged), credit_blocks=credit)
        if starving:
            self._tell(credit_blocks=await self._acquire())

    async def _acquire(self) -> int:
        return self._credit(await self._front.inbox.acquire(self._num_uncredited))

    def close(self) -> None:
        """May be called twice."""
        self._taken.put_nowait(None)
        self._front.inbox.release(self._slots)
        self._slots = []

    def _credit(self, slots: list[int]) -> int:
        self._slots += slots
        self._num_credited += len(slots)
        return len(slots)

    def _tell(self, *, num_blocks: int = 0, credit_blocks: int) -> None:
        taken = worker_pb2.BlocksTaken(num_blocks=num_blocks, credit_blocks=credit_blocks)
        self._taken.put_nowait(taken)

    def _plan(self, received: Received) -> list[_Part]:
        parts: list[_Part] = []
        index, start, slots = self._next_block, self._num_filled, iter(self._slots)
        slot, data = next(slots, None), received.data
        for block in received.response.blocks.blocks:
            if slot is None or (block.index, block.offset) != (index, start):
                raise HandoffFailed(
                    f"byte {block.offset} of block {block.index} came instead of byte {start} of"
                    f" {index}"
                )
            into = self._front.inbox_view(slot, self._sizes[index])
            by_reference = block.HasField("outbox_slot")
            num_bytes = len(into) if by_reference else block.num_bytes
            part = _Part(block, start, num_bytes, into, data[:num_bytes])
            if not 0 < part.end <= len(into) or (not by_reference and len(data) < num_bytes):
                raise HandoffFailed(f"{num_bytes} bytes of block {index} cannot be")
            data = data[num_bytes:]
            parts.append(part)
            start = part.end
            if part.ends:
                index, start, slot = index + 1, 0, next(slots, None)
        if not parts:
            raise HandoffFailed("a message without blocks came")
        return parts


class _Part(NamedTuple):
    """A block, or a piece of one, and where its bytes go. `into`: the whole block."""

    block: worker_pb2.KvBlock
    start: int
    num_bytes: int
    into: Bytes
    data: memoryview

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    @property
    def ends(self) -> bool:
        return self.end == len(self.into)


def _copy_all(parts: Sequence[_Part], outbox: Bytes | None) -> None:
    for part in parts:
        np.copyto(part.into[part.start : part.end], _source(part, outbox))
        if part.ends and checksum(part.into) != part.block.checksum:
            raise HandoffFailed(f"block {part.block.index} does not verify")


def _source(part: _Part, outbox: Bytes | None) -> Bytes:
    if not part.block.HasField("outbox_slot"):
        return np.frombuffer(part.data, np.uint8)
    slot = part.block.outbox_slot
    if outbox is None or slot >= len(outbox):
        raise HandoffFailed(f"outbox slot {slot} is not known here")
    view: Bytes = outbox[slot][: part.num_bytes]
    return view
