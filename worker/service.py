"""WorkerService: protobuf to plain values and back."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.core.config import DelaySettings
from services.core.errors import InvalidArgument, Unavailable
from services.core.keys import join_keys, split_keys
from services.core.ledger import Ledger, Segment
from services.core.sampling import DEFAULT_MAX_TOKENS, Sampling
from services.core.tokens import unpack
from services.models.vocabulary import Vocabulary
from services.runtime.delays import inject
from services.runtime.interceptor import Context
from services.runtime.protocol import (
    check_sampling,
    is_batch,
    ledger_to_proto,
    sampling_from_proto,
)
from services.runtime.telemetry import TraceContext, Tracing
from worker.answer import Answer
from worker.engines.contract import EngineInfo
from worker.front import EngineFront, TokenStream
from worker.messages import CoreLoad, FirstTokenTimes
from worker.watch import BlocksEvent, Event, LoadEvent, SnapshotEvent


class Prompt(NamedTuple):
    """A checked request."""

    token_ids: npt.NDArray[np.uint32]
    prefix_keys: tuple[bytes, ...]
    sampling: Sampling
    batch_class: bool


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(
        self,
        front: EngineFront,
        vocabulary: Vocabulary,
        *,
        worker_id: str,
        tracing: Tracing,
        delays: Callable[[], DelaySettings],
        on_drain: Callable[[], None],
    ) -> None:
        self._front = front
        self._vocabulary = vocabulary
        self._worker_id = worker_id
        self._tracing = tracing
        self._delays = delays
        self._on_drain = on_drain
        self._draining = False

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        ledger = Ledger(time.monotonic())
        if self._draining:
            raise Unavailable("the worker is draining", reason="DRAINING")
        prompt = check_request(request, self._front.info)
        await inject(self._delays().worker_unowned)
        answer = Answer(self._vocabulary, prompt.sampling)
        with self._front.submit(
            prompt.token_ids,
            prompt.prefix_keys,
            prompt.sampling,
            batch_class=prompt.batch_class,
        ) as stream:
            first = None
            async for chunk, times in _chunks(stream, answer, ledger):
                first = first or times
                if chunk.token_ids or chunk.text:
                    ledger.mark_first_token(time.monotonic())
                    yield worker_pb2.GenerateResponse(chunk=chunk)
        ledger.mark_first_token(time.monotonic())
        assert first is not None
        finished = self._finish(answer, ledger, prompt, first)
        self._record_trace(context, ledger, finished)
        yield worker_pb2.GenerateResponse(finished=finished)

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        with self._front.hub.watch() as watcher:
            while (event := await watcher.next()) is not None:
                if not (request.load_only and isinstance(event, BlocksEvent)):
                    yield _event_to_proto(event, load_only=request.load_only)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        self._draining = True
        self._on_drain()
        # A little before the caller's deadline, so that it still gets the answer.
        remaining_s = context.time_remaining()
        timeout_s = None if remaining_s is None else max(remaining_s - 0.1, 0.0)
        return worker_pb2.DrainResponse(num_running=await self._front.drain(timeout_s))

    def _finish(
        self, answer: Answer, ledger: Ledger, prompt: Prompt, first: FirstTokenTimes
    ) -> common_pb2.Finished:
        assert answer.finished is not None
        finished = answer.finished
        finished.usage.CopyFrom(
            common_pb2.Usage(
                prompt_tokens=len(prompt.token_ids),
                completion_tokens=answer.num_tokens,
                cached_tokens=first.cached_tokens,
                evaluated_prompt_tokens=first.evaluated_prompt_tokens,
            )
        )
        finished.ledger.CopyFrom(ledger_to_proto(ledger))
        finished.worker_id = self._worker_id
        finished.engine = self._front.info.name
        finished.attempts = 1
        return finished

    def _record_trace(
        self, context: Context, ledger: Ledger, finished: common_pb2.Finished
    ) -> None:
        if not self._tracing.enabled:
            return
        caller = TraceContext.from_metadata(context.invocation_metadata())
        self._tracing.record_request(
            "worker.generate",
            caller.child(),
            caller.span_id,
            ledger,
            {
                "firsttoken.engine": finished.engine,
                "gen_ai.request.model": self._front.info.model,
                "gen_ai.usage.input_tokens": finished.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": finished.usage.completion_tokens,
                "firsttoken.usage.cached_tokens": finished.usage.cached_tokens,
            },
        )


async def _chunks(
    stream: TokenStream, answer: Answer, ledger: Ledger
) -> AsyncIterator[tuple[common_pb2.Chunk, FirstTokenTimes | None]]:
    """Until the answer has ended; the first token's times come with the first chunk."""
    while answer.finished is None:
        arrival = await stream.next()
        first = arrival.tokens[0].first
        if first is not None:
            _record(ledger, first, arrival.received_s)
        yield answer.push(arrival.tokens), first


