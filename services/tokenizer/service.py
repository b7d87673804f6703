"""TokenizerService: protobuf to the encoder and back, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, TypeVar

from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.core import attributes as names
from services.core.errors import MeshError
from services.core.ledger import Ledger, Segment
from services.core.settings import MeshConfig
from services.core.tokens import BYTES_PER_TOKEN
from services.encoding.encoder import EncodedPrompt, Encoder
from services.encoding.metrics import Counts
from services.encoding.requests import begin, check_model, check_size, to_response
from services.runtime.delays import inject
from services.runtime.membership import ControlClient
from services.runtime.protocol import tell_ledger
from services.runtime.reporter import Reporter
from services.runtime.server import Context
from services.runtime.telemetry import TraceContext
from services.runtime.timing import spending

T = TypeVar("T")


class Backend(NamedTuple):
    """What the service serves with."""

    encoder: Encoder
    threads: Executor
    control: ControlClient
    reporter: Reporter

    @property
    def config(self) -> MeshConfig:
        return self.control.snapshot.config

    async def run(self, work: Callable[[], T]) -> T:
        """A caller that is gone by the time a thread is free costs nothing."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


class TokenizerService(tokenizer_pb2_grpc.TokenizerServiceServicer):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.counts = Counts()

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        ledger = Ledger(time.monotonic())
        check_model(request.model, self._backend.encoder)
        backend = self._backend
        try:
            with self.counts.encoding():
                encoded = await _encode(backend, request, ledger)
            await inject(backend.config.debug.delay_ms.tokenizer_unowned)
            with spending(ledger, Segment.PREPROCESS):
                response = to_response(encoded, backend.encoder, request)
            response.encode_ms = ledger.spent_s(Segment.PREPROCESS) * 1000
            response.total_ms = (time.monotonic() - ledger.arrived_s) * 1000
        except MeshError as error:
            ledger.mark_failure(time.monotonic())
            tell_ledger(context, ledger)
            _trace(backend, context, ledger, error=error.message)
            raise
        num_tokens = len(encoded.token_ids) // BYTES_PER_TOKEN
        self.counts.encoded(num_tokens)
        _trace(backend, context, ledger, num_tokens=num_tokens)
        return response

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: Context
    ) -> tokenizer_pb2.DecodeResponse:
        check_model(request.model, self._backend.encoder)
        encoder = self._backend.encoder
        text = await self._backend.run(
            lambda: encoder.decode(
                request.token_ids, skip_special_tokens=request.skip_special_tokens
            )
        )
        response = tokenizer_pb2.DecodeResponse(text=text)
        check_size(response, "token_ids")
        return response

    async def GetInfo(
        self, request: tokenizer_pb2.GetInfoRequest, context: Context
    ) -> tokenizer_pb2.GetInfoResponse:
        check_model(request.model, self._backend.encoder)
        encoder = self._backend.encoder
        vocabulary = encoder.vocabulary
        return tokenizer_pb2.GetInfoResponse(
            model=encoder.model,
            vocabulary_size=vocabulary.vocabulary_size,
            block_tokens=encoder.block_tokens,
            context_length=vocabulary.context_length,
            eos_token_ids=vocabulary.eos_token_ids,
            chat_template=vocabulary.chat_template,
            nfc=self._backend.config.tokenizer.nfc,
        )


async def _encode(
    backend: Backend, request: tokenizer_pb2.EncodeRequest, ledger: Ledger
) -> EncodedPrompt:
    config = backend.config
    try:
        await inject(config.debug.delay_ms.tokenizer_encode)
        return await backend.run(lambda: begin(backend.encoder, request, config.tokenizer).finish())
    finally:
        ledger.record(Segment.PREPROCESS, ledger.arrived_s, time.monotonic())


def _trace(
    backend: Backend, context: Context, ledger: Ledger, *, num_tokens: int = 0, error: str = ""
) -> None:
    reporter = backend.reporter
    if not reporter.enabled:
        return
    caller = TraceContext.from_metadata(context.invocation_metadata())
    sampled = reporter.decide(caller, backend.config.telemetry.sample_ratio)
    reporter.record_request(
        "tokenizer.encode",
        caller.child(sampled=sampled),
        caller.span_id,
        ledger,
        {names.MODEL: backend.encoder.model, names.INPUT_TOKENS: num_tokens},
        error=error,
    )
