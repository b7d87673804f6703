"""A client of the mesh. Needs grpcio and protobuf, nothing else.

async with MeshClient("127.0.0.1:7100") as client:
    async with client.generate("Once upon a time", max_tokens=32) as stream:
        async for piece in stream:
            print(piece.text, end="")
    print(stream.answer.ledger)
"""

from __future__ import annotations

import asyncio
import struct
import time
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, TypeAlias, Unpack

import grpc

from firsttoken._direct import DirectCall, Reluctance, Ways
from firsttoken._errors import MeshError, Violation, to_mesh_error
from firsttoken._ledger import SEGMENTS, as_seen
from firsttoken._requests import Options, Prompt, build_request
from firsttoken._security import File, TlsOptions, check_key
from firsttoken._workers import WorkerChannels
from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc

__all__ = [
    "SEGMENTS",
    "Answer",
    "GenerationStream",
    "MeshClient",
    "MeshError",
    "Options",
    "Piece",
    "PositionLogprobs",
    "Prompt",
    "TokenLogprob",
    "Usage",
    "Violation",
]

MAX_MESSAGE_BYTES = 16 << 20
# A year: gRPC takes much longer ones, and infinity, for no time at all.
MAX_DEADLINE_S = 366 * 24 * 3600.0
ROUTER_KEEPALIVE = (("grpc.keepalive_time_ms", 30_000),)
# A worker that stands still is given up after 15 s: the router has others. The last is what
# gRPC 1.76 obeys.
WORKER_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)
BYTES_PER_TOKEN = 4

Call: TypeAlias = (
    "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"
)


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float


