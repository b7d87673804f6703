"""Sending the KV blocks of one prompt as they are exported, and the first token past them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import islice

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.ledger import Ledger
from services.runtime.interceptor import Context
from services.runtime.protocol import ledger_to_proto
from worker.answer import logprobs_to_proto
from worker.copying import Copier
from worker.engines.contract import Bytes
from worker.front import EngineFront
from worker.handles import params_to_proto
from worker.messages import ExportedBlock, Token
from worker.stream import TokenStream
from worker.wire import encode

# Bytes of KV in one message: less costs more messages, more holds up what else is sent.
MESSAGE_BYTES = 2 << 20
# Bytes of blocks that are copied into messages together.
BATCH_BYTES = 4 << 20
# Signs of life in the time after which the decode worker gives up.
PROGRESS_SHARE = 0.25

_FINISH_REASONS = {
    "": common_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


class BlockSender:
    """The response stream of one call: blocks within the credit, the first token past all.

    Where the engines move the KV themselves there are no blocks, and the call stays open
    until they have done so.

    `timeout_s`: a decode worker that takes nothing for so long is given up (TimeoutError).
    """

    def __init__(
        self,
        front: EngineFront,
        copier: Copier,
        stream: TokenStream,
        start: worker_pb2.PrefillStart,
        num_blocks: int,
        context: Context,
        *,
        timeout_s: float,
    ) -> None:
        self._front = front
        self._copier = copier
        self._stream = stream
        self._num_blocks = num_blocks
        self._context = context
        self._timeout_s = timeout_s
        self._by_reference = start.transport == worker_pb2.KV_TRANSPORT_SHARED_MEMORY
        self._block_bytes = front.info.block_bytes
        self._num_sent = 0
        # Spent on it: before the first token, it hides behind the computing.
        self.sending_s = 0.0
        self._num_taken = 0
        self._num_credited = min(start.credit_blocks, num_blocks)
        self._writing = asyncio.Lock()
        # Outbox slots in use by this call: exported, and sent by reference.
        self._exported: deque[ExportedBlock] = deque()
        self._sent: deque[int] = deque()
        self._taken = asyncio.Event()
        self._by_engine = start.transport == worker_pb2.KV_TRANSPORT_ENGINE
        self._offered = asyncio.Event()
        # While it is the decode worker's turn.
        self._patience: asyncio.Timeout | None = None

    async def read_taken(self, requests: AsyncIterator[worker_pb2.PrefillRequest]) -> None:
        async for request in requests:
            # Never more than there are: the numbers are another process's.
            credit = min(request.taken.credit_blocks, self._num_blocks - self._num_credited)
            self._num_credited += credit
            self._stream.more_credit(credit)
            if credit and self._patience is not None:
                self._patience.reschedule(None)
            count = min(request.taken.num_blocks, self._num_sent - self._num_taken)
            self._num_taken += count
            if self._by_engine:
                self._stream.taken()
            if self._by_reference:
                self._stream.free_outbox([self._sent.popleft() for _ in range(count)])
            self._taken.set()

    async def send_progress(self) -> None:
        """Until cancelled: that the engine works, however long this prompt takes or waits."""
        num_steps = self._front.hub.load.num_steps
        while True:
            await asyncio.sleep(self._timeout_s * PROGRESS_SHARE)
            if self._front.hub.load.num_steps != num_steps:
                num_steps = self._front.hub.load.num_steps
                progress = worker_pb2.PrefillProgress(num_tokens=self._stream.num_computed)
                await self._write(encode(worker_pb2.PrefillResponse(progress=progress)))

    async def send_first_token(self, token: Token, ledger: Ledger) -> None:
        assert token.first is not None
        message = worker_pb2.FirstToken(
            token_id=token.token_id,
            finish_reason=_FINISH_REASONS[token.finish],
            usage=common_pb2.Usage(
                cached_tokens=token.first.cached_tokens,
                evaluated_prompt_tokens=token.first.evaluated_prompt_tokens,
            ),
            ledger=ledger_to_proto(ledger),
            evaluated_s=token.first.evaluated_s,
        )
        if token.logprobs is not None:
            message.logprobs.CopyFrom(logprobs_to_proto(token.token_id, token.logprobs))
        if token.params is not None:
            message.disaggregated_params.CopyFrom(params_to_proto(token.params))
            self._offered.set()
        await self._write(encode(worker_pb2.PrefillResponse(first_token=message)))

    async def send(self) -> None:
        """All blocks; returns when the decode worker, or its engine, has them."""
        if self._by_engine:
            await self._wait_for_engine()
        else:
            await self._send_blocks()

    async def _wait_for_engine(self) -> None:
        """An offer is open to the decode engine as long as the call is."""
        await self._offered.wait()
        async with asyncio.timeout(self._timeout_s):
            await self._stream.transferred()

    async def _send_blocks(self) -> None:
        # The decode worker still writes until it has all: grpc.aio calls it an internal
        # error of the other side when a call ends under a write.
        while self._num_sent < self._num_blocks:
            if not self._exported:
                await self._wait_for_exported()
            began_s = time.monotonic()
            await self._send_batch()
            self.sending_s += time.monotonic() - began_s
        while self._num_taken < self._num_blocks:
            self._taken.clear()
            async with asyncio.timeout(self._timeout_s):
                await self._taken.wait()

    async def _wait_for_exported(self) -> None:
        has_no_room = self._num_sent == self._num_credited
        async with asyncio.timeout(self._timeout_s if has_no_room else None) as self._patience:
            try:
                self._exported.extend(await self._stream.next_exported())
            finally:
                self._patience = None

    async def _send_batch(self) -> None:
        if self._by_reference:
            batch = list(self._exported)
            messages = [_pack_references(batch)]
        else:
            batch = list(islice(self._exported, max(1, BATCH_BYTES // self._block_bytes)))
            messages = await self._copier.run(
                lambda: _pack_bytes(batch, [self._view(block) for block in batch]),
                num_bytes=len(batch) * self._block_bytes,
            )
        slots = [self._exported.popleft().outbox_slot for _ in batch]
        self._num_sent += len(batch)
        if self._by_reference:
            self._sent.extend(slots)
        else:
            self._stream.free_outbox(slots)
        for message in messages:
            async with asyncio.timeout(self._timeout_s):
                await self._write(message)

    def _view(self, block: ExportedBlock) -> Bytes:
        num_bytes = block.num_tokens * self._front.info.token_bytes
        view: Bytes = self._front.arena.outbox[block.outbox_slot][:num_bytes]
        return view

    async def _write(self, message: bytes) -> None:
        async with self._writing:
            await self._context.write(message)

    def close(self) -> None:
        """Give back what nobody will read."""
        left = [*self._sent, *(block.outbox_slot for block in self._exported)]
        left += [block.outbox_slot for block in self._stream.take_exported()]
        self._stream.free_outbox(left)
        self._sent.clear()
        self._exported.clear()


def _pack_references(blocks: Sequence[ExportedBlock]) -> bytes:
    packed = worker_pb2.KvBlocks()
    for block in blocks:
        packed.blocks.add(
            index=block.block_index,
            num_tokens=block.num_tokens,
            checksum=block.checksum,
            outbox_slot=block.outbox_slot,
        )
    return encode(worker_pb2.PrefillResponse(blocks=packed))


def _pack_bytes(blocks: Sequence[ExportedBlock], data: Sequence[Bytes]) -> list[bytes]:
    """Messages of about MESSAGE_BYTES; small blocks share one, large ones are cut."""
    messages: list[bytes] = []
    packed = worker_pb2.KvBlocks()
    pieces: list[Bytes] = []
    for block, view in zip(blocks, data, strict=True):
        for offset, piece in _pieces(view):
            if pieces and sum(map(len, pieces)) + len(piece) > MESSAGE_BYTES:
                messages.append(encode(worker_pb2.PrefillResponse(blocks=packed), pieces))
                packed, pieces = worker_pb2.KvBlocks(), []
            packed.blocks.add(
                index=block.block_index,
                num_tokens=block.num_tokens,
                checksum=block.checksum,
                num_bytes=len(piece),
                offset=offset,
            )
            pieces.append(piece)
    return [*messages, encode(worker_pb2.PrefillResponse(blocks=packed), pieces)]


def _pieces(view: Bytes) -> Iterator[tuple[int, Bytes]]:
    """Of equal size, MESSAGE_BYTES at most."""
    count = -(-len(view) // MESSAGE_BYTES)
    size = -(-len(view) // count)
    for offset in range(0, len(view), size):
        yield offset, view[offset : offset + size]
