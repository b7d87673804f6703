"""Who may run what on this worker past a router. Pure: the caller says what time it is."""

from __future__ import annotations

from collections import Counter, deque

from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.errors import PermissionDenied
from services.core.tickets import KeyRing
from services.runtime import tickets

# By how much the clocks of two hosts may differ.
CLOCK_SKEW_S = 1.0


class TicketDesk:
    """Lets each plan begin once, on the worker that it is for, while it is in time, and one
    client fetch it.
    """

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        # Plans that have begun, until their tickets have expired: whether a client has come.
        self._begun: dict[bytes, bool] = {}
        self._until_s: deque[tuple[float, bytes]] = deque()
        # Calls refused, by reason.
        self.refused: Counter[str] = Counter()

    @property
    def num_remembered(self) -> int:
        return len(self._begun)

    def begin(
        self, ring: KeyRing, start: worker_pb2.HeadStart, now_s: float
    ) -> direct_pb2.Plan | None:
        """Before its client comes. None where it may not begin, or has begun."""
        try:
            plan = self._read(ring, start.ticket, start.call, now_s)
        except PermissionDenied:
            return None
        return None if plan.id in self._begun else self._remember(plan, has_client=False)

    def admit(
        self, ring: KeyRing, request: direct_pb2.GenerateRequest, now_s: float
    ) -> direct_pb2.Plan:
        """Its client. Raises PermissionDenied."""
        try:
            plan = self._read(ring, request.ticket, request.call, now_s)
            if self._begun.get(plan.id):
                raise PermissionDenied(
                    "the ticket was used before: a plan is for one answer", reason="TICKET_USED"
                )
        except PermissionDenied as error:
            self.refused[error.reason] += 1
            raise
        return self._remember(plan, has_client=True)

    def close(self, plan_id: bytes) -> None:
        """Nobody is to come for this plan any more."""
        if plan_id in self._begun:
            self._begun[plan_id] = True

    def _read(self, ring: KeyRing, ticket: bytes, call: bytes, now_s: float) -> direct_pb2.Plan:
        """`now_s`: Unix time. Raises PermissionDenied."""
        self._forget(now_s)
        plan = tickets.read(ring, ticket, call)
        if plan.worker_id != self._worker_id:
            raise PermissionDenied(
                f"the ticket is for {plan.worker_id}, and this is {self._worker_id}: plan anew",
                reason="TICKET_FOREIGN_WORKER",
            )
        if now_s > plan.expires_s + CLOCK_SKEW_S:
            raise PermissionDenied(
                f"the ticket expired {now_s - plan.expires_s:.3g} s ago: plan anew (or the clocks"
                " of router and worker differ)",
                reason="TICKET_EXPIRED",
            )
        return plan

    def _remember(self, plan: direct_pb2.Plan, *, has_client: bool) -> direct_pb2.Plan:
        if plan.id not in self._begun:
            self._until_s.append((plan.expires_s + CLOCK_SKEW_S, plan.id))
        self._begun[plan.id] = has_client
        return plan

    def _forget(self, now_s: float) -> None:
        """They come nearly in the order in which they expire; who waits behind another stays."""
        while self._until_s and self._until_s[0][0] < now_s:
            del self._begun[self._until_s.popleft()[1]]
