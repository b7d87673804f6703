"""Who may enter, and who goes next.

A request that enters holds a ticket until a worker takes it: first while its
prompt is prepared, then in line. Interactive requests go before batch ones,
except that a batch request goes before interactive ones that came `ageing_s`
later, so that it never starves. Within a class, tenants take turns (fairness.py);
within a tenant, first come first served.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import add
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from router.drain import DrainRate
from router.fairness import FairLine, Rank
from router.ranking import Ranking
from services.core.errors import Overloaded

Item = TypeVar("Item")


class RequestClass(enum.Enum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


class TicketState(enum.Enum):
    PREPARING = "preparing"
    WAITING = "waiting"
    GRANTED = "granted"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    max_queue: int
    ageing_s: float
    # Longest expected wait; 0: any.
    max_wait_interactive_s: float = 0.0
    max_wait_batch_s: float = 0.0
    # By tenant; 1 for all others.
    weights: Mapping[str, float] = field(default_factory=dict)

    def max_wait_s(self, request_class: RequestClass) -> float:
        batch = request_class is RequestClass.BATCH
        return self.max_wait_batch_s if batch else self.max_wait_interactive_s


class Ticket(Generic[Item]):
    """One request's place. Leaving the context gives it up, wherever the request is by then."""

    __slots__ = ("_queue", "item", "rank", "request_class", "returned", "state", "tenant")

    def __init__(
        self, queue: AdmissionQueue[Item], request_class: RequestClass, tenant: str
    ) -> None:
        self._queue = queue
        self.request_class = request_class
        self.tenant = tenant
        self.state = TicketState.PREPARING
        # From the first time in line.
        self.rank = Rank(math.nan, 0)
        # A worker was found for it before, in vain.
        self.returned = False
        self.item: Item | None = None

    @property
    def queued_s(self) -> float:
        return self.rank.queued_s

    def __enter__(self) -> Ticket[Item]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._queue.leave(self)


class _Limit(NamedTuple):
    """The longest wait that a request is let in for."""

    wait_s: float
    # For people.
    words: str


