"""The ways to an answer that are compared: each takes a text, and says what it heard."""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

import grpc
import orjson

from firsttoken.client import MeshClient
from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.bench.http_stream import HttpStream, open_stream, post
from services.bench.overhead_floor import SERVICE, Messages
from services.runtime.channels import open_channel

FLOOR_BYTES = 100
PATH = "/v1/completions"

Request: TypeAlias = Any


class Heard(NamedTuple):
    """Of one answer; `ttft_s` from just before the call."""

    ttft_s: float
    num_messages: int
    # Of the messages, where they are known.
    num_bytes: int = 0


class Row(Protocol):
    async def prepare(self, text: str, max_tokens: int) -> Request:
        """What is made before the clock starts."""

    async def ask(self, request: Request) -> Heard: ...


class Echo:
    """A unary call of nothing but grpc.aio."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = channel.unary_unary(f"/{SERVICE}/Echo")

    async def prepare(self, text: str, max_tokens: int) -> Request:
        return b"." * FLOOR_BYTES

    async def ask(self, request: Request) -> Heard:
        began_s = time.perf_counter()
        await self._call(request)
        return Heard(time.perf_counter() - began_s, 1)


class Stream:
    """A stream of so many messages from a server that has them ready."""

    def __init__(self, channel: grpc.aio.Channel, messages: Messages) -> None:
        self._call: Any = channel.unary_stream(f"/{SERVICE}/Stream")
        self._request = messages.pack(FLOOR_BYTES)

    async def prepare(self, text: str, max_tokens: int) -> Request:
        return self._request

    async def ask(self, request: Request) -> Heard:
        return await _read(self._call, request, len)


class Worker:
    """A worker called with ids: what the tokenizer gave is asked for before the clock starts."""

    def __init__(self, tokenizer: grpc.aio.Channel, worker: grpc.aio.Channel) -> None:
        self._tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(tokenizer)
        self._call = worker_pb2_grpc.WorkerServiceStub(worker).Generate

    async def prepare(self, text: str, max_tokens: int) -> Request:
        encoded = await self._tokenizer.Encode(tokenizer_pb2.EncodeRequest(text=text))
        return worker_pb2.GenerateRequest(
            token_ids=encoded.token_ids,
            prefix_keys=encoded.prefix_keys,
            sampling=_sampling(max_tokens),
        )

    async def ask(self, request: Request) -> Heard:
        return await _read(self._call, request)


class Router:
    """A stub that looks at the messages' sizes."""

    def __init__(self, router: grpc.aio.Channel) -> None:
        self._call = inference_pb2_grpc.InferenceServiceStub(router).Generate

    async def prepare(self, text: str, max_tokens: int) -> Request:
        return inference_pb2.GenerateRequest(text=text, sampling=_sampling(max_tokens))

    async def ask(self, request: Request) -> Heard:
        return await _read(self._call, request, lambda message: message.ByteSize())


class Client:
    def __init__(self, client: MeshClient) -> None:
        self._client = client

    async def prepare(self, text: str, max_tokens: int) -> Request:
        return text, max_tokens

    async def ask(self, request: Request) -> Heard:
        text, max_tokens = request
        ttft_s, num_pieces = 0.0, 0
        began_s = time.perf_counter()
        options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        async with self._client.generate(text, **options) as stream:
            async for _ in stream:
                ttft_s = ttft_s or time.perf_counter() - began_s
                num_pieces += 1
        return Heard(ttft_s, num_pieces + 1)


class Http:
    """An OpenAI-compatible server. As many connections as there are requests at once."""

    def __init__(self, url: str, stack: AsyncExitStack, **more: Any) -> None:
        self._url = url
        self._stack = stack
        self._more = more
        self._idle: list[HttpStream] = []

    async def prepare(self, text: str, max_tokens: int) -> Request:
        asked = {"stream": True, "max_tokens": max_tokens, "temperature": 0, **self._more}
        return post(self._url, PATH, orjson.dumps({"prompt": text, **asked}))

    async def ask(self, request: Request) -> Heard:
        """Raises ConnectionError, also where the answer is not 200."""
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        if self._idle:
            stream = self._idle.pop()
        else:
            stream = await self._stack.enter_async_context(open_stream(self._url))
        heard = await stream.ask(request)
        self._idle.append(stream)
        return Heard(heard.ttft_s, heard.num_events, len(heard.answer))


class Addresses(NamedTuple):
    """Of a mesh, and of a floor: one that streams, and one that passes on what it streams."""

    floor: str
    passing: str
    tokenizer: str
    worker: str
    router: str
    # "" where there is none.
    url: str = ""


class Ways(NamedTuple):
    rows: dict[str, Row]
    # Why others are not among them.
    skipped: dict[str, str]
    # To see how an answer comes: its messages, and their bytes.
    sizes: Row
    # Streams like such an answer's, straight and passed on.
    like: Callable[[Messages], dict[str, Row]]


NAMES = ("floor unary", "floor stream", "worker", "direct", "proxied", "gateway")
UNARY, STREAM, WORKER, DIRECT, PROXIED, GATEWAY = NAMES
STRAIGHT, PASSED_ON = "floor, straight", "floor, passed on"


@asynccontextmanager
async def open_ways(addresses: Addresses) -> AsyncIterator[Ways]:
    async with AsyncExitStack() as stack:

        async def channel(address: str) -> grpc.aio.Channel:
            return await stack.enter_async_context(open_channel(address))

        floor, passing = await channel(addresses.floor), await channel(addresses.passing)
        worker = Worker(await channel(addresses.tokenizer), await channel(addresses.worker))
        rows: dict[str, Row] = {
            UNARY: Echo(floor),
            STREAM: Stream(floor, Messages(1, FLOOR_BYTES)),
            WORKER: worker,
        }
        skipped = {}
        if "direct" in inspect.signature(MeshClient.__init__).parameters:
            rows[DIRECT] = Client(await stack.enter_async_context(_client(addresses, direct=True)))
            proxied = await stack.enter_async_context(_client(addresses, direct=False))
        else:
            skipped[DIRECT] = "this MeshClient has no direct way to a worker"
            proxied = await stack.enter_async_context(_client(addresses))
        rows[PROXIED] = Client(proxied)
        if addresses.url:
            rows[GATEWAY] = Http(addresses.url, stack, ignore_eos=True)
        else:
            skipped[GATEWAY] = "the mesh has no gateway"

        def like(messages: Messages) -> dict[str, Row]:
            return {
                STRAIGHT: Stream(floor, messages),
                PASSED_ON: Stream(passing, messages),
            }

        yield Ways(rows, skipped, Router(await channel(addresses.router)), like)


def _client(addresses: Addresses, **options: Any) -> MeshClient:
    return MeshClient(addresses.router, **options)


def _sampling(max_tokens: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def _read(
    call: Callable[[Request], Any], request: Request, size: Callable[[Any], int] | None = None
) -> Heard:
    began_s = time.perf_counter()
    stream = call(request)
    message = await stream.read()
    ttft_s = time.perf_counter() - began_s
    num_messages = num_bytes = 0
    while message is not grpc.aio.EOF:
        num_messages += 1
        num_bytes += size(message) if size else 0
        message = await stream.read()
    if (code := await stream.code()) is not grpc.StatusCode.OK:
        raise ConnectionError(f"{code.name}: {await stream.details()}")
    return Heard(ttft_s, num_messages, num_bytes)
