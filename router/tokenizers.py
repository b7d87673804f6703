"""Token ids and prefix keys: from this process, or from whichever tokenizer is ready."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc

from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from router.embedded import EmbeddedTokenizer
from router.peers import Hop, PeerLost, answer_of
from router.roster import Tokenizer
from services.core.errors import Unavailable
from services.core.ledger import Ledger, Segment
from services.runtime.channels import Channels
from services.runtime.delays import inject
from services.runtime.protocol import spend_failed_call

# When all have failed and none has come since, ask them again.
RETRY_S = 0.2


class Tokenizers:
    """They take turns; where one fails, the next is asked."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._ready: tuple[Tokenizer, ...] = ()
        self._turn = 0
        self._changed = asyncio.Event()
        self.embedded = EmbeddedTokenizer(self._tell)

    def update(self, ready: tuple[Tokenizer, ...]) -> None:
        if ready != self._ready:
            self._ready = ready
            self._tell()

    async def encode(
        self,
        request: tokenizer_pb2.EncodeRequest,
        hop: Hop,
        ledger: Ledger,
        *,
        began_s: float,
        wait_s: float,
    ) -> tokenizer_pb2.EncodeResponse:
        """Raises Unavailable when none has answered for `wait_s`, from `began_s` on.

        Until the one is called that answers, all time is preprocess.
        """
        problem = "none is ready"
        while True:
            if self.embedded.ready:
                return await self.embedded.encode(request, ledger, began_s=began_s)
            for tokenizer in self._in_turn():
                called_s = time.monotonic()
                try:
                    response = await self._call(tokenizer, request, hop)
                except PeerLost as lost:
                    problem = f"{tokenizer.id}: {lost}"
                    continue
                except grpc.aio.AioRpcError as error:
                    ledger.spend(Segment.PREPROCESS, called_s - began_s)
                    spend_failed_call(ledger, error, seen_s=time.monotonic() - called_s)
                    raise
                seen_s = time.monotonic() - called_s
                lost_s = called_s - began_s
                ledger.spend(Segment.PREPROCESS, lost_s + response.encode_ms / 1000)
                ledger.spend(Segment.TRANSFER, seen_s - response.total_ms / 1000)
                return response
            left_s = began_s + wait_s - time.monotonic()
            if left_s <= 0:
                ledger.spend(Segment.PREPROCESS, time.monotonic() - began_s)
                raise Unavailable(
                    f"no tokenizer answered for {wait_s:g} s (router.worker_wait_s): {problem}",
                    reason="NO_TOKENIZER",
                )
            await self._wait_for_change(min(RETRY_S, left_s))

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _in_turn(self) -> tuple[Tokenizer, ...]:
        self._turn += 1
        first = self._turn % max(1, len(self._ready))
        return self._ready[first:] + self._ready[:first]

    async def _call(
        self, tokenizer: Tokenizer, request: tokenizer_pb2.EncodeRequest, hop: Hop
    ) -> tokenizer_pb2.EncodeResponse:
        await inject(hop.delay_ms)
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(self._channels.get(tokenizer.address))
        return await answer_of(
            stub.Encode(request, timeout=hop.time_remaining(), metadata=hop.metadata)
        )

    async def _wait_for_change(self, timeout_s: float) -> None:
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()
