"""The life of one request in the router, step by step, each timed into its ledger."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator

import grpc

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from firsttoken.tokenizer.v1 import tokenizer_pb2
from firsttoken.worker.v1 import worker_pb2
from router.checks import Checked, check_length, check_request, text_head
from router.delivery import Delivery
from router.dispatch import Grant, Place
from router.fleet import Worker
from router.mesh import HOP_NAME, Mesh
from router.outcome import Outcome
from router.peers import Hop, PeerLost
from router.prompt import Prompt
from router.replay import Told, replay
from router.workers import WorkerCall, is_finished, make_request, next_message, open_call
from services.core import attributes as names
from services.core.errors import MeshError, Unavailable
from services.core.ledger import Ledger, Segment
from services.core.tokens import BYTES_PER_TOKEN
from services.runtime.delays import inject
from services.runtime.identity import caller
from services.runtime.interceptor import Context
from services.runtime.protocol import (
    ledger_to_proto,
    spend_callee,
    spend_failed_call,
    tell_ledger,
)
from services.runtime.telemetry import TraceContext
from services.runtime.timing import spending


class NotTaken(Exception):
    """A worker did not begin to answer, so another may. `error` is for the client if none does."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class WorkerDied(Exception):
    """After it had begun to answer."""


class Journey:
    """Keeps the configuration that it began with, except for the choice of the worker."""

    def __init__(
        self, mesh: Mesh, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        self._ledger = Ledger(time.monotonic())
        self._mesh = mesh
        self._request = request
        self._context = context
        self._config = mesh.snapshot.config
        self._delay_ms = self._config.debug.delay_ms
        self._caller = TraceContext.from_metadata(context.invocation_metadata())
        sampled = mesh.reporter.decide(self._caller, self._config.telemetry.sample_ratio)
        self._trace = self._caller.child(sampled=sampled)
        self._delivery = Delivery(context, max_unread_bytes=self._config.router.max_unread_bytes)
        # From the call to the first message, until what its worker spent of that is entered.
        self._seen_s: float | None = None
        self._tenant = caller()
        self._outcome = Outcome()
        self._outcome.tenant = self._tenant.name
        self._outcome.deadline_s = context.time_remaining()

    async def run(self) -> None:
        error, code = "", ""
        try:
            await self._answer()
        except MeshError as failure:
            error, code = failure.message, failure.reason
            self._tell_ledger()
            raise
        except grpc.aio.AioRpcError as failure:
            code = failure.code().name
            error = failure.details() or code
            self._tell_ledger()
            raise
        except asyncio.CancelledError:
            error, code = "the client is gone, or its deadline has passed", "CANCELLED"
            self._tell_ledger()  # the client may still hear of router.max_deadline_s
            raise
        except Exception:  # a defect; the client hears no more of it
            error, code = "internal error", "INTERNAL"
            self._tell_ledger()
            raise
        finally:
            self._record(error, code)

    def _tell_ledger(self) -> None:
        self._ledger.mark_failure(time.monotonic())
        if self._seen_s is not None:
            self._spend_first_token(replay(self._delivery.messages[:1]).ledger)
        tell_ledger(self._context, self._ledger)

    async def _answer(self) -> None:
        with spending(self._ledger, Segment.PREPROCESS, since_s=self._ledger.arrived_s):
            checked = check_request(
                self._request,
                self._context.invocation_metadata(),
                self._mesh.bounds(),
                self._tenant,
            )
            await inject(self._delay_ms.router_check)
        checked_s = time.monotonic()
        self._outcome.tenant = checked.tenant
        self._outcome.request_class = checked.request_class.value
        # The worker's slot is free when the worker is, however slowly the client reads.
        async with self._delivery:
            with self._noting_failure(), spending(self._ledger, Segment.QUEUE, since_s=checked_s):
                place = self._enter(checked)
            with place, self._noting_failure():
                prompt = self._outcome.prompt = await self._preprocess(checked)
                await inject(self._delay_ms.router_unowned)
                await self._generate(place, prompt, checked.tenant)

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """What is cleaned up afterwards is on the way back."""
        try:
            yield
        except Exception:
            self._ledger.mark_failure(time.monotonic())
            raise

    def _enter(self, checked: Checked) -> Place:
        remaining_s = self._context.time_remaining()
        longest_s = self._config.router.max_deadline_s
        return self._mesh.dispatcher.enter(
            checked.request_class,
            tenant=checked.tenant,
            remaining_s=longest_s if remaining_s is None else min(remaining_s, longest_s),
        )

    async def _preprocess(self, checked: Checked) -> Prompt:
        began_s = time.monotonic()
        encoded = await self._mesh.tokenizers.encode(
            self._encode_request(checked),
            self._hop(self._delay_ms.router_to_tokenizer),
            self._ledger,
            began_s=began_s,
            wait_s=self._config.router.worker_wait_s,
        )
        with spending(self._ledger, Segment.PREPROCESS):
            num_tokens = len(encoded.token_ids) // BYTES_PER_TOKEN
            check_length(checked.field, num_tokens, self._mesh.bounds().max_context_tokens)
            head = text_head(self._request, self._config.router.prefix_length_bytes)
            return Prompt(encoded.token_ids, encoded.prefix_keys, encoded.block_tokens, head)

    def _encode_request(self, checked: Checked) -> tokenizer_pb2.EncodeRequest:
        request = tokenizer_pb2.EncodeRequest(
            model=self._request.model,
            tenant=checked.cache_tenant,
            cache_salt=self._request.cache_salt,
        )
        match checked.field:
            case "text":
                request.text = self._request.text
            case "chat":
                request.chat.CopyFrom(self._request.chat)
            case _:
                request.token_ids = self._request.token_ids
        return request

    async def _generate(self, place: Place, prompt: Prompt, tenant: str) -> None:
        """At one worker, or at several after each other when the one that answers dies."""
        with spending(self._ledger, Segment.ROUTE):
            request = make_request(self._request, prompt, tenant)
        ledger = self._ledger
        while True:
            try:
                await self._answer_somewhere(place, prompt, request, ledger)
                return
            except NotTaken as refusal:
                self._end_if_begun(refusal.error)
                raise refusal.error from refusal
            except Unavailable as refusal:
                self._end_if_begun(refusal)
                raise
            except WorkerDied as death:
                self._resume(request, death)
                # The first token is out: what follows is no part of the time to it.
                ledger = Ledger(time.monotonic())

    async def _answer_somewhere(
        self, place: Place, prompt: Prompt, request: worker_pb2.GenerateRequest, ledger: Ledger
    ) -> None:
        """Raises NotTaken when router.max_attempts workers did not begin to answer."""
        waiting_s = time.monotonic()
        await inject(self._delay_ms.router_queue)
        for attempt in itertools.count(1):
            with await self._wait_for_worker(place, prompt, ledger, waiting_s) as grant:
                await inject(self._delay_ms.router_route)
                called_s = time.monotonic()
                ledger.record(Segment.ROUTE, grant.granted_s, called_s)
                self._outcome.choose(grant, self._mesh.snapshot.config.router.routing_strategy)
                if not self._delivery.messages:
                    self._outcome.num_attempts = attempt
                request.before.CopyFrom(ledger_to_proto(ledger))
                try:
                    await self._call_worker(grant, request, called_s)
                    return
                except NotTaken:
                    waiting_s = time.monotonic()
                    ledger.record(Segment.ROUTE, called_s, waiting_s)
                    if attempt >= self._config.router.max_attempts:
                        raise

    async def _wait_for_worker(
        self, place: Place, prompt: Prompt, ledger: Ledger, waiting_s: float
    ) -> Grant:
        end_s: float | None = None
        try:
            grant = await self._mesh.dispatcher.wait_for_worker(place, prompt)
            end_s = grant.granted_s
            return grant
        finally:
            ledger.record(Segment.QUEUE, waiting_s, end_s or time.monotonic())

    async def _call_worker(
        self, grant: Grant, request: worker_pb2.GenerateRequest, called_s: float
    ) -> None:
        worker = grant.slot.worker.announced
        request.prefill_address = grant.prefill_address
        hop = self._hop(self._delay_ms.router_to_worker)
        await inject(hop.delay_ms)
        call = open_call(self._mesh.channels.get(worker.address), request, hop)
        try:
            message = await self._first_message(call, grant)
            now_s = time.monotonic()
            if self._ledger.first_token_s is None:
                self._seen_s = now_s - called_s
            self._ledger.mark_first_token(now_s)
            await inject(self._delay_ms.router_to_client)
            self._mesh.dispatcher.answered(grant.slot.worker)
            grant.first_token()
            await self._forward(call, message, grant)
        except grpc.aio.AioRpcError as error:
            # Once there is a first token, it is too late for the ledger.
            if self._ledger.first_token_s is None:
                spend_failed_call(self._ledger, error, seen_s=time.monotonic() - called_s)
            raise
        finally:
            call.cancel()

    async def _first_message(self, call: WorkerCall, grant: Grant) -> bytes:
        worker = grant.slot.worker
        try:
            message = await next_message(call)
        except PeerLost as lost:
            self._mesh.dispatcher.failed(worker)
            error = Unavailable(
                f"no worker answered; the last one tried, {worker.announced.id}: {lost}",
                reason="WORKER_UNAVAILABLE",
            )
            raise NotTaken(error) from lost
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            self._mesh.dispatcher.refused(worker)
            raise NotTaken(error) from error
        if message is None:
            raise MeshError("the worker ended its stream without a message")
        return message

    async def _forward(self, call: WorkerCall, message: bytes, grant: Grant) -> None:
        """Everything as it comes; the last message with this router's part added."""
        while not is_finished(message):
            self._delivery.send(message)
            message = await self._following_message(call, grant)
        self._delivery.send(self._finish(message, grant))

    async def _following_message(self, call: WorkerCall, grant: Grant) -> bytes:
        try:
            message = await next_message(call)
        except PeerLost as lost:
            self._mesh.dispatcher.failed(grant.slot.worker)
            raise WorkerDied from lost
        if message is None:
            raise MeshError("the worker ended its stream without `finished`")
        return message

    def _resume(self, request: worker_pb2.GenerateRequest, death: WorkerDied) -> None:
        """Have the next worker go on behind what the client has."""
        told = replay(self._delivery.messages)
        self._spend_first_token(told.ledger)
        most = self._config.router.max_migrations
        if self._outcome.num_migrations == most:
            rule = f"an answer goes on elsewhere at most {most} times (router.max_migrations)"
            raise _worker_died(told, rule) from death
        self._outcome.num_migrations += 1
        request.answer_ids = told.answer_ids
        request.answer_characters = told.num_characters

    def _end_if_begun(self, refusal: Exception) -> None:
        """Nobody takes the request. Who has a part of the answer hears that its worker died."""
        if self._delivery.messages:
            text = refusal.details() if isinstance(refusal, grpc.aio.AioRpcError) else refusal
            problem = f"it could not go on elsewhere: {text}"
            raise _worker_died(replay(self._delivery.messages), problem) from refusal

    def _spend_first_token(self, ledger: common_pb2.Ledger | None) -> None:
        """Of the worker that gave it. Only the first call counts."""
        seen_s, self._seen_s = self._seen_s, None
        if seen_s is not None and ledger is not None:
            spend_callee(self._ledger, ledger, seen_s=seen_s)

    def _finish(self, message: bytes, grant: Grant) -> bytes:
        response = inference_pb2.GenerateResponse.FromString(message)
        finished = response.finished
        self._spend_first_token(finished.ledger)
        # To a worker that went on with the answer, its beginning was a part of the prompt.
        usage = finished.usage
        usage.cached_tokens = min(usage.cached_tokens, usage.prompt_tokens)
        finished.ledger.CopyFrom(ledger_to_proto(self._ledger))
        finished.trace_id = self._trace.trace_id
        finished.generation = grant.generation
        finished.worker_id = grant.slot.worker.announced.id
        finished.attempts = self._outcome.num_attempts
        finished.migrations = self._outcome.num_migrations
        finished.routing.CopyFrom(self._outcome.routing())
        self._outcome.finish(usage, time.monotonic())
        self._learn(grant, finished)
        if grant.prefill is not None:
            self._learn_of_prefill(grant.prefill.worker, finished.kv_path)
        return response.SerializeToString()

    def _learn(self, grant: Grant, finished: common_pb2.Finished) -> None:
        """What the worker had itself: the rest came out of a KV store."""
        usage, path = finished.usage, finished.kv_path
        loaded_tokens = path.loaded_blocks * self._outcome.prompt.block_tokens
        grant.finished(
            cached_tokens=max(0, usage.cached_tokens - loaded_tokens),
            evaluated_tokens=usage.evaluated_prompt_tokens,
            loaded_blocks=path.loaded_blocks,
            load_s=path.load_ms / 1e3,
        )

    def _learn_of_prefill(self, worker: Worker, path: common_pb2.KvPath) -> None:
        if path.prefill_failed:
            self._mesh.dispatcher.prefill_failed(worker)
        elif path.handed_off:
            self._mesh.dispatcher.prefilled(worker)
            path.prefill_worker_id = worker.announced.id

    def _hop(self, delay_ms: float) -> Hop:
        return Hop(self._context.time_remaining, self._trace.metadata(), delay_ms)

    def _record(self, error: str, code: str) -> None:
        self._mesh.record(self._outcome, self._ledger, code)
        reporter = self._mesh.reporter
        if not reporter.enabled:
            return
        reporter.record_request(
            HOP_NAME,
            self._trace,
            self._caller.span_id,
            self._ledger,
            {
                names.MODEL: self._mesh.roster.model,
                names.GENERATION: self._mesh.snapshot.generation,
                **({names.ERROR_TYPE: code} if code else {}),
                **self._outcome.attributes(self._ledger),
            },
            error=error,
        )
        if self._outcome.prompt.num_tokens:
            told = self._mesh.telling.message(
                self._outcome.prompt,
                trace_id=self._trace.trace_id,
                span_id=self._trace.span_id,
                tenant=self._outcome.tenant,
                now_s=time.monotonic(),
            )
            reporter.prompt(told)


def _worker_died(told: Told, why_it_ends: str) -> Unavailable:
    return Unavailable(
        f"the worker died after {told.num_tokens} tokens; {why_it_ends}", reason="WORKER_DIED"
    )
