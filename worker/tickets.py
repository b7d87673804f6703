"""Who may run what on this worker past a router. Pure: the caller says what time it is."""

from __future__ import annotations

from collections import Counter, deque

from firsttoken.direct.v1 import direct_pb2
from services.core.errors import PermissionDenied
from services.core.tickets import KeyRing
from services.runtime import tickets

# By how much the clocks of two hosts may differ.
CLOCK_SKEW_S = 1.0


class TicketDesk:
    """Lets each plan begin once, on the worker that it is for, while it is in time."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        # Plans that have begun, until their tickets have expired.
        self._used: set[bytes] = set()
        self._used_until_s: deque[tuple[float, bytes]] = deque()
        # Calls refused, by reason.
        self.refused: Counter[str] = Counter()

    @property
    def num_remembered(self) -> int:
        return len(self._used)

    def admit(
        self, ring: KeyRing, request: direct_pb2.GenerateRequest, now_s: float
    ) -> direct_pb2.Plan:
        """`now_s`: Unix time. Raises PermissionDenied."""
        self._forget(now_s)
        try:
            plan = tickets.read(ring, request.ticket, request.call)
            self._check(plan, now_s)
        except PermissionDenied as error:
            self.refused[error.reason] += 1
            raise
        self._used.add(plan.id)
        self._used_until_s.append((plan.expires_s + CLOCK_SKEW_S, plan.id))
        return plan

    def _check(self, plan: direct_pb2.Plan, now_s: float) -> None:
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
        if plan.id in self._used:
            raise PermissionDenied(
                "the ticket was used before: a plan is for one answer", reason="TICKET_USED"
            )

    def _forget(self, now_s: float) -> None:
        """They come nearly in the order in which they expire; who waits behind another stays."""
        while self._used_until_s and self._used_until_s[0][0] < now_s:
            self._used.discard(self._used_until_s.popleft()[1])
