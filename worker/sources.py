"""Brings the KV of a prompt from wherever it is cheapest, beside the request itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from firsttoken.worker.v1 import worker_pb2
from services.runtime.interceptor import Context
from services.runtime.tasks import end_tasks
from services.runtime.telemetry import TraceContext
from worker.handoff import Handoffs, Metadata
from worker.messages import Source
from worker.origin import Origin
from worker.requests import Prompt
from worker.stream import TokenStream
from worker.taking import HandoffFailed


class KvSources:
    """Another worker may compute the prompt (hand-off)."""

    def __init__(self, handoffs: Handoffs) -> None:
        self._handoffs = handoffs

    def source(self, request: worker_pb2.GenerateRequest) -> Source:
        """Whether the core waits for blocks, until `bring` has decided."""
        return Source.HOLD if request.prefill_address else Source.COMPUTE

    @asynccontextmanager
    async def bring(
        self,
        stream: TokenStream,
        request: worker_pb2.GenerateRequest,
        prompt: Prompt,
        origin: Origin,
        context: Context,
    ) -> AsyncIterator[None]:
        """While the context is open, blocks may come; leaving it stops that."""
        if self.source(request) is Source.COMPUTE:
            yield
            return
        caller = TraceContext.from_metadata(context.invocation_metadata())
        metadata = caller.metadata() if caller.span_id else ()
        task = asyncio.create_task(self._bring(stream, request, prompt, origin, metadata))
        try:
            yield
        finally:
            await end_tasks([task])

    async def _bring(
        self,
        stream: TokenStream,
        request: worker_pb2.GenerateRequest,
        prompt: Prompt,
        origin: Origin,
        metadata: Metadata,
    ) -> None:
        submitted_s = time.monotonic()
        try:
            num_cached_blocks = await stream.started()
            origin.path.reason = self._handoffs.why_not(prompt, num_cached_blocks)
            if not origin.path.reason:
                await self._handoffs.run(
                    stream, request, num_cached_blocks, origin, metadata, submitted_s
                )
                origin.path.reason = "the prompt was long enough"
        except HandoffFailed as failure:
            origin.path.reason = f"prefill worker lost: {failure}"
        finally:
            stream.loading_ended()
