"""What the admission queue must do, said as plainly as possible: lists, and loops over them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from router.admission import AdmissionSettings, RequestClass, TicketState

BATCH = RequestClass.BATCH
MEMORY_S, LEAST_TAKEN = 30.0, 3


@dataclass
class Request:
    name: str
    request_class: RequestClass
    tenant: str
    state: TicketState = TicketState.PREPARING
    queued_s: float = math.nan
    # In the order of joining.
    number: int = 0
    returned: bool = False


@dataclass
class Drain:
    """All that ever happened, to be added up whenever somebody asks."""

    # Between two looks at the clock, while somebody waited.
    spans_s: list[tuple[float, float]] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    seen_s: float = 0.0

    def look(self, now_s: float, somebody_waits: bool) -> None:
        if somebody_waits:
            self.spans_s.append((self.seen_s, now_s))
        self.seen_s = now_s

    def rate(self) -> float | None:
        def kept(then_s: float) -> float:
            return math.exp(-(self.seen_s - then_s) / MEMORY_S)

        taken = sum(kept(then_s) for then_s in self.taken_s)
        draining_s = sum(MEMORY_S * (kept(end_s) - kept(from_s)) for from_s, end_s in self.spans_s)
        return taken / draining_s if taken >= LEAST_TAKEN and draining_s else None


@dataclass
class Oracle:
    settings: AdmissionSettings
    requests: list[Request] = field(default_factory=list)
    # By class and tenant: where its head begins.
    starts: dict[tuple[RequestClass, str], float] = field(default_factory=dict)
    virtual: dict[RequestClass, float] = field(
        default_factory=lambda: dict.fromkeys(RequestClass, 0.0)
    )
    drain: Drain = field(default_factory=Drain)
    num_joined: int = 0

    def weight(self, tenant: str) -> float:
        return self.settings.weights.get(tenant, 1.0)

    def pending(self) -> list[Request]:
        return [
            each
            for each in self.requests
            if each.state in (TicketState.PREPARING, TicketState.WAITING)
        ]

    def waiting(self, request_class: RequestClass | None = None) -> list[Request]:
        """In the order of joining."""
        found = [
            each
            for each in self.requests
            if each.state is TicketState.WAITING
            and (request_class is None or each.request_class is request_class)
        ]
        return sorted(found, key=lambda each: each.number)

    def line(self, request_class: RequestClass, tenant: str) -> list[Request]:
        """Without those who have returned."""
        return [
            each
            for each in self.waiting(request_class)
            if each.tenant == tenant and not each.returned
        ]

    def heads(self, request_class: RequestClass) -> list[Request]:
        """Of the tenants' lines, whose end is soonest first."""
        heads: dict[str, Request] = {}
        for each in self.waiting(request_class):
            if not each.returned:
                heads.setdefault(each.tenant, each)
        return sorted(heads.values(), key=lambda head: (self.end(head), head.number))

    def end(self, head: Request) -> float:
        return self.starts[head.request_class, head.tenant] + 1 / self.weight(head.tenant)

    def next(self) -> Request | None:
        interactive = self.next_of(RequestClass.INTERACTIVE, math.inf)
        if interactive is None:
            return self.next_of(BATCH, math.inf)
        aged = self.next_of(BATCH, interactive.queued_s - self.settings.ageing_s)
        return aged or interactive

    def next_of(self, request_class: RequestClass, came_by_s: float) -> Request | None:
        returned = [each for each in self.waiting(request_class) if each.returned]
        if returned and returned[0].queued_s <= came_by_s:
            return returned[0]
        return next(
            (head for head in self.heads(request_class) if head.queued_s <= came_by_s), None
        )

    def refusal(
        self, request: Request, now_s: float, room: int, remaining_s: float | None
    ) -> tuple[str, float] | None:
        """Reason and retry delay."""
        self.drain.look(now_s, bool(self.waiting()))
        rate = self.drain.rate()
        num_pending = len(self.pending())
        if num_pending >= self.settings.max_queue + room:
            return "QUEUE_FULL", self.retry_delay_s(num_pending)
        batch = request.request_class is BATCH
        most_s = self.settings.max_wait_batch_s if batch else self.settings.max_wait_interactive_s
        limit_s = min(most_s or math.inf, math.inf if remaining_s is None else remaining_s)
        if rate is None or limit_s == math.inf:
            return None
        num_before = self.num_ahead(request, now_s) + 1 - room
        if num_before <= 0 or num_before / rate <= limit_s:
            return None
        return "EXPECTED_WAIT", self.retry_delay_s(num_before - limit_s * rate)

    def retry_delay_s(self, num_requests: float) -> float:
        rate = self.drain.rate()
        return 1.0 if rate is None else min(max(num_requests / rate, 0.1), 60.0)

    def num_ahead(self, request: Request, now_s: float) -> float:
        mine = [each for each in self.pending() if each.request_class is request.request_class]
        others = [each for each in self.pending() if each not in mine]
        if request.request_class is BATCH:
            ahead = float(len(others))
        else:
            aged_s = now_s - self.settings.ageing_s
            waiting = self.waiting(BATCH)
            ahead = float(sum(each.queued_s <= aged_s for each in waiting))
        ahead += sum(each.returned for each in mine)
        lines = {
            tenant: [each for each in mine if each.tenant == tenant and not each.returned]
            for tenant in {request.tenant, *(each.tenant for each in mine)}
        }
        end = self.start_of(request.request_class, request.tenant)
        end += (len(lines[request.tenant]) + 1) / self.weight(request.tenant)
        for tenant, line in lines.items():
            start = self.start_of(request.request_class, tenant)
            share = max((end - start) * self.weight(tenant), 0.0)
            ahead += min(len(line), share)
        return ahead

    def start_of(self, request_class: RequestClass, tenant: str) -> float:
        return self.starts.get((request_class, tenant), self.virtual[request_class])

    def enter(self, request: Request) -> None:
        self.requests.append(request)

    def join(self, request: Request, now_s: float) -> None:
        self.drain.look(now_s, bool(self.waiting()))
        if request.state is TicketState.PREPARING:
            self.num_joined += 1
            request.queued_s, request.number = now_s, self.num_joined
            key = request.request_class, request.tenant
            self.starts.setdefault(key, self.virtual[request.request_class])
        else:
            request.returned = True
        request.state = TicketState.WAITING

    def grant(self, request: Request, now_s: float) -> None:
        self.drain.look(now_s, True)
        if request.queued_s < now_s and not request.returned:
            self.drain.taken_s.append(now_s)
        if request.returned:
            request.state = TicketState.GRANTED
            return
        request_class, end = request.request_class, self.end(request)
        request.state = TicketState.GRANTED
        others = [each for each in self.heads(request_class) if each.tenant != request.tenant]
        soonest = min([end, *(self.end(other) for other in others)])
        self.virtual[request_class] = max(self.virtual[request_class], soonest)
        self.starts[request_class, request.tenant] = self.virtual[request_class]
        self.forget(request)

    def leave(self, request: Request) -> None:
        request.state = TicketState.LEFT
        self.requests.remove(request)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Tenants that do not wait, and the time of a class in which nobody does."""
        request_class = request.request_class
        if not self.line(request_class, request.tenant):
            self.starts.pop((request_class, request.tenant), None)
        if not self.heads(request_class):
            self.virtual[request_class] = 0.0

    def configure(self, settings: AdmissionSettings) -> None:
        before, self.settings = self.settings, settings
        for (request_class, tenant), start in self.starts.items():
            if before.weights.get(tenant, 1.0) != self.weight(tenant):
                earliest = self.virtual[request_class] - 1 / self.weight(tenant)
                self.starts[request_class, tenant] = max(start, earliest)
