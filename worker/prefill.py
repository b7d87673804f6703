"""Computing a prompt for a decode worker, and handing its KV over in the same call.

The KV lives exactly as long as the call: a cancel, a crash or a deadline on either
side frees it, and a decode worker that takes no more slows this one down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from firsttoken.worker.v1 import worker_pb2
from services.core import attributes as names
from services.core.errors import InvalidArgument, Unavailable
from services.core.ledger import Ledger, Segment
from services.core.settings import DelaySettings
from services.runtime.delays import inject
from services.runtime.interceptor import Context
from services.runtime.tasks import end_tasks
from services.runtime.timing import spending, timing
from worker.copying import Copier
from worker.front import EngineFront
from worker.messages import Token
from worker.origin import Origin
from worker.requests import Prompt, check_request, went_before
from worker.sending import BlockSender
from worker.sources import KvSources
from worker.stream import TokenStream

_TRANSPORTS = tuple(
    sorted({*worker_pb2.KvTransport.values()} - {worker_pb2.KV_TRANSPORT_UNSPECIFIED})
)


class Prefill:
    """One such call."""

    def __init__(
        self, front: EngineFront, sources: KvSources, copier: Copier, delay_ms: DelaySettings
    ) -> None:
        self._front = front
        self._sources = sources
        self._copier = copier
        self._delay_ms = delay_ms
        self._num_prompt_tokens = 0
        self.ledger = Ledger(time.monotonic())
        self.origin = Origin()

    def attributes(self) -> dict[str, Any]:
        """Of the span."""
        return {names.INPUT_TOKENS: self._num_prompt_tokens, **self.origin.attributes()}

    async def serve(
        self,
        requests: AsyncIterator[worker_pb2.PrefillRequest],
        context: Context,
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: a decode worker that takes nothing for so long is given up."""
        front, origin = self._front, self.origin
        with timing(self.ledger, Segment.TRANSFER):
            start = await _read_start(requests, front)
        await inject(self._delay_ms.handoff_unowned)
        with spending(self.ledger, Segment.PREPROCESS):
            prompt = check_request(start.request, front.info)
            num_blocks = _num_blocks(prompt, start, front.info.block_tokens)
            source = self._sources.source(start.request, prompt)
        self._num_prompt_tokens = len(prompt.token_ids)
        with front.submit(
            prompt,
            source=source,
            export_from=start.first_block,
            export_credit=start.credit_blocks,
            offer=start.transport == worker_pb2.KV_TRANSPORT_ENGINE,
            before=went_before(start.request, self.ledger),
        ) as stream:
            sender = BlockSender(
                *(front, self._copier, stream, start, num_blocks, context), timeout_s=timeout_s
            )
            reading = asyncio.ensure_future(sender.read_taken(requests))
            beating = asyncio.ensure_future(sender.send_progress())
            sending = asyncio.ensure_future(sender.send())
            try:
                async with self._sources.bring(
                    stream, source, start.request, prompt, origin, context
                ):
                    token = await self._first_token(stream)
                origin.tell_hidden(self.ledger)
                self.ledger.hide("export", sender.sending_s)
                origin.leave(self.ledger, time.monotonic())
                self._sources.tell_writes(prompt, origin, self.ledger)
                await inject(self._delay_ms.handoff_first_token)
                await sender.send_first_token(token, self.ledger)
                if not token.finish:
                    await sending
            except TimeoutError:
                raise Unavailable(
                    f"the decode worker has taken no block for {timeout_s:g} s", reason="NOT_TAKEN"
                ) from None
            finally:
                await end_tasks([reading, beating, sending])
                sender.close()

    async def _first_token(self, stream: TokenStream) -> Token:
        arrival = await stream.next()
        self.origin.note(arrival, self.ledger)
        return arrival.tokens[0]


def _num_blocks(prompt: Prompt, start: worker_pb2.PrefillStart, block_tokens: int) -> int:
    """Those to be sent."""
    num_blocks = -(-prompt.num_tokens // block_tokens)
    if start.first_block >= num_blocks:
        raise InvalidArgument.of(
            "start.first_block", f"must be below {num_blocks}; got {start.first_block}"
        )
    return num_blocks - start.first_block


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
        if request.start.transport not in _TRANSPORTS:
            known = ", ".join(map(worker_pb2.KvTransport.Name, _TRANSPORTS))
            raise InvalidArgument.of(
                "start.transport", f"must be one of {known}; got {request.start.transport}"
            )
        by_engine = request.start.transport == worker_pb2.KV_TRANSPORT_ENGINE
        if by_engine and not front.info.transport:
            raise InvalidArgument.of("start.transport", f"{front.info.name} cannot move KV itself")
        if not by_engine and not front.info.kv_readable:
            raise InvalidArgument.of("start.transport", f"only {front.info.name} can move its KV")
        if not by_engine and not request.start.credit_blocks:
            raise InvalidArgument.of("start.credit_blocks", "must be at least 1; got 0")
        # It is computed here, and not passed on.
        request.start.request.ClearField("prefill_address")
        return request.start
    raise InvalidArgument.of("start", "must be the first message of the call")