class PositionLogprobs(NamedTuple):
    """Of one generated token: its own, and the likeliest alternatives, likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    # Prompt tokens whose KV was reused.
    cached_tokens: int
    # Prompt tokens that the engine evaluated, by its own count.
    evaluated_prompt_tokens: int


class KvPath(NamedTuple):
    """Where the KV of the prompt came from. An expected time of 0 is unknown."""

    # Another worker computed the prompt, and which.
    handed_off: bool
    prefill_worker_id: str
    # Blocks that came out of the KV store.
    loaded_blocks: int
    # Loading what was missing, as expected and as it went, and computing it instead.
    expected_load_ms: float
    load_ms: float
    expected_compute_ms: float
    # How its KV came: "shared_memory", "grpc" or "engine".
    transport: str
    # Handed off on one host: from the end of the prompt's last step there to the start of
    # the first decode step here.
    handoff_gap_ms: float
    # Why this way, for people.
    reason: str


class Routing(NamedTuple):
    """How the worker was chosen."""

    strategy: str
    # Prompt tokens that were expected to be cached there; None: the strategy does not ask.
    predicted_cached_tokens: int | None
    # Workers that could have taken the request.
    candidates: int
    # For people.
    reason: str


class Piece(NamedTuple):
    """What became ready at once. Text may lag behind ids."""

    text: str
    token_ids: tuple[int, ...]
    # One per id, when asked for.
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete answer.

    `ledger` says where the time to first token went: segment to milliseconds.
    With `residual_ms`, which no segment owns, it adds up to `ttft_ms`, as this client
    measured it from the call to the first token. `hidden`: work beside that, name to
    milliseconds. MeshError has a ledger, too.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    # "stop" or "length".
    finish_reason: str
    # What ended it, when it was one of these.
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    ttft_ms: float
    ledger: dict[str, float]
    residual_ms: float
    hidden: dict[str, float]
    # Between the first and the second token, where another worker computed the prompt.
    handoff_ms: float
    kv_path: KvPath
    routing: Routing
    trace_id: str
    generation: int
    worker_id: str
    engine: str
    # Workers tried before one gave the first token, that one included.
    attempts: int
    # Workers that died under the answer, which went on elsewhere each time.
    migrations: int


class MeshClient:
    """An async context manager around one channel to a router.

    `tenant`: whose cached prefixes the requests may share. `api_key` says who is calling,
    or else `cert_file` with `key_file` on the router's port for certificates.

    TLS is used when `ca_file` is given, in PEM, or `tls`: then gRPC's own list of CAs
    counts. The router's certificate must have the name in `address`, or `server_name`.
    Files are read on entering, which raises OSError or ValueError for those that are of no
    use. A key goes unencrypted to this machine alone, unless `insecure`: ValueError.

    `direct`: fetch answers from the workers themselves, as the router plans it. Where a
    worker cannot be reached, or the router plans nothing, they come through the router.
    """

    def __init__(
        self,
        address: str,
        *,
        tenant: str = "",
        api_key: str | None = None,
        ca_file: File = None,
        cert_file: File = None,
        key_file: File = None,
        tls: bool = False,
        server_name: str | None = None,
        insecure: bool = False,
        direct: bool = True,
    ) -> None:
        self._address = address
        self._direct = direct
        self._tenant = tenant
        self._api_key = api_key
        self._tls = TlsOptions(tls, ca_file, cert_file, key_file, server_name)
        self._tls.check()
        if api_key:
            check_key(api_key, address, encrypted=self._tls.enabled, insecure=insecure)
        self._channel: grpc.aio.Channel | None = None
        self._workers = WorkerChannels(self._open_worker_channel, encrypted=self._tls.enabled)
        self._reluctance = Reluctance()
        # Closing a grpc.aio channel leaves calls alone that nobody waits for just then.
        self._streams: weakref.WeakSet[GenerationStream] = weakref.WeakSet()

    async def __aenter__(self) -> MeshClient:
        self._channel = self._open_channel(self._address, self._tls.server_name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is still running with CANCELLED. May be called twice."""
        for stream in self._streams:
            stream.cancel()
        channel, self._channel = self._channel, None
        await self._workers.close()
        if channel is not None:
            await channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> GenerationStream:
        """Start a request: its time to first token counts from here.

        Raises TypeError or ValueError at once for what no mesh could understand; what
        the mesh refuses, the stream raises as MeshError.
        """
        if self._channel is None:
            raise RuntimeError("enter the MeshClient first")
        request = build_request(prompt, options)
        deadline_s = options.get("deadline_s")
        if deadline_s is not None and not 0 < deadline_s <= MAX_DEADLINE_S:
            raise ValueError(f"deadline_s must be in (0, {MAX_DEADLINE_S:.0f}]; got {deadline_s}")
        started_s = time.monotonic()
        metadata = self._metadata(options)
        call: Call | DirectCall
        if self._direct and self._reluctance.may_plan:
            ways = Ways(self._channel, self._workers, self._reluctance)
            call = DirectCall(ways, request, metadata, deadline_s)
        else:
            stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
            call = stub.Generate(request, timeout=deadline_s, metadata=metadata)
        stream = GenerationStream(call, started_s)
        self._streams.add(stream)
        return stream

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """As `generate`, for the whole answer at once."""
        async with self.generate(prompt, **options) as stream:
            async for _ in stream:
                pass
        return stream.answer

    def _open_worker_channel(self, address: str, server_name: str | None) -> grpc.aio.Channel:
        return self._open_channel(address, server_name, WORKER_KEEPALIVE)

    def _open_channel(
        self,
        address: str,
        server_name: str | None,
        keepalive: tuple[tuple[str, int], ...] = ROUTER_KEEPALIVE,
    ) -> grpc.aio.Channel:
        """Encrypted if this client is. `server_name`: None, where it is in the address."""
        options: list[tuple[str, int | str]] = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            *keepalive,
        ]
        if not self._tls.enabled:
            if self._api_key:  # a proxy would read it
                options.append(("grpc.enable_http_proxy", 0))
            return grpc.aio.insecure_channel(address, options=options)
        if server_name:
            options.append(("grpc.ssl_target_name_override", server_name))
        return grpc.aio.secure_channel(address, self._tls.read(), options=options)

    def _metadata(self, options: Options) -> tuple[tuple[str, str], ...]:
        pairs = (
            ("authorization", f"Bearer {self._api_key}" if self._api_key else None),
            ("firsttoken-tenant", self._tenant),
            ("traceparent", options.get("traceparent")),
            ("tracestate", options.get("tracestate")),
        )
        return tuple((key, value) for key, value in pairs if value)


