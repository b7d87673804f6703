"""Brings the KV of a prompt from wherever it is cheapest, beside the request itself.

Another worker computes the prompt (hand-off), or the KV store has blocks of it (load).
A hand-off comes first where it pays: the prefill worker asks the store itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from firsttoken.worker.v1 import worker_pb2
from services.core.ledger import Ledger
from services.runtime.interceptor import CallMetadata
from services.runtime.tasks import end_tasks
from services.runtime.telemetry import TraceContext
from worker.handoff import Handoffs, Metadata
from worker.messages import Source
from worker.origin import Origin
from worker.requests import Prompt
from worker.stream import TokenStream
from worker.taking import HandoffFailed
from worker.tier import KvTier, TierStats


class KvSources:
    def __init__(self, handoffs: Handoffs, tier: KvTier) -> None:
        self._handoffs = handoffs
        self._tier = tier

    @property
    def stats(self) -> TierStats:
        return self._tier.stats

    def source(self, request: worker_pb2.GenerateRequest, prompt: Prompt) -> Source:
        """Whether the core waits for blocks, until `bring` has decided."""
        if request.prefill_address or self._tier.may_load(prompt.num_tokens, prompt.prefix_keys):
            return Source.HOLD
        self._tier.expect(prompt.prefix_keys, tenant=request.tenant)
        return Source.COMPUTE

    def tell_writes(self, prompt: Prompt, origin: Origin, ledger: Ledger) -> None:
        """Once its first token has come: what was written of what it computed until then."""
        assert ledger.first_token_s is not None
        write_s = self._tier.write_s(
            prompt.prefix_keys,
            cached_tokens=origin.cached_tokens,
            since_s=ledger.arrived_s,
            until_s=ledger.first_token_s,
        )
        ledger.hide("write_behind", write_s)

    @asynccontextmanager
    async def bring(
        self,
        stream: TokenStream,
        source: Source,
        request: worker_pb2.GenerateRequest,
        prompt: Prompt,
        origin: Origin,
        call: CallMetadata,
    ) -> AsyncIterator[None]:
        """While the context is open, blocks may come; leaving it stops that."""
        tasks = []
        if source is not Source.COMPUTE:
            caller = TraceContext.from_metadata(call.invocation_metadata())
            metadata = caller.metadata() if caller.span_id else ()
            bringing = self._bring(stream, request, prompt, origin, metadata)
            tasks.append(asyncio.create_task(bringing, name="bring kv"))
        try:
            yield
        finally:
            await end_tasks(tasks)
            if origin.first is not None:
                self._tier.settle(origin.load, origin.first)

    async def _bring(
        self,
        stream: TokenStream,
        request: worker_pb2.GenerateRequest,
        prompt: Prompt,
        origin: Origin,
        metadata: Metadata,
    ) -> None:
        try:
            if request.prefill_address and await self._hand_off(
                stream, request, prompt, origin, metadata
            ):
                return
            await self._tier.load(
                stream,
                prompt.num_tokens,
                prompt.prefix_keys,
                tenant=request.tenant,
                on_outcome=origin.note_load,
            )
        finally:
            stream.loading_ended()

    async def _hand_off(
        self,
        stream: TokenStream,
        request: worker_pb2.GenerateRequest,
        prompt: Prompt,
        origin: Origin,
        metadata: Metadata,
    ) -> bool:
        """False: it does not pay, or cannot be."""
        num_cached_blocks = await stream.started()
        origin.path.reason = self._handoffs.why_not(prompt, num_cached_blocks)
        if origin.path.reason:
            return False
        self._tier.expect(prompt.prefix_keys, tenant=request.tenant)
        # A short answer may end before the call does.
        origin.path.reason = "the prompt was long enough"
        try:
            await self._handoffs.run(stream, request, num_cached_blocks, origin, metadata)
        except HandoffFailed as failure:
            origin.path.prefill_failed = True
            origin.path.reason = f"prefill worker lost: {failure}"
            # With its first token passed on, what is missing is only to be computed.
            return origin.path.handed_off
        return True
