"""TokenizerService: protobuf to the encoder and back, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, TypeVar

from google.protobuf.message import Message

from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.core import attributes as names
from services.core.errors import InvalidArgument, MeshError
from services.core.keys import join_keys
from services.core.ledger import Ledger, Segment
from services.core.settings import MeshConfig, TokenizerSettings
from services.core.tokens import BYTES_PER_TOKEN
from services.runtime.channels import MAX_MESSAGE_BYTES
from services.runtime.delays import inject
from services.runtime.membership import ControlClient
from services.runtime.protocol import tell_ledger
from services.runtime.reporter import Reporter
from services.runtime.server import Context
from services.runtime.telemetry import TraceContext
from services.runtime.timing import spending
from services.tokenizer.chat import parse_chat
from services.tokenizer.encoder import EncodedPrompt, Encoder, Prompt
from services.tokenizer.metrics import Counts

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
        self._check_model(request.model)
        backend = self._backend
        try:
            with self.counts.encoding():
                encoded = await _encode(backend, request, ledger)
            await inject(backend.config.debug.delay_ms.tokenizer_unowned)
            with spending(ledger, Segment.PREPROCESS):
                response = tokenizer_pb2.EncodeResponse(
                    token_ids=encoded.token_ids,
                    prefix_keys=join_keys(encoded.prefix_keys),
                    block_tokens=backend.encoder.block_tokens,
                )
                _check_size(response, request.WhichOneof("input") or "input")
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
        self._check_model(request.model)
        encoder = self._backend.encoder
        text = await self._backend.run(
            lambda: encoder.decode(
                request.token_ids, skip_special_tokens=request.skip_special_tokens
            )
        )
        response = tokenizer_pb2.DecodeResponse(text=text)
        _check_size(response, "token_ids")
        return response

    async def GetInfo(
        self, request: tokenizer_pb2.GetInfoRequest, context: Context
    ) -> tokenizer_pb2.GetInfoResponse:
        self._check_model(request.model)
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

    def _check_model(self, model: str) -> None:
        served = self._backend.encoder.model
        if model not in ("", served):
            raise InvalidArgument.of("model", f"must be {served}, the model served; got {model}")


def _check_size(response: Message, field: str) -> None:
    """Raises InvalidArgument for an answer that is too long to be sent."""
    if (num_bytes := response.ByteSize()) > MAX_MESSAGE_BYTES:
        rule = f"must be shorter: the answer has {num_bytes} bytes, of {MAX_MESSAGE_BYTES} at most"
        raise InvalidArgument.of(field, rule)


async def _encode(
    backend: Backend, request: tokenizer_pb2.EncodeRequest, ledger: Ledger
) -> EncodedPrompt:
    config = backend.config
    try:
        await inject(config.debug.delay_ms.tokenizer_encode)
        return await backend.run(lambda: _encode_now(backend.encoder, request, config.tokenizer))
    finally:
        ledger.record(Segment.PREPROCESS, ledger.arrived_s, time.monotonic())


def _encode_now(
    encoder: Encoder, request: tokenizer_pb2.EncodeRequest, settings: TokenizerSettings
) -> EncodedPrompt:
    prompt = _prompt(request, settings)
    return encoder.encode(
        prompt, tenant=request.tenant, cache_salt=request.cache_salt, settings=settings
    )


def _prompt(request: tokenizer_pb2.EncodeRequest, settings: TokenizerSettings) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "chat":
            return parse_chat(request.chat, settings)
        case "token_ids":
            return request.token_ids
    raise InvalidArgument.of("input", "must be one of text, chat and token_ids")


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
