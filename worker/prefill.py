"""Computing a prompt for a decode worker, and handing its KV over in the same call.

The KV lives exactly as long as the call: a cancel, a crash or a deadline on either
side frees it, and a decode worker that takes no more slows this one down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from firsttoken.worker.v1 import worker_pb2
from services.core.errors import InvalidArgument, Unavailable
from services.core.ledger import Ledger
from services.runtime.interceptor import Context
from services.runtime.tasks import end_tasks
from worker.copying import Copier
from worker.front import EngineFront
from worker.messages import Token
from worker.origin import Origin
from worker.requests import check_request
from worker.sending import BlockSender
from worker.sources import KvSources
from worker.stream import TokenStream

_TRANSPORTS = tuple(
    sorted({*worker_pb2.KvTransport.values()} - {worker_pb2.KV_TRANSPORT_UNSPECIFIED})
)


async def serve_prefill(
    front: EngineFront,
    sources: KvSources,
    copier: Copier,
    requests: AsyncIterator[worker_pb2.PrefillRequest],
    context: Context,
    *,
    timeout_s: float,
) -> None:
    """`timeout_s`: a decode worker that takes nothing for so long is given up."""
    ledger = Ledger(time.monotonic())
    start = await _read_start(requests, front)
    prompt = check_request(start.request, front.info)
    num_blocks = -(-prompt.num_tokens // front.info.block_tokens)
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
        offer=start.transport == worker_pb2.KV_TRANSPORT_ENGINE,
    ) as stream:
        num_blocks -= start.first_block
        sender = BlockSender(front, copier, stream, start, num_blocks, context, timeout_s=timeout_s)
        reading = asyncio.ensure_future(sender.read_taken(requests))
        beating = asyncio.ensure_future(sender.send_progress())
        sending = asyncio.ensure_future(sender.send())
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
            await end_tasks([reading, beating, sending])
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
        if request.start.transport not in _TRANSPORTS:
            known = ", ".join(map(worker_pb2.KvTransport.Name, _TRANSPORTS))
            raise InvalidArgument.of(
                "start.transport", f"must be one of {known}; got {request.start.transport}"
            )
        by_engine = request.start.transport == worker_pb2.KV_TRANSPORT_ENGINE
        if by_engine and not front.info.transport:
            raise InvalidArgument.of("start.transport", f"{front.info.name} cannot move KV itself")
        if not by_engine and not request.start.credit_blocks:
            raise InvalidArgument.of("start.credit_blocks", "must be at least 1; got 0")
        # It is computed here, and not passed on.
        request.start.request.ClearField("prefill_address")
        return request.start
    raise InvalidArgument.of("start", "must be the first message of the call")


async def _first_token(stream: TokenStream, ledger: Ledger, origin: Origin) -> Token:
    arrival = await stream.next()
    origin.note(arrival, ledger)
    return arrival.tokens[0]
