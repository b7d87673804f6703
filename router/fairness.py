"""Who goes next among those of one class: tenants in turn, as their weights say."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from operator import add
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from router.ranking import Ranking

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key")
Measure = TypeVar("Measure")

# Of all that a tenant has, in virtual time; and its name, to part equal ones.
_End: TypeAlias = tuple[float, str]

DEFAULT_WEIGHT = 1.0


class Rank(NamedTuple):
    """How long somebody waits, and a number that no other has."""

    queued_s: float
    number: int


class Turn(NamedTuple, Generic[Item]):
    """Whose it is: the least one is next."""

    # Where its request ends, in virtual time.
    tag: float
    rank: Rank
    item: Item


class Sums(NamedTuple):
    num_requests: int
    weight: float
    # weight times start.
    started: float


def _sum(first: Sums, second: Sums) -> Sums:
    return Sums(*map(add, first, second))


NOTHING = Sums(0, 0.0, 0.0)


class _Flow(Generic[Item]):
    """One tenant, while it has a request that waits or comes."""

    __slots__ = (
        "coming",
        "coming_place",
        "line",
        "start",
        "tail_place",
        "tenant",
        "turn_place",
        "weight",
    )

    def __init__(self, tenant: str, weight: float) -> None:
        self.tenant = tenant
        self.weight = weight
        # In virtual time: where the request at the head begins.
        self.start = 0.0
        # Ordered dict, since a request leaves from the middle when it is cancelled.
        self.line: OrderedDict[Item, Rank] = OrderedDict()
        self.coming = 0
        # Where the three rankings have it.
        self.turn_place: tuple[Rank, Turn[Item]] | None = None
        self.tail_place: tuple[_End, Sums] | None = None
        self.coming_place: tuple[_End, Sums] | None = None

    @property
    def tag(self) -> float:
        """Where the request at the head ends."""
        return self.start + 1.0 / self.weight


class FairLine(Generic[Item]):
    """Pure. Self-clocked fair queueing (Golestani, 1994): a tenant's next request ends, in
    virtual time, 1 / weight after the one before it; the request that ends first is next;
    and virtual time is where the last one that went ends.

    While two tenants wait, what each has had, divided by its weight, differs by at most
    1 / weight of the one and 1 / weight of the other. Nobody has an end ahead of virtual
    time once its last request has gone: a tenant that does not wait can be forgotten, has
    nothing saved up when it comes back, and owes nothing.

    A request costs 1, however long its prompt. What is shared out is slots, and how long one
    is held depends on the part that is not cached and on the answer's length, which
    nobody knows yet; by prompt tokens, who reuses long prefixes would pay most for the
    cheapest requests.

    Equal turns go by rank: who has waited longest.
    """

    def __init__(self) -> None:
        self._weights: Mapping[str, float] = {}
        self._flows: dict[str, _Flow[Item]] = {}
        self._virtual = 0.0
        # Those before everybody.
        self._front_ranks: dict[Item, Rank] = {}
        self._front: Ranking[Rank, Turn[Item]] = Ranking(min)
        # By the ranks of the tenants' heads.
        self._turns: Ranking[Rank, Turn[Item]] = Ranking(min)
        # Tenants with a line, by the end of all they have; the others by how long that takes.
        self._tails: Ranking[_End, Sums] = Ranking(_sum)
        self._coming: Ranking[_End, Sums] = Ranking(_sum)
        self._num_in_lines = 0
        self.num_coming = 0

    def __len__(self) -> int:
        """Those that wait."""
        return len(self._front_ranks) + self._num_in_lines

    def __iter__(self) -> Iterator[Item]:
        yield from self._front_ranks
        for flow in self._flows.values():
            yield from flow.line

    @property
    def num_tenants(self) -> int:
        """Kept in memory."""
        return len(self._flows)

    def configure(self, weights: Mapping[str, float]) -> None:
        """In force at once, also for those who wait. Tenants without a weight have 1."""
        self._weights = weights
        for flow in self._flows.values():
            weight = weights.get(flow.tenant, DEFAULT_WEIGHT)
            if weight != flow.weight:
                flow.weight = weight
                # Nobody's end is behind virtual time.
                flow.start = max(flow.start, self._virtual - 1.0 / weight)
                self._place(flow)

    def expect(self, tenant: str) -> None:
        """A request will come; or `give_up` is called for it."""
        flow = self._flow(tenant)
        flow.coming += 1
        self.num_coming += 1
        self._place(flow)

    def give_up(self, tenant: str) -> None:
        flow = self._flows[tenant]
        flow.coming -= 1
        self.num_coming -= 1
        self._place(flow)

    def add(self, tenant: str, item: Item, rank: Rank) -> None:
        """One that was expected, at the end of its tenant's line. Ranks only rise."""
        flow = self._flows[tenant]
        flow.coming -= 1
        self.num_coming -= 1
        if not flow.line:
            flow.start = self._virtual
        flow.line[item] = rank
        self._num_in_lines += 1
        self._place(flow)

    def add_in_front(self, item: Item, rank: Rank) -> None:
        """Before everybody, at no cost to its tenant: it has had its turn, in vain."""
        self._front_ranks[item] = rank
        self._front.add(rank, Turn(0.0, rank, item))

    def next(self, came_by_s: float = math.inf) -> Item | None:
        """Whose turn it is among the heads that have waited since `came_by_s` at least."""
        turn = self._front.first()
        if turn is None or turn.rank.queued_s > came_by_s:
            turn = self._turns.fold_to((came_by_s, math.inf))
        return None if turn is None else turn.item

    def oldest(self) -> Item | None:
        turns = (self._front.first(), self._turns.first())
        turn = min((turn for turn in turns if turn), key=lambda turn: turn.rank, default=None)
        return None if turn is None else turn.item

    def take(self, tenant: str, item: Item) -> None:
        """It goes: the head of its tenant's line, or one in front."""
        if item in self._front_ranks:
            self._leave_front(item)
            return
        flow = self._flows[tenant]
        assert next(iter(flow.line)) is item
        end = flow.tag
        self._leave_line(flow, item)
        _move(self._turns, flow.turn_place, None)
        flow.turn_place = None
        # One that goes before its tenant's turn, by its age, leaves others that end sooner; so
        # much of it is free.
        others = self._turns.fold()
        if self._num_in_lines:
            self._virtual = max(self._virtual, end if others is None else min(end, others.tag))
        flow.start = self._virtual
        self._place(flow)

    def remove(self, tenant: str, item: Item) -> None:
        """It is cancelled. Who is behind it in its tenant's line moves up."""
        if item in self._front_ranks:
            self._leave_front(item)
        else:
            flow = self._flows[tenant]
            self._leave_line(flow, item)
            self._place(flow)

    def ahead_of_next(self, tenant: str) -> float:
        """Requests, waiting and coming, that would go before another one of this tenant: all of
        its own, and of each other tenant as many as its weight is worth until then.
        """
        flow = self._flows.get(tenant)
        weight = self._weights.get(tenant, DEFAULT_WEIGHT)
        own = len(flow.line) + flow.coming if flow else 0
        start = flow.start if flow and flow.line else self._virtual
        end = start + (own + 1) / weight
        return (
            len(self._front_ranks)
            + _until(end, self._tails)
            # Those who come begin where virtual time is.
            + _until(end - self._virtual, self._coming)
        )

    def check_integrity(self) -> None:
        for ranking in (self._front, self._turns, self._tails, self._coming):
            ranking.check_integrity()
        for tenant, flow in self._flows.items():
            assert flow.tenant == tenant
            assert flow.coming >= 0
            assert flow.line or flow.coming
            assert (flow.turn_place is None) == (flow.tail_place is None) == (not flow.line)
            assert not flow.line or flow.start <= self._virtual <= flow.tag + 1e-6
            assert list(flow.line.values()) == sorted(flow.line.values())
        flows = self._flows.values()
        assert self._num_in_lines == sum(len(flow.line) for flow in flows)
        assert self.num_coming == sum(flow.coming for flow in flows)
        assert len(self._tails) == sum(bool(flow.line) for flow in flows)
        assert len(self._turns) == len(self._tails)
        assert [turn.item for _, turn in self._front] == sorted(
            self._front_ranks, key=self._front_ranks.__getitem__
        )
        assert len(self._coming) == len(self._flows) - len(self._tails)
        assert self._num_in_lines or not self._virtual

    def _flow(self, tenant: str) -> _Flow[Item]:
        flow = self._flows.get(tenant)
        if flow is None:
            flow = _Flow(tenant, self._weights.get(tenant, DEFAULT_WEIGHT))
            self._flows[tenant] = flow
        return flow

    def _leave_line(self, flow: _Flow[Item], item: Item) -> None:
        del flow.line[item]
        self._num_in_lines -= 1
        if not self._num_in_lines:
            self._virtual = 0.0

    def _leave_front(self, item: Item) -> None:
        self._front.remove(self._front_ranks.pop(item))

    def _place(self, flow: _Flow[Item]) -> None:
        """Have the rankings know it as it is now; forget it when it has nothing."""
        turn: tuple[Rank, Turn[Item]] | None = None
        tail: tuple[_End, Sums] | None = None
        coming: tuple[_End, Sums] | None = None
        count, weight = len(flow.line) + flow.coming, flow.weight
        if flow.line:
            item, rank = next(iter(flow.line.items()))
            turn = rank, Turn(flow.tag, rank, item)
            end = (flow.start + count / weight, flow.tenant)
            tail = end, Sums(count, weight, weight * flow.start)
        elif count:
            coming = (count / weight, flow.tenant), Sums(count, weight, 0.0)
        else:
            del self._flows[flow.tenant]
        _move(self._turns, flow.turn_place, turn)
        _move(self._tails, flow.tail_place, tail)
        _move(self._coming, flow.coming_place, coming)
        flow.turn_place, flow.tail_place, flow.coming_place = turn, tail, coming


def _move(
    ranking: Ranking[Key, Measure],
    old: tuple[Key, Measure] | None,
    new: tuple[Key, Measure] | None,
) -> None:
    if new == old:
        return
    if old is not None:
        ranking.remove(old[0])
    if new is not None:
        ranking.add(*new)


def _until(end: float, tails: Ranking[_End, Sums]) -> float:
    """Requests whose turn is before `end`: all of the tenants that end by then, and a part,
    in proportion to its weight, of what each other one has.
    """
    # No tenant's name sorts behind this.
    whole = tails.fold_to((end, "\U0010ffff")) or NOTHING
    total = tails.fold() or NOTHING
    weight, started = total.weight - whole.weight, total.started - whole.started
    return whole.num_requests + max(weight * end - started, 0.0)
