"""WorkerService: protobuf to plain values and back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.core import attributes as names
from services.core.errors import Unavailable
from services.core.keys import join_keys, snapshot_parts
from services.core.ledger import Ledger, Segment
from services.core.settings import DelaySettings, WorkerSettings
from services.models.vocabulary import Vocabulary
from services.runtime.delays import inject
from services.runtime.interceptor import CallMetadata, Context
from services.runtime.protocol import ledger_to_proto, tell_ledger
from services.runtime.reporter import Reporter
from services.runtime.tasks import end_tasks
from services.runtime.telemetry import Attributes, TraceContext
from services.runtime.timing import spending
from worker.answer import Answer
from worker.copying import Copier
from worker.front import EngineFront
from worker.messages import CoreLoad
from worker.origin import Origin
from worker.planned import PlannedAnswers
from worker.prefill import Prefill
from worker.requests import Prompt, check_request, went_before
from worker.sources import KvSources
from worker.stream import TokenStream
from worker.tier import TierStats
from worker.watch import BlocksEvent, LoadEvent, SnapshotEvent
from worker.wire import SERVICE_NAME

FINISH_NAMES = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}

PrefillHandler: TypeAlias = "grpc.RpcMethodHandler[worker_pb2.PrefillRequest, bytes]"


@dataclass(slots=True)
class HandoffCounts:
    """Prompts that other workers computed for this one, and this one for others."""

    taken: int = 0
    given: int = 0


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(
        self,
        front: EngineFront,
        vocabulary: Vocabulary,
        *,
        worker_id: str,
        reporter: Reporter,
        sources: KvSources,
        copier: Copier,
        settings: Callable[[], WorkerSettings],
        delays: Callable[[], DelaySettings],
        plans: PlannedAnswers,
        on_drain: Callable[[], None],
    ) -> None:
        self._front = front
        self._sources = sources
        self._copier = copier
        self._vocabulary = vocabulary
        self._worker_id = worker_id
        self._reporter = reporter
        self._settings = settings
        self._delays = delays
        self._plans = plans
        self._on_drain = on_drain
        self._draining = False
        self._handoffs = HandoffCounts()

    @property
    def handoffs(self) -> HandoffCounts:
        return self._handoffs

    def add_to(self, server: grpc.aio.Server) -> None:
        # It writes responses that are bytes already; the first handler of a name counts.
        prefill: PrefillHandler = grpc.stream_stream_rpc_method_handler(
            self.Prefill, request_deserializer=worker_pb2.PrefillRequest.FromString
        )
        handlers = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Prefill": prefill})
        server.add_generic_rpc_handlers((handlers,))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: CallMetadata
    ) -> AsyncGenerator[worker_pb2.GenerateResponse]:
        ledger, origin = Ledger(time.monotonic()), Origin()
        try:
            self._refuse_when_draining()
            with spending(ledger, Segment.PREPROCESS, since_s=ledger.arrived_s):
                prompt = check_request(request, self._front.info)
                answer = Answer(self._vocabulary, prompt.sampling)
                owed = answer.resume(prompt.answer_ids, request.answer_characters)
            await inject(self._delays().worker_unowned)
            if owed.text:
                yield worker_pb2.GenerateResponse(chunk=owed)
            if answer.finished is None:
                with spending(ledger, Segment.PREPROCESS):
                    source = self._sources.source(request, prompt)
                    before = went_before(request, ledger)
                with self._front.submit(prompt, source=source, before=before) as stream:
                    async with self._sources.bring(
                        stream, source, request, prompt, origin, context
                    ):
                        async for chunk in _chunks(stream, answer, ledger, origin):
                            is_first = ledger.first_token_s is None
                            if is_first:
                                origin.leave(ledger, time.monotonic())
                                chunk.ledger.CopyFrom(ledger_to_proto(ledger))
                                await inject(self._delays().worker_to_router)
                            yield worker_pb2.GenerateResponse(chunk=chunk)
                            if is_first:
                                self._sources.tell_writes(prompt, origin, ledger)
                    origin.drafted_tokens = stream.num_drafted
                    origin.accepted_tokens = stream.num_accepted
            ledger.mark_first_token(time.monotonic())
            finished = self._finish(answer, ledger, prompt, origin)
        except BaseException as error:
            self._fail(error, context, ledger, origin)
            raise
        self._record(context, ledger, origin, finished)
        yield worker_pb2.GenerateResponse(finished=finished)

    async def Prefill(  # type: ignore[override]  # it writes the responses itself
        self, requests: AsyncIterator[worker_pb2.PrefillRequest], context: Context
    ) -> None:
        self._refuse_when_draining()
        timeout_s = self._settings().handoff_timeout_ms / 1e3
        prefill = Prefill(self._front, self._sources, self._copier, self._delays())
        try:
            await prefill.serve(requests, context, timeout_s=timeout_s)
        except BaseException as error:
            self._fail(error, context, prefill.ledger, prefill.origin, name="worker.prefill")
            raise
        self._record_hop("worker.prefill", context, prefill.ledger, prefill.attributes())
        self._handoffs.given += 1

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        with self._front.hub.watch() as watcher:
            while (event := await watcher.next()) is not None:
                if isinstance(event, SnapshotEvent):
                    for part in self._snapshot(event, load_only=request.load_only):
                        yield part
                elif not (request.load_only and isinstance(event, BlocksEvent)):
                    yield _event_to_proto(event, self._load)

    async def FollowPlans(
        self, requests: AsyncIterator[worker_pb2.FollowPlansRequest], context: Context
    ) -> AsyncGenerator[worker_pb2.FollowPlansResponse]:
        first = await anext(requests, None)
        if first is None:  # gone before it has said who it is
            return
        hearing = asyncio.create_task(self._hear(requests), name="hear of plans")
        responses = contextlib.aclosing(self._plans.reports.follow(first.router_id))
        try:
            async with responses as told:
                async for response in told:
                    yield response
        finally:
            await end_tasks([hearing])

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        self._draining = True
        self._on_drain()
        # A little before the caller's deadline, so that it still gets the answer.
        remaining_s = context.time_remaining()
        timeout_s = None if remaining_s is None else max(remaining_s - 0.1, 0.0)
        return worker_pb2.DrainResponse(num_running=await self._front.drain(timeout_s))

    async def _hear(self, requests: AsyncIterator[worker_pb2.FollowPlansRequest]) -> None:
        async for request in requests:
            for start in request.head_starts:
                self._plans.begin(start, self.Generate)
            self._plans.withdraw(request.withdrawn)

    def _snapshot(
        self, event: SnapshotEvent, *, load_only: bool
    ) -> Iterator[worker_pb2.WatchResponse]:
        for number, keys in enumerate(snapshot_parts(() if load_only else event.prefix_keys)):
            part = worker_pb2.Snapshot(prefix_keys=keys, continues=number > 0)
            if not number:
                part.load.CopyFrom(self._load(event.load))
            yield worker_pb2.WatchResponse(
                sequence=event.sequence, incarnation=event.incarnation, snapshot=part
            )

    def _load(self, load: CoreLoad) -> worker_pb2.Load:
        inbox = self._front.inbox
        plain = load._asdict()
        drafts = plain.pop("drafts")
        return worker_pb2.Load(
            **plain,
            drafts={name: worker_pb2.Drafts(**each._asdict()) for name, each in drafts.items()},
            num_inbox_blocks=inbox.num_slots - inbox.num_free,
            num_handoffs_taken=self._handoffs.taken,
            num_handoffs_given=self._handoffs.given,
            kv=_traffic_to_proto(self._sources.stats),
        )

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise Unavailable("the worker is draining", reason="DRAINING")

    def _finish(
        self, answer: Answer, ledger: Ledger, prompt: Prompt, origin: Origin
    ) -> common_pb2.Finished:
        assert answer.finished is not None
        finished = answer.finished
        origin.tell_hidden(ledger)
        self._handoffs.taken += origin.path.handed_off
        finished.usage.CopyFrom(
            common_pb2.Usage(
                prompt_tokens=len(prompt.token_ids),
                completion_tokens=answer.num_tokens,
                cached_tokens=origin.cached_tokens,
                evaluated_prompt_tokens=origin.evaluated_prompt_tokens,
            )
        )
        finished.ledger.CopyFrom(ledger_to_proto(ledger))
        finished.kv_path.CopyFrom(origin.path)
        finished.handoff_ms = origin.handoff_ms
        finished.worker_id = self._worker_id
        finished.engine = self._front.info.name
        finished.attempts = 1
        return finished

    def _fail(
        self,
        error: BaseException,
        context: CallMetadata,
        ledger: Ledger,
        origin: Origin,
        *,
        name: str = "worker.generate",
    ) -> None:
        ledger.mark_failure(time.monotonic())
        if isinstance(error, Exception):
            tell_ledger(context, ledger)
            reason = getattr(error, "reason", "INTERNAL")
            text = str(error) or reason
        else:
            text, reason = "the caller is gone, or its deadline has passed", "CANCELLED"
        self._record_hop(
            name, context, ledger, {names.ERROR_TYPE: reason, **origin.attributes()}, error=text
        )

    def _record(
        self, context: CallMetadata, ledger: Ledger, origin: Origin, finished: common_pb2.Finished
    ) -> None:
        self._record_hop(
            "worker.generate",
            context,
            ledger,
            {
                names.INPUT_TOKENS: finished.usage.prompt_tokens,
                names.OUTPUT_TOKENS: finished.usage.completion_tokens,
                names.FINISH_REASON: FINISH_NAMES[finished.finish_reason],
                **origin.attributes(),
            },
        )

    def _record_hop(
        self,
        name: str,
        context: CallMetadata,
        ledger: Ledger,
        attributes: Attributes,
        *,
        error: str = "",
    ) -> None:
        if not self._reporter.enabled:
            return
        caller = TraceContext.from_metadata(context.invocation_metadata())
        info = self._front.info
        common = {names.MODEL: info.model, names.ENGINE: info.name}
        self._reporter.record_request(
            name, caller.child(), caller.span_id, ledger, {**common, **attributes}, error=error
        )


async def _chunks(
    stream: TokenStream, answer: Answer, ledger: Ledger, origin: Origin
) -> AsyncIterator[common_pb2.Chunk]:
    """Chunks that bring something, until the answer has ended."""
    while answer.finished is None:
        arrival = await stream.next()
        origin.note(arrival, ledger)
        chunk = answer.push(arrival.tokens)
        if chunk.token_ids or chunk.text:
            yield chunk


def _traffic_to_proto(stats: TierStats) -> worker_pb2.KvTraffic:
    return worker_pb2.KvTraffic(
        blocks_loaded=stats.blocks_loaded,
        blocks_loaded_from_l2=stats.blocks_loaded_from_l2,
        blocks_stored=stats.blocks_stored,
        num_computed=stats.num_compute,
        num_loaded=stats.num_load,
        num_both=stats.num_both,
        spent_ms=stats.spent_ms,
        regret_ms=stats.regret_ms,
        dropped=stats.dropped,
        rejected=stats.rejected,
        failed=stats.failed,
    )


def _event_to_proto(
    event: BlocksEvent | LoadEvent, to_load: Callable[[CoreLoad], worker_pb2.Load]
) -> worker_pb2.WatchResponse:
    response = worker_pb2.WatchResponse(sequence=event.sequence, incarnation=event.incarnation)
    match event:
        case BlocksEvent(stored=True):
            response.stored.prefix_keys = join_keys(event.prefix_keys)
        case BlocksEvent():
            response.evicted.prefix_keys = join_keys(event.prefix_keys)
        case LoadEvent():
            response.load.CopyFrom(to_load(event.load))
    return response