def _record(ledger: Ledger, first: FirstTokenTimes, received_s: float) -> None:
    """Front and core are one hop: they share this machine's monotonic clock."""
    loaded_s = first.sampled_s - first.prefill_s
    started_s = loaded_s - first.kv_load_s
    ledger.record(Segment.PREFILL_QUEUE, started_s - first.prefill_queue_s, started_s)
    ledger.record(Segment.KV_LOAD, started_s, loaded_s)
    ledger.record(Segment.PREFILL, loaded_s, first.sampled_s)
    ledger.record(Segment.TRANSFER, first.sampled_s, received_s)


def check_request(request: worker_pb2.GenerateRequest, info: EngineInfo) -> Prompt:
    """Raises InvalidArgument naming the field and its bound."""
    if request.model not in ("", info.model):
        raise InvalidArgument.of("model", f"must be {info.model!r}; got {request.model!r}")
    token_ids = unpack(request.token_ids, field="token_ids", vocabulary_size=info.vocabulary_size)
    room = info.max_context_tokens - 1
    if not 1 <= len(token_ids) <= room:
        raise InvalidArgument.of("token_ids", f"must be 1 to {room} tokens; got {len(token_ids)}")
    sampling = sampling_from_proto(request.sampling)
    check_sampling(
        sampling,
        max_context_tokens=info.max_context_tokens,
        vocabulary_size=info.vocabulary_size,
    )
    return Prompt(
        token_ids=token_ids,
        prefix_keys=_check_keys(request.prefix_keys, len(token_ids), info.block_tokens),
        sampling=_resolve(sampling, info.max_context_tokens - len(token_ids)),
        batch_class=is_batch(request.request_class),
    )


def _check_keys(joined: bytes, num_tokens: int, block_tokens: int) -> tuple[bytes, ...]:
    if not joined:
        return ()
    try:
        keys = split_keys(joined)
    except ValueError as error:
        raise InvalidArgument.of("prefix_keys", str(error)) from None
    expected = 1 + num_tokens // block_tokens
    if len(keys) != expected:
        raise InvalidArgument.of(
            "prefix_keys",
            f"must be the root and a key per full block of {block_tokens} tokens:"
            f" {expected} keys; got {len(keys)}",
        )
    return tuple(keys)


def _resolve(sampling: Sampling, room: int) -> Sampling:
    """Fill in what depends on the request: the seed, and a length that fits the context."""
    wanted = DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    seed = random.getrandbits(64) if sampling.seed is None else sampling.seed
    return dataclasses.replace(sampling, max_tokens=min(wanted, room), seed=seed)


def _event_to_proto(event: Event, *, load_only: bool) -> worker_pb2.WatchResponse:
    response = worker_pb2.WatchResponse(sequence=event.sequence, incarnation=event.incarnation)
    match event:
        case SnapshotEvent():
            keys = b"" if load_only else join_keys(event.prefix_keys)
            snapshot = worker_pb2.Snapshot(prefix_keys=keys, load=_load_to_proto(event.load))
            response.snapshot.CopyFrom(snapshot)
        case BlocksEvent(stored=True):
            response.stored.prefix_keys = join_keys(event.prefix_keys)
        case BlocksEvent():
            response.evicted.prefix_keys = join_keys(event.prefix_keys)
        case LoadEvent():
            response.load.CopyFrom(_load_to_proto(event.load))
    return response


def _load_to_proto(load: CoreLoad) -> worker_pb2.Load:
    return worker_pb2.Load(**load._asdict())