class GenerationStream:
    """The pieces of one answer, as they become ready; then `answer`.

    Leaving it as a context, cancelling the task that iterates, or `cancel` stops the
    request wherever it is. Iterating raises MeshError.
    """

    def __init__(self, call: Call | DirectCall, started_s: float) -> None:
        self._call = call
        self._started_s = started_s
        self._first_token_s: float | None = None
        self._pieces: list[Piece] = []
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """The whole, once the stream has ended."""
        if self._answer is None:
            raise RuntimeError("the answer is not complete: iterate to the end first")
        return self._answer

    def cancel(self) -> None:
        """May be called twice, and after the end."""
        self._call.cancel()

    async def __aenter__(self) -> GenerationStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if self._answer is not None:
            raise StopAsyncIteration
        response = await self._read()
        if response is None:
            raise MeshError(grpc.StatusCode.UNKNOWN, "the stream ended before the answer")
        if response.HasField("finished") or response.chunk.token_ids:
            self._first_token_s = self._first_token_s or time.monotonic()
        if response.HasField("finished"):
            self._answer = self._finish(response.finished)
            await self._read()  # the status: the call ends here, not when it is collected
            raise StopAsyncIteration
        piece = _to_piece(response.chunk)
        self._pieces.append(piece)
        return piece

    async def _read(self) -> inference_pb2.GenerateResponse | None:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            # After the first token, time is no part of a ledger any more.
            is_first = self._first_token_s is None
            elapsed_s = time.monotonic() - self._started_s if is_first else 0.0
            raise to_mesh_error(error, elapsed_ms=elapsed_s * 1e3) from None
        except asyncio.CancelledError:
            # grpc.aio raises this for `cancel` and `close` too. Only where this task is
            # being cancelled is it meant for the task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self.cancel()
                raise
            raise MeshError(grpc.StatusCode.CANCELLED, "the call was cancelled") from None
        return response if isinstance(response, inference_pb2.GenerateResponse) else None

    def _finish(self, finished: common_pb2.Finished) -> Answer:
        assert self._first_token_s is not None
        ttft_ms = (self._first_token_s - self._started_s) * 1000
        ledger = as_seen(finished.ledger, ttft_ms)
        usage = finished.usage
        return Answer(
            text="".join(piece.text for piece in self._pieces),
            token_ids=tuple(token_id for piece in self._pieces for token_id in piece.token_ids),
            logprobs=tuple(each for piece in self._pieces for each in piece.logprobs),
            finish_reason=_finish_reason(finished.finish_reason),
            stop_string=finished.stop_string if finished.HasField("stop_string") else None,
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
            usage=Usage(
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
                usage.evaluated_prompt_tokens,
            ),
            ttft_ms=ttft_ms,
            ledger=ledger,
            residual_ms=ttft_ms - sum(ledger.values()),
            hidden=dict(finished.ledger.hidden_ms),
            handoff_ms=finished.handoff_ms,
            kv_path=_kv_path(finished.kv_path),
            routing=_routing(finished.routing),
            trace_id=finished.trace_id,
            generation=finished.generation,
            worker_id=finished.worker_id,
            engine=finished.engine,
            attempts=finished.attempts,
            migrations=finished.migrations,
        )


def _finish_reason(value: common_pb2.FinishReason.ValueType) -> str:
    if value not in common_pb2.FinishReason.values():
        return str(value)  # of a mesh that is newer than this client
    return common_pb2.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower()


def _kv_path(path: common_pb2.KvPath) -> KvPath:
    return KvPath(**{name: getattr(path, name) for name in KvPath._fields})


def _routing(routing: common_pb2.Routing) -> Routing:
    is_predicted = routing.HasField("predicted_cached_tokens")
    predicted = routing.predicted_cached_tokens if is_predicted else None
    return Routing(routing.strategy, predicted, routing.candidates, routing.reason)


def _to_piece(chunk: common_pb2.Chunk) -> Piece:
    count = len(chunk.token_ids) // BYTES_PER_TOKEN
    logprobs = tuple(
        PositionLogprobs(_to_logprob(each.chosen), tuple(_to_logprob(top) for top in each.top))
        for each in chunk.logprobs
    )
    return Piece(chunk.text, struct.unpack(f"<{count}I", chunk.token_ids), logprobs)


def _to_logprob(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob)
