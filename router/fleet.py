"""The workers, as membership and this router's own calls tell them.

Membership says which workers are there; a failed call says sooner that one is
not. Such a worker is suspected: avoided for a while that doubles with each
failure, then given one request at a time until it answers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NamedTuple

FIRST_SUSPICION_S = 1.0
LONGEST_SUSPICION_S = 30.0
# After a worker has refused a request as one too many: other routers send there too.
FULL_PAUSE_S = 0.1


class Role(enum.Enum):
    """Which part of a request a worker serves."""

    BOTH = "both"
    # Computes prompts for others, and answers nothing itself.
    PREFILL = "prefill"
    DECODE = "decode"


class Announced(NamedTuple):
    """What a worker says of itself through membership."""

    id: str
    address: str
    # READY, and of the model that this mesh serves.
    ready: bool
    num_slots: int
    max_context_tokens: int
    role: Role = Role.BOTH
    # Workers of equal fingerprints can exchange KV.
    fingerprint: str = ""
    # KV blocks that it can keep; 0: it does not say.
    num_blocks: int = 0
    # Where callers may fetch what is planned for them; empty: nowhere.
    direct_address: str = ""


class Worker:
    """One incarnation of a worker. Only the fleet changes it."""

    __slots__ = (
        "announced",
        "avoided_until_s",
        "identity",
        "in_flight",
        "num_failures",
        "outstanding_tokens",
        "present",
        "turn",
    )

    def __init__(self, announced: Announced) -> None:
        self.announce(announced)
        self.present = True
        self.in_flight = 0
        # Of the prompts of those in flight.
        self.outstanding_tokens = 0
        # Failed calls since the last that was answered.
        self.num_failures = 0
        self.avoided_until_s = -math.inf
        # When it was last taken, counted in requests; 0 is never.
        self.turn = 0

    def __repr__(self) -> str:
        return f"<Worker {self.announced.id}, {self.in_flight} in flight>"

    def announce(self, announced: Announced) -> None:
        self.announced = announced
        # What affinity hangs on. Not the id: who restarts in its place keeps its requests.
        self.identity = announced.address.encode()

    @property
    def ready(self) -> bool:
        return self.present and self.announced.ready

    def may_be_called(self, now_s: float) -> bool:
        """Whether it has slots or not. One that has failed is given one request at a time."""
        on_trial = self.num_failures > 0 and self.in_flight > 0
        return self.ready and self.avoided_until_s <= now_s and not on_trial

    def room(self, now_s: float) -> int:
        """Requests that may be sent to it now."""
        if not self.may_be_called(now_s):
            return 0
        num_slots = 1 if self.num_failures else self.announced.num_slots
        return max(0, num_slots - self.in_flight)


class Slot:
    """A request at a worker, until released or left as a context."""

    __slots__ = ("_release", "_released", "num_tokens", "worker")

    def __init__(self, worker: Worker, num_tokens: int, release: Callable[[Slot], None]) -> None:
        self.worker = worker
        self.num_tokens = num_tokens
        self._release = release
        self._released = False

    def release(self) -> None:
        """May be called twice."""
        if not self._released:
            self._released = True
            self._release(self)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Fleet:
    """Pure: the caller says what time it is.

    `on_room` is called when a worker has room again: a request has left it, whatever
    ended it, or it has answered after a failure.
    """

    def __init__(self, *, on_room: Callable[[], None] = lambda: None) -> None:
        self._on_room = on_room
        # A worker that has left stays until its last request has.
        self._workers: dict[str, Worker] = {}
        # Those with room, and those of which only the time tells.
        self._open: dict[Worker, None] = {}
        self._doubtful: dict[Worker, None] = {}
        self._turn = 0
        self.num_in_flight = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def update(self, announced: Iterable[Announced]) -> None:
        """Replace what membership says; who becomes ready again is no longer suspected."""
        present = {each.id: each for each in announced}
        for member_id, worker in self._workers.items():
            worker.present = member_id in present
        for member_id, each in present.items():
            worker = self._workers.setdefault(member_id, Worker(each))
            if each.ready and not worker.announced.ready:
                _clear(worker)
            worker.announce(each)
        for worker in self.workers:
            self._sort(worker)
            self._forget_if_gone(worker)

    def candidates(self, now_s: float) -> list[Worker]:
        """Workers that could take a request now."""
        if not self._doubtful:
            return list(self._open)
        return [*self._open, *(worker for worker in self._doubtful if worker.room(now_s))]

    def room(self, now_s: float) -> int:
        """Requests that the workers together could take now."""
        return sum(worker.room(now_s) for worker in self._workers.values())

    def is_deserted(self, now_s: float) -> bool:
        """No worker is there: it is not that all are busy."""
        return not any(
            worker.ready and worker.avoided_until_s <= now_s for worker in self._workers.values()
        )

    def next_return_s(self, now_s: float) -> float | None:
        """When the next avoided worker may be tried again."""
        returns = (
            worker.avoided_until_s
            for worker in self._workers.values()
            if worker.ready and worker.avoided_until_s > now_s
        )
        return min(returns, default=None)

    def max_context_tokens(self) -> int | None:
        """Most tokens that every worker can hold; None when there is no worker."""
        bounds = (
            worker.announced.max_context_tokens for worker in self._workers.values() if worker.ready
        )
        return min(bounds, default=None)

    def take(self, worker: Worker, num_tokens: int = 0) -> Slot:
        """`num_tokens`: of the request's prompt."""
        self._turn += 1
        worker.turn = self._turn
        worker.in_flight += 1
        worker.outstanding_tokens += num_tokens
        self.num_in_flight += 1
        if worker.in_flight >= worker.announced.num_slots or worker not in self._open:
            self._sort(worker)
        return Slot(worker, num_tokens, self._release)

    def suspect(self, worker: Worker, now_s: float) -> None:
        """A call to it failed. Several that fail together count once."""
        if worker.num_failures and worker.avoided_until_s > now_s:
            return
        pause_s = min(FIRST_SUSPICION_S * 2.0**worker.num_failures, LONGEST_SUSPICION_S)
        worker.num_failures += 1
        worker.avoided_until_s = now_s + pause_s
        self._sort(worker)

    def pause(self, worker: Worker, now_s: float) -> None:
        """It says that it is full."""
        worker.avoided_until_s = max(worker.avoided_until_s, now_s + FULL_PAUSE_S)
        self._sort(worker)

    def trust(self, worker: Worker) -> None:
        """It has answered a call."""
        if worker.num_failures:
            _clear(worker)
            self._sort(worker)
            self._on_room()

    def check_integrity(self) -> None:
        assert self.num_in_flight == sum(worker.in_flight for worker in self._workers.values())
        for member_id, worker in self._workers.items():
            assert worker.announced.id == member_id
            assert worker.in_flight >= 0
            assert worker.outstanding_tokens >= 0
            assert worker.in_flight or not worker.outstanding_tokens
            assert worker.present or worker.in_flight, f"{worker} has left and is still known"
            if worker not in self._doubtful:
                assert (worker in self._open) == (worker.room(math.inf) > 0)
        assert not self._open.keys() & self._doubtful.keys()
        assert self._open.keys() | self._doubtful.keys() <= set(self._workers.values())

    def _release(self, slot: Slot) -> None:
        worker = slot.worker
        worker.in_flight -= 1
        worker.outstanding_tokens -= slot.num_tokens
        self.num_in_flight -= 1
        if worker not in self._open:
            self._sort(worker)
        self._forget_if_gone(worker)
        self._on_room()

    def _sort(self, worker: Worker) -> None:
        """After each change of it. Asking all workers at each request would cost the most."""
        self._open.pop(worker, None)
        self._doubtful.pop(worker, None)
        if self._workers.get(worker.announced.id) is not worker:
            return  # a failed call of one that has left
        if worker.num_failures or worker.avoided_until_s > -math.inf:
            self._doubtful[worker] = None
        elif worker.room(math.inf):
            self._open[worker] = None

    def _forget_if_gone(self, worker: Worker) -> None:
        if not worker.present and not worker.in_flight:
            del self._workers[worker.announced.id]
            self._open.pop(worker, None)
            self._doubtful.pop(worker, None)


def _clear(worker: Worker) -> None:
    worker.num_failures = 0
    worker.avoided_until_s = -math.inf