class AdmissionQueue(Generic[Item]):
    """Pure: the caller says what time it is, and when a worker has room.

    Pending are requests that have entered and that no worker has taken yet. There
    are at most as many as workers have room for, plus `max_queue`; and one whose wait is
    expected to be longer than its deadline or its class allows does not enter. So a
    request whose prompt has been prepared is never refused afterwards.

    Every operation takes time as log of those who wait, and of their tenants. Tenants
    without a pending request take no memory.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._preparing: set[Ticket[Item]] = set()
        self._interactive: FairLine[Ticket[Item]] = FairLine()
        self._batch: FairLine[Ticket[Item]] = FairLine()
        # Batch requests in line, to be counted by age.
        self._batch_ranks: Ranking[Rank, int] = Ranking(add)
        self._drain = DrainRate()
        self._num_joined = 0
        self.configure(settings)

    def configure(self, settings: AdmissionSettings) -> None:
        """In force at once, also for those who wait; nobody who has entered is refused."""
        self._settings = settings
        self._interactive.configure(settings.weights)
        self._batch.configure(settings.weights)

    @property
    def num_waiting(self) -> int:
        return len(self._interactive) + len(self._batch)

    @property
    def num_waiting_by_class(self) -> dict[RequestClass, int]:
        return {
            RequestClass.INTERACTIVE: len(self._interactive),
            RequestClass.BATCH: len(self._batch),
        }

    @property
    def num_pending(self) -> int:
        return len(self._preparing) + self.num_waiting

    @property
    def num_tenants(self) -> int:
        """Kept in memory; one with requests of both classes counts twice."""
        return self._interactive.num_tenants + self._batch.num_tenants

    def enter(
        self,
        request_class: RequestClass,
        *,
        now_s: float,
        room: Callable[[], int],
        tenant: str = "",
        remaining_s: float | None = None,
    ) -> Ticket[Item]:
        """Raises Overloaded when the queue is full, or the expected wait too long.

        `room`: requests that workers could take now; asked only where it matters.
        `remaining_s`: until the request's deadline.
        """
        self._drain.advance(now_s, draining=self.num_waiting > 0)
        max_queue = self._settings.max_queue
        if self.num_pending >= max_queue and self.num_pending >= max_queue + room():
            raise Overloaded(
                f"the queue is full: {self.num_pending} requests wait (router.max_queue"
                f" is {max_queue})",
                reason="QUEUE_FULL",
                retry_delay_s=self._drain.retry_delay_s(self.num_pending),
            )
        limit = self._limit(request_class, remaining_s)
        if self._drain.per_s is not None and math.isfinite(limit.wait_s):
            self._check_wait(self._num_ahead(request_class, tenant, now_s) + 1 - room(), limit)
        ticket = Ticket(self, request_class, tenant)
        self._preparing.add(ticket)
        self._line(ticket).expect(tenant)
        return ticket

    def join(self, ticket: Ticket[Item], item: Item, now_s: float) -> None:
        """Get in line. One that was granted before comes back to the front of its class."""
        assert ticket.state in (TicketState.PREPARING, TicketState.GRANTED), ticket.state
        self._drain.advance(now_s, draining=self.num_waiting > 0)
        line = self._line(ticket)
        if ticket.state is TicketState.PREPARING:
            self._num_joined += 1
            ticket.rank = Rank(now_s, self._num_joined)
            self._preparing.remove(ticket)
            line.add(ticket.tenant, ticket, ticket.rank)
        else:
            ticket.returned = True
            line.add_in_front(ticket, ticket.rank)
        if ticket.request_class is RequestClass.BATCH:
            self._batch_ranks.add(ticket.rank, 1)
        ticket.state = TicketState.WAITING
        ticket.item = item

    def head(self) -> Ticket[Item] | None:
        """Who goes next."""
        interactive = self._interactive.next()
        if interactive is None or not len(self._batch):
            return interactive or self._batch.next()
        return self._batch.next(interactive.queued_s - self._settings.ageing_s) or interactive

    def oldest(self) -> Ticket[Item] | None:
        """Who has waited longest, of either class."""
        heads = (self._interactive.oldest(), self._batch.oldest())
        return min((head for head in heads if head), key=lambda head: head.rank, default=None)

    def grant(self, ticket: Ticket[Item], now_s: float) -> Item:
        """A worker has room for the head: out of the line. Returns its item."""
        assert ticket.state is TicketState.WAITING, ticket.state
        item = ticket.item
        assert item is not None
        self._drain.advance(now_s, draining=True)
        # One that has returned was counted before.
        if ticket.queued_s < now_s and not ticket.returned:
            self._drain.count()
        self._line(ticket).take(ticket.tenant, ticket)
        self._forget_age(ticket)
        ticket.state = TicketState.GRANTED
        ticket.item = None
        return item

    def leave(self, ticket: Ticket[Item]) -> None:
        """Done, refused or cancelled, whichever; may be called twice."""
        if ticket.state is TicketState.PREPARING:
            self._preparing.remove(ticket)
            self._line(ticket).give_up(ticket.tenant)
        elif ticket.state is TicketState.WAITING:
            self._line(ticket).remove(ticket.tenant, ticket)
            self._forget_age(ticket)
        ticket.state = TicketState.LEFT
        ticket.item = None

    def check_integrity(self) -> None:
        assert all(ticket.state is TicketState.PREPARING for ticket in self._preparing)
        self._batch_ranks.check_integrity()
        assert len(self._batch_ranks) == len(self._batch)
        num_coming = 0
        for line, request_class in (
            (self._interactive, RequestClass.INTERACTIVE),
            (self._batch, RequestClass.BATCH),
        ):
            line.check_integrity()
            num_coming += line.num_coming
            for ticket in line:
                assert ticket.state is TicketState.WAITING
                assert ticket.item is not None
                assert ticket.request_class is request_class
        assert num_coming == len(self._preparing)
        assert self.num_pending or not self.num_tenants

    def _line(self, ticket: Ticket[Item]) -> FairLine[Ticket[Item]]:
        return self._batch if ticket.request_class is RequestClass.BATCH else self._interactive

    def _forget_age(self, ticket: Ticket[Item]) -> None:
        if ticket.request_class is RequestClass.BATCH:
            self._batch_ranks.remove(ticket.rank)

    def _num_ahead(self, request_class: RequestClass, tenant: str, now_s: float) -> float:
        """Requests, of those that are pending, that go before one that enters now."""
        if request_class is RequestClass.BATCH:
            interactive = len(self._interactive) + self._interactive.num_coming
            return interactive + self._batch.ahead_of_next(tenant)
        aged = self._batch_ranks.fold_to((now_s - self._settings.ageing_s, math.inf)) or 0
        return aged + self._interactive.ahead_of_next(tenant)

    def _limit(self, request_class: RequestClass, remaining_s: float | None) -> _Limit:
        most_s = self._settings.max_wait_s(request_class)
        words = f"router.max_wait_{request_class.value}_s is {most_s:g}"
        limit = _Limit(most_s or math.inf, words)
        if remaining_s is not None and remaining_s < limit.wait_s:
            return _Limit(remaining_s, f"its deadline is in {max(remaining_s, 0.0):.3g} s")
        return limit

    def _check_wait(self, num_before: float, limit: _Limit) -> None:
        """`num_before`: requests that workers must take until this one is, itself included."""
        rate = self._drain.per_s
        assert rate is not None
        wait_s = num_before / rate
        if num_before > 0 and wait_s > limit.wait_s:
            raise Overloaded(
                f"a worker is expected in {wait_s:.3g} s, too late for this request"
                f" ({limit.words})",
                reason="EXPECTED_WAIT",
                retry_delay_s=self._drain.retry_delay_s(num_before - limit.wait_s * rate),
            )
