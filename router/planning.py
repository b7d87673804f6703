"""Answers that the client fetches itself: the router decides, and gives it a ticket."""

from __future__ import annotations

import secrets
import time

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.router.v1 import inference_pb2
from firsttoken.worker.v1 import worker_pb2
from router.checks import Checked
from router.dispatch import Grant
from router.journey import Journey
from router.plans import OpenPlan
from router.workers import make_request
from services.core.errors import NotPossible
from services.core.ledger import Segment
from services.core.settings import TenantSettings
from services.runtime import tickets
from services.runtime.delays import inject
from services.runtime.protocol import ledger_to_proto
from services.runtime.telemetry import TRACEPARENT, TRACESTATE
from services.runtime.timing import spending
from services.runtime.tls import MESH_NAME

# A client that keeps its deadline ends the answer itself: the worker, which may begin before the
# client has its plan, is to be later.
CLIENT_FIRST_S = 0.25


class PlanningJourney(Journey):
    """Ends with a plan, which has the request's slot, lease and account from then on."""

    async def run(self) -> inference_pb2.PlanResponse:
        try:
            with self._accounting():
                self._check_possible(self._tenant.settings)
                await self._check_and_serve()
        except NotPossible:
            self._mesh.refund()
            raise
        return self._response

    async def _serve(self, checked: Checked, checked_s: float) -> None:
        with self._place(checked, checked_s) as place:
            prompt = await self._preprocess(checked)
            with spending(self._ledger, Segment.ROUTE):
                call = make_request(self._request, prompt, checked)
            waiting_s = time.monotonic()
            await inject(self._delay_ms.router_queue)
            grant = await self._wait_for_worker(place, prompt, self._ledger, waiting_s)
            try:
                await inject(self._delay_ms.router_route)
                self._response = self._plan(grant, call)
            except BaseException:
                grant.release()
                raise

    def _check_possible(self, settings: TenantSettings) -> None:
        if not self._config.router.direct:
            raise _proxied_only("router.direct is off")
        if settings.max_concurrent or settings.requests_per_s:
            # What a client has had of them, only who forwards the answer knows in time.
            raise _proxied_only("this tenant has limits")
        if not self._mesh.ticket_keys().can_sign:
            raise _proxied_only("this router has no key to sign with yet")

    def _plan(self, grant: Grant, call: worker_pb2.GenerateRequest) -> inference_pb2.PlanResponse:
        worker = grant.slot.worker.announced
        address = self._mesh.plans.address_of(worker.id)
        if not address:
            raise _proxied_only(f"{worker.id} does not say what becomes of plans")
        self._outcome.choose(grant, self._config.router.routing_strategy)
        self._outcome.num_attempts = 1
        self._outcome.is_direct = True
        call.prefill_address = grant.prefill_address
        now_s = time.monotonic()
        self._ledger.record(Segment.ROUTE, grant.granted_s, now_s)
        told = ledger_to_proto(self._ledger)
        told.total_ms = (now_s - self._ledger.arrived_s) * 1e3
        call.before.CopyFrom(told)
        packed = call.SerializeToString()
        plan = direct_pb2.Plan(
            id=secrets.token_bytes(tickets.PLAN_ID_BYTES),
            router_id=self._mesh.router_id,
            worker_id=worker.id,
            tenant=call.tenant,
            call_digest=tickets.digest(packed),
            expires_s=time.time() + tickets.LIFETIME_S,
            max_duration_s=self._remaining_s() + CLIENT_FIRST_S,
        )
        trace = dict(self._account.trace.metadata())
        start = worker_pb2.HeadStart(
            call=packed,
            ticket=tickets.issue(self._mesh.ticket_keys(), plan),
            traceparent=trace[TRACEPARENT],
            tracestate=trace.get(TRACESTATE, ""),
        )
        self._mesh.following.begin(worker.id, start)
        finished = common_pb2.Finished()
        self._account.tell(finished, grant)
        self._mesh.plans.add(OpenPlan(plan, grant, self._account, self._mesh.keep_lease(), now_s))
        return inference_pb2.PlanResponse(
            address=address,
            call=start.call,
            ticket=start.ticket,
            server_name=MESH_NAME if self._mesh.has_tls else "",
            ledger=told,
            traceparent=start.traceparent,
            tracestate=start.tracestate,
            finished=finished,
        )


def _proxied_only(why: str) -> NotPossible:
    return NotPossible(f"not to be planned, {why}: call Generate", reason="NO_DIRECT_PATH")
