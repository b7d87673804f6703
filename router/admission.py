"""Who may enter, and who goes next.

A request that enters holds a ticket until a worker takes it: first while its
prompt is prepared, then in line. Interactive requests go before batch ones,
except that a batch request goes before interactive ones that came `ageing_s`
later, so that it never starves. Within a class, first come first served.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from types import TracebackType
from typing import Generic, TypeVar

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


class Ticket(Generic[Item]):
    """One request's place. Leaving the context gives it up, wherever the request is by then."""

    __slots__ = ("_queue", "item", "queued_s", "request_class", "state")

    def __init__(self, queue: AdmissionQueue[Item], request_class: RequestClass) -> None:
        self._queue = queue
        self.request_class = request_class
        self.state = TicketState.PREPARING
        self.queued_s = math.nan
        self.item: Item | None = None

    def __enter__(self) -> Ticket[Item]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._queue.leave(self)


class AdmissionQueue(Generic[Item]):
    """Pure: the caller says what time it is, and when a worker has room.

    Pending are requests that have entered and that no worker has taken yet. There
    are at most as many as workers have room for, plus `max_queue`: so a request
    whose prompt has been prepared is never refused afterwards.
    """

    def __init__(self, *, max_queue: int, ageing_s: float) -> None:
        self._preparing: set[Ticket[Item]] = set()
        # Ordered dicts, since a ticket leaves from the middle when its request is cancelled.
        self._interactive: OrderedDict[Ticket[Item], None] = OrderedDict()
        self._batch: OrderedDict[Ticket[Item], None] = OrderedDict()
        self._drain = DrainRate()
        self.configure(max_queue=max_queue, ageing_s=ageing_s)

    def configure(self, *, max_queue: int, ageing_s: float) -> None:
        self._max_queue = max_queue
        self._ageing_s = ageing_s

    @property
    def num_waiting(self) -> int:
        return len(self._interactive) + len(self._batch)

    @property
    def num_pending(self) -> int:
        return len(self._preparing) + self.num_waiting

    @property
    def has_place(self) -> bool:
        """One more may enter, whether workers have room or not."""
        return self.num_pending < self._max_queue

    def enter(self, request_class: RequestClass, *, room: int) -> Ticket[Item]:
        """Raises Overloaded when full. `room`: requests that workers could take now."""
        if self.num_pending >= self._max_queue + room:
            raise Overloaded(
                f"the queue is full: {self.num_pending} requests wait (router.max_queue"
                f" is {self._max_queue})",
                reason="QUEUE_FULL",
                retry_delay_s=self._drain.time_for(self.num_pending),
            )
        ticket = Ticket(self, request_class)
        self._preparing.add(ticket)
        return ticket

    def join(self, ticket: Ticket[Item], item: Item, now_s: float) -> None:
        """Get in line. One that was granted before comes back to the front of its class."""
        assert ticket.state in (TicketState.PREPARING, TicketState.GRANTED), ticket.state
        self._drain.advance(now_s, draining=self.num_waiting > 0)
        line = self._line(ticket)
        line[ticket] = None
        if ticket.state is TicketState.PREPARING:
            self._preparing.remove(ticket)
            ticket.queued_s = now_s
        else:
            line.move_to_end(ticket, last=False)
        ticket.state = TicketState.WAITING
        ticket.item = item

    def head(self) -> Ticket[Item] | None:
        """Who goes next."""
        interactive = next(iter(self._interactive), None)
        batch = next(iter(self._batch), None)
        if interactive is None or batch is None:
            return interactive or batch
        return batch if interactive.queued_s >= batch.queued_s + self._ageing_s else interactive

    def oldest(self) -> Ticket[Item] | None:
        """Who has waited longest, of either class."""
        heads = (next(iter(line), None) for line in (self._interactive, self._batch))
        return min((head for head in heads if head), key=lambda head: head.queued_s, default=None)

    def grant(self, ticket: Ticket[Item], now_s: float) -> Item:
        """A worker has room for a waiting ticket: out of the line. Returns its item."""
        assert ticket.state is TicketState.WAITING, ticket.state
        item = ticket.item
        assert item is not None
        self._drain.advance(now_s, draining=True)
        self._drain.count(ticket.queued_s < now_s)
        del self._line(ticket)[ticket]
        ticket.state = TicketState.GRANTED
        ticket.item = None
        return item

    def leave(self, ticket: Ticket[Item]) -> None:
        """Done, refused or cancelled, whichever; may be called twice."""
        if ticket.state is TicketState.PREPARING:
            self._preparing.remove(ticket)
        elif ticket.state is TicketState.WAITING:
            del self._line(ticket)[ticket]
        ticket.state = TicketState.LEFT
        ticket.item = None

    def check_integrity(self) -> None:
        assert all(ticket.state is TicketState.PREPARING for ticket in self._preparing)
        for line, request_class in (
            (self._interactive, RequestClass.INTERACTIVE),
            (self._batch, RequestClass.BATCH),
        ):
            for ticket in line:
                assert ticket.state is TicketState.WAITING
                assert ticket.item is not None
                assert ticket.request_class is request_class

    def _line(self, ticket: Ticket[Item]) -> OrderedDict[Ticket[Item], None]:
        return self._batch if ticket.request_class is RequestClass.BATCH else self._interactive


class DrainRate:
    """How fast workers take requests, measured only while somebody waits.

    An idle queue drains as slowly as requests arrive, which says nothing of the
    speed at which a full one would.
    """

    MEMORY_S = 10.0
    SHORTEST_S, LONGEST_S = 0.1, 60.0
    UNKNOWN_S = 1.0

    def __init__(self) -> None:
        self._taken = 0.0
        self._draining_s = 0.0
        self._seen_s: float | None = None

    def advance(self, now_s: float, *, draining: bool) -> None:
        """Time has come to `now_s`, and somebody waited since the last call, or nobody did."""
        if draining and self._seen_s is not None:
            elapsed_s = now_s - self._seen_s
            fade = math.exp(-elapsed_s / self.MEMORY_S)
            self._taken *= fade
            self._draining_s = self._draining_s * fade + elapsed_s
        self._seen_s = now_s

    def count(self, had_waited: bool) -> None:
        self._taken += had_waited

    def time_for(self, num_requests: int) -> float:
        """Seconds until so many have been taken: when it makes sense to come back."""
        if not self._taken or not self._draining_s:
            return self.UNKNOWN_S
        expected_s = num_requests * self._draining_s / self._taken
        return min(max(expected_s, self.SHORTEST_S), self.LONGEST_S)
