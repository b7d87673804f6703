"""Computing a prompt for a decode worker, and handing its KV over in the same call.

The KV lives exactly as long as the call: a cancel, a crash or a deadline on either
side frees it, and a decode worker that takes no more slows this one down.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.errors import InvalidArgument, Unavailable
from services.core.kvblocks import checksum
from services.core.ledger import Ledger
from services.runtime.interceptor import Context
from services.runtime.protocol import ledger_to_proto
from services.runtime.tasks import end_tasks
from worker.answer import logprobs_to_proto
from worker.front import EngineFront
from worker.messages import ExportedBlock, Token
from worker.origin import Origin
from worker.requests import check_request
from worker.sources import KvSources
from worker.stream import TokenStream

_FINISH_REASONS = {
    "": common_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


async def serve_prefill(
    front: EngineFront,
    sources: KvSources,
    requests: AsyncIterator[worker_pb2.PrefillRequest],
    context: Context,
    *,
    timeout_s: float,
) -> None:
    """`timeout_s`: a decode worker that takes nothing for so long is given up."""
    ledger = Ledger(time.monotonic())
    start = await _read_start(requests, front)
    prompt = check_request(start.request, front.info)
    num_blocks = -(-len(prompt.token_ids) // front.info.block_tokens)
    if start.first_block >= num_blocks:
        raise InvalidArgument.of(
            "start.first_block", f"must be below {num_blocks}; got {start.first_block}"
        )
    source = sources.source(start.request, prompt)
    origin = Origin()
    with front.submit(
        prompt,
        source=source,
        export_from=start.first_block,
        export_credit=start.credit_blocks,
    ) as stream:
        sender = _Sender(front, stream, start, num_blocks - start.first_block, context)
        reading = asyncio.ensure_future(sender.read_taken(requests))
        sending = asyncio.ensure_future(sender.send_blocks(timeout_s))
        try:
            async with sources.bring(stream, source, start.request, prompt, origin, context):
                token = await _first_token(stream, ledger, origin)
            await sender.send_first_token(token, ledger)
            if not token.finish:
                await sending
        except TimeoutError:
            raise Unavailable(
                f"the decode worker has taken no block for {timeout_s:g} s", reason="NOT_TAKEN"
            ) from None
        finally:
            await end_tasks([reading, sending])
            sender.close()


async def _read_start(
    requests: AsyncIterator[worker_pb2.PrefillRequest], front: EngineFront
) -> worker_pb2.PrefillStart:
    async for request in requests:
        if not request.HasField("start"):
            break
        fingerprint = front.info.fingerprint.hex()
        if request.start.fingerprint != fingerprint:
            raise InvalidArgument.of(
                "start.fingerprint",
                f"must be {fingerprint}: other KV cannot be exchanged;"
                f" got {request.start.fingerprint}",
            )
        if not request.start.credit_blocks:
            raise InvalidArgument.of("start.credit_blocks", "must be at least 1; got 0")
        # It is computed here, and not passed on.
        request.start.request.ClearField("prefill_address")
        return request.start
    raise InvalidArgument.of("start", "must be the first message of the call")


async def _first_token(stream: TokenStream, ledger: Ledger, origin: Origin) -> Token:
    arrival = await stream.next()
    origin.note(arrival, ledger)
    return arrival.tokens[0]


class _Sender:
    """The response stream of one call: blocks within the credit, the first token past all."""

    def __init__(
        self,
        front: EngineFront,
        stream: TokenStream,
        start: worker_pb2.PrefillStart,
        num_blocks: int,
        context: Context,
    ) -> None:
        self._front = front
        self._stream = stream
        self._num_blocks = num_blocks
        self._context = context
        self._by_reference = start.transport == worker_pb2.KV_TRANSPORT_SHARED_MEMORY
        self._num_untaken = 0
        self._num_uncredited = max(num_blocks - start.credit_blocks, 0)
        self._writing = asyncio.Lock()
        # Outbox slots in use by this call: exported, and sent by reference.
        self._exported: deque[ExportedBlock] = deque()
        self._sent: deque[int] = deque()
        self._taken = asyncio.Event()

    async def read_taken(self, requests: AsyncIterator[worker_pb2.PrefillRequest]) -> None:
        async for request in requests:
            # Never more than there are: the numbers are another process's.
            credit = min(request.taken.credit_blocks, self._num_uncredited)
            self._num_uncredited -= credit
            self._stream.more_credit(credit)
            count = min(request.taken.num_blocks, self._num_untaken)
            self._num_untaken -= count
            if self._by_reference:
                self._stream.free_outbox([self._sent.popleft() for _ in range(count)])
            self._taken.set()

    async def send_first_token(self, token: Token, ledger: Ledger) -> None:
        assert token.first is not None
        ledger.mark_first_token(time.monotonic())
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
        await self._write(worker_pb2.PrefillResponse(first_token=message))

    async def send_blocks(self, timeout_s: float) -> None:
        """All of them; returns when the decode worker has taken them.

        It still writes until then: grpc.aio calls it an internal error of the other
        side when a call ends under a write.
        """
        for _ in range(self._num_blocks):
            while not self._exported:
                self._exported.extend(await self._stream.next_exported())
            async with asyncio.timeout(timeout_s):
                await self._send_block(self._exported[0])
        while self._num_untaken:
            self._taken.clear()
            async with asyncio.timeout(timeout_s):
                await self._taken.wait()

    async def _send_block(self, block: ExportedBlock) -> None:
        num_bytes = block.num_tokens * self._front.info.token_bytes
        data = self._front.arena.outbox[block.outbox_slot][:num_bytes]
        message = worker_pb2.KvBlock(
            index=block.block_index, num_tokens=block.num_tokens, checksum=checksum(data)
        )
        self._exported.popleft()
        self._num_untaken += 1
        if self._by_reference:
            message.outbox_slot = block.outbox_slot
            self._sent.append(block.outbox_slot)
        else:
            message.data = data.tobytes()
            self._stream.free_outbox([block.outbox_slot])
        await self._write(worker_pb2.PrefillResponse(block=message))

    async def _write(self, response: worker_pb2.PrefillResponse) -> None:
        async with self._writing:
            await self._context.write(response)

    def close(self) -> None:
        """Give back what nobody will read."""
        left = [*self._sent, *(block.outbox_slot for block in self._exported)]
        left += [block.outbox_slot for block in self._stream.take_exported()]
        self._stream.free_outbox(left)
        self._sent.clear()
        self._exported.clear()
