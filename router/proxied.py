"""Answers that come through the router: it calls the worker, and another one when that fails."""

from __future__ import annotations

import itertools
import time

import grpc

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from firsttoken.worker.v1 import worker_pb2
from router.checks import Checked
from router.delivery import Delivery
from router.dispatch import Grant, Place
from router.journey import Journey
from router.mesh import Mesh
from router.peers import PeerLost
from router.prompt import Prompt
from router.replay import NOTHING_TOLD, Told, replay
from router.resumption import Resumed, naming_fields, read_resumption
from router.workers import WorkerCall, is_finished, make_request, next_message, open_call
from services.core.errors import MeshError, Unavailable
from services.core.ledger import Ledger, Segment
from services.runtime.delays import inject
from services.runtime.interceptor import Context
from services.runtime.protocol import ledger_to_proto, spend_callee, spend_failed_call
from services.runtime.timing import spending


class NotTaken(Exception):
    """A worker did not begin to answer, so another may. `error` is for the client if none does."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class WorkerDied(Exception):
    """After it had begun to answer."""


class ProxiedJourney(Journey):
    def __init__(
        self, mesh: Mesh, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        super().__init__(mesh, request, context)
        self._delivery = Delivery(context, max_unread_bytes=self._config.router.max_unread_bytes)
        # What the client had before, from a worker that it had called itself.
        self._told_before = NOTHING_TOLD
        # From the call to the first message, until what its worker spent of that is entered.
        self._seen_s: float | None = None

    async def run(self) -> None:
        with self._accounting():
            if self._request.HasField("resumption"):
                await self._resume_plan()
            else:
                await self._check_and_serve()
        self._account.record("", "")

    def _tell_ledger(self) -> None:
        self._ledger.mark_failure(time.monotonic())
        if self._seen_s is not None:
            self._spend_first_token(replay(self._delivery.messages[:1]).ledger)
        super()._tell_ledger()

    async def _serve(self, checked: Checked, checked_s: float) -> None:
        # The worker's slot is free when the worker is, however slowly the client reads.
        async with self._delivery:
            with self._place(checked, checked_s) as place:
                prompt = await self._preprocess(checked)
                with spending(self._ledger, Segment.ROUTE):
                    request = make_request(self._request, prompt, checked)
                await self._generate(place, prompt, request)

    async def _resume_plan(self) -> None:
        """Nothing is encoded again, and what the client has is not said again."""
        with spending(self._ledger, Segment.PREPROCESS, since_s=self._ledger.arrived_s):
            resumed = read_resumption(
                self._request.resumption,
                self._mesh.ticket_keys(),
                self._tenant,
                block_tokens=self._config.mesh.block_tokens,
                max_age_s=self._config.router.max_deadline_s,
            )
            self._take_over(resumed)
        checked_s = time.monotonic()
        async with self._delivery:
            with self._place(resumed.checked, checked_s) as place, naming_fields():
                await self._generate(place, resumed.prompt, resumed.call)

    def _take_over(self, resumed: Resumed) -> None:
        self._mesh.plans.resumed(resumed.plan_id)
        self._mesh.following.withdraw(resumed.worker_id, resumed.plan_id)
        self._outcome.tenant = resumed.checked.tenant
        self._outcome.request_class = resumed.checked.request_class.value
        self._outcome.prompt = resumed.prompt
        self._told_before = resumed.told
        self._outcome.num_attempts = 1
        if self._has_begun:
            self._count_migration()

    @property
    def _has_begun(self) -> bool:
        """The client has a part of the answer."""
        return bool(self._delivery.messages or self._told_before.answer_ids)

    async def _generate(
        self, place: Place, prompt: Prompt, request: worker_pb2.GenerateRequest
    ) -> None:
        """At one worker, or at several after each other when the one that answers dies."""
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
        # One that the client had called itself, in vain.
        num_before = 0 if self._has_begun else self._outcome.num_attempts
        for attempt in itertools.count(1):
            with await self._wait_for_worker(place, prompt, ledger, waiting_s) as grant:
                await inject(self._delay_ms.router_route)
                called_s = time.monotonic()
                ledger.record(Segment.ROUTE, grant.granted_s, called_s)
                self._outcome.choose(grant, self._mesh.snapshot.config.router.routing_strategy)
                if not self._has_begun:
                    self._outcome.num_attempts = num_before + attempt
                request.before.CopyFrom(ledger_to_proto(ledger))
                try:
                    await self._call_worker(grant, request, called_s)
                    return
                except NotTaken:
                    waiting_s = time.monotonic()
                    ledger.record(Segment.ROUTE, called_s, waiting_s)
                    if attempt >= self._config.router.max_attempts:
                        raise

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
            self._account.answered(grant)
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
        told = self._told()
        self._spend_first_token(told.ledger)
        self._count_migration(death)
        request.answer_ids = told.answer_ids
        request.answer_characters = told.num_characters

    def _count_migration(self, death: WorkerDied | None = None) -> None:
        most = self._config.router.max_migrations
        if self._outcome.num_migrations >= most:
            rule = f"an answer goes on elsewhere at most {most} times (router.max_migrations)"
            raise _worker_died(self._told(), rule) from death
        self._outcome.num_migrations += 1

    def _end_if_begun(self, refusal: Exception) -> None:
        """Nobody takes the request. Who has a part of the answer hears that its worker died."""
        if self._has_begun:
            text = refusal.details() if isinstance(refusal, grpc.aio.AioRpcError) else refusal
            raise _worker_died(self._told(), f"it could not go on elsewhere: {text}") from refusal

    def _told(self) -> Told:
        return self._told_before.followed_by(replay(self._delivery.messages))

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
        self._account.tell(finished, grant)
        self._account.learn(finished, grant)
        return response.SerializeToString()


def _worker_died(told: Told, why_it_ends: str) -> Unavailable:
    return Unavailable(
        f"the worker died after {told.num_tokens} tokens; {why_it_ends}", reason="WORKER_DIED"
    )
