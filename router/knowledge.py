"""What a router knows of the workers: who has which blocks, and how much to do. Pure.

It learns from their reports, and from what it has sent them itself: a prompt that is on its
way to a worker is expected to be cached there. Each expectation is an `Errand`, which ends
once: confirmed by the worker's report, withdrawn when the request fails, or run out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from router.feed import Feed, Verdict
from router.fleet import Worker
from router.prefix_index import Holder, PrefixIndex, short_keys
from router.prompt import Choice, Prompt
from router.reports import EvictedEvent, LoadEvent, Report, SnapshotEvent, StoredEvent
from router.work import FIRST_TOKEN_S, RecentWork, WorkerLoad
from services.core.keys import KEY_BYTES

# An answer has ended, and what it brought has not been reported: it may be on its way for so
# long. Reports come some milliseconds after the first token.
REPORT_PATIENCE_S = 2.0
# Of a worker that announces no blocks.
DEFAULT_BLOCKS = 1024
# Of the blocks that a worker says it has room for, what it may report to have. More cannot
# be, and would drive out of the index what others have.
BELIEVED = 1.1
RECENT_HALF_LIFE_S = 3600.0
TYPICAL_INTERVAL_S = 0.1


class AnnouncedStore(NamedTuple):
    """A KV store in a node's memory, for the workers at the same host."""

    id: str
    host: str


class View:
    """Of one holder: its feed, and what it has. Of a worker also how much it has to do."""

    __slots__ = ("bit", "feed", "holder", "load", "store", "worker")

    def __init__(self, holder: Holder, worker: Worker | None, load: WorkerLoad) -> None:
        self.hold_as(holder)
        self.feed = Feed()
        self.worker = worker
        self.load = load
        # Of its node.
        self.store: View | None = None

    @property
    def max_blocks(self) -> int | None:
        """None: it does not say."""
        if self.worker is None:
            return None
        num_blocks = self.worker.announced.num_blocks or self.load.num_blocks
        return int(BELIEVED * num_blocks) or None

    def hold_as(self, holder: Holder) -> None:
        self.holder = holder
        self.bit = holder.bit


@dataclass(slots=True)
class Counts:
    """Since the start."""

    decisions: int = 0
    # Of those, with nothing known of the worker but what was sent there.
    unreported: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    # Tokens that were expected and not there, and the other way round.
    overpredicted_tokens: int = 0
    underpredicted_tokens: int = 0
    snapshots: int = 0
    gaps: int = 0


class Knowledge:
    """`views`: by worker. Times are in seconds, and are arguments."""

    def __init__(self, max_blocks: int) -> None:
        self.index = PrefixIndex(max_blocks)
        self.recent = RecentWork(RECENT_HALF_LIFE_S)
        self.views: dict[Worker, View] = {}
        self.counts = Counts()
        self._by_id: dict[str, View] = {}
        self._stores: dict[str, View] = {}
        self._typical_token_s = 0.0
        self._typical_due_s = 0.0
        # Errands whose answers have ended, and when their expectations run out.
        self._ended: deque[tuple[float, Errand]] = deque()
        self.num_errands = 0

    @property
    def num_live_feeds(self) -> int:
        return sum(view.feed.is_live for view in self._by_id.values())

    @property
    def store_bits(self) -> Iterator[int]:
        return (view.bit for view in self._stores.values())

    @property
    def typical_token_s(self) -> float:
        """Of workers that are measured; for those that are not."""
        return self._typical_token_s or FIRST_TOKEN_S

    def update_workers(self, workers: Iterable[Worker]) -> None:
        self.index.sweep()  # else who comes and goes, and says nothing, is never forgotten
        present = {worker: None for worker in workers if worker.present}
        for worker in self.views.keys() - present.keys():
            view = self.views.pop(worker)
            self._by_id.pop(worker.announced.id, None)
            self.index.leave(view.holder)
        # Who is new has as much behind it as who has the least: else all would go there.
        least_s = min((view.load.recent_s for view in self.views.values()), default=0.0)
        for worker in present:
            if worker not in self.views:
                view = View(self.index.join(), worker, WorkerLoad(recent_s=least_s))
                self.views[worker] = self._by_id[worker.announced.id] = view
        self._assign_stores()

    def update_stores(self, stores: Iterable[AnnouncedStore]) -> None:
        present = {store.id: store.host for store in stores}
        known = {view_id: view for view_id, view in self._by_id.items() if view.worker is None}
        for view_id in known.keys() - present.keys():
            self.index.leave(self._by_id.pop(view_id).holder)
        for view_id in present.keys() - known.keys():
            self._by_id[view_id] = View(self.index.join(), None, WorkerLoad())
        self._stores = {host: self._by_id[view_id] for view_id, host in present.items()}
        self._assign_stores()

    def hear(self, holder_id: str, report: Report, now_s: float) -> bool:
        """False: something is missing, and only a snapshot helps."""
        view = self._by_id.get(holder_id)
        if view is None:  # it has left, and its reports come late
            return True
        self.index.sweep()
        self._run_out(now_s)
        verdict = view.feed.judge(report)
        if verdict is Verdict.GAP:
            self.counts.gaps += 1
            return False
        if verdict is Verdict.NEXT:
            self._apply(view, report, now_s)
        return True

    def deaf(self, holder_id: str) -> None:
        """Its reports have ended, for now. What it had is still the best guess."""
        view = self._by_id.get(holder_id)
        if view is not None:
            view.feed.end()
            view.load.go_deaf()

    def begin(self, choice: Choice, prompt: Prompt, now_s: float) -> Errand:
        """The prompt is sent to the worker that was chosen."""
        self.index.sweep()
        self._run_out(now_s)
        self.num_errands += 1
        return Errand(self, self.views[choice.worker], choice, prompt, now_s)

    def token_s(self, load: WorkerLoad) -> float:
        return load.token_s or self.typical_token_s

    def scale(self, now_s: float) -> float:
        """What a second of work that is given out now counts as `recent_s`."""
        scale = self.recent.scale(now_s)
        if scale > RecentWork.LARGEST:
            factor = self.recent.rebase(now_s)
            for view in self.views.values():
                view.load.recent_s *= factor
            scale = 1.0
        return scale

    def settle_later(self, errand: Errand, now_s: float) -> None:
        self._ended.append((now_s + REPORT_PATIENCE_S, errand))

    def assume(self, view: View, prompt: Prompt) -> None:
        """A worker that does not report has what it was asked, and drops the oldest."""
        if view.worker is None or not view.holder.is_present:
            return
        num_blocks = len(prompt.prefix_keys) // KEY_BYTES - 1
        most = view.worker.announced.num_blocks or DEFAULT_BLOCKS
        self.index.use(view.holder, prompt.prefix_keys, num_blocks, most)

    def compare(self, predicted: int, actual: int, *, is_reported: bool) -> None:
        """Tokens of one prompt that were expected to be cached, and those that were."""
        counts = self.counts
        counts.decisions += 1
        counts.unreported += not is_reported
        counts.predicted_tokens += predicted
        counts.cached_tokens += actual
        counts.overpredicted_tokens += max(0, predicted - actual)
        counts.underpredicted_tokens += max(0, actual - predicted)

    def check_idle(self) -> None:
        """For when no request is left."""
        self.index.check_integrity()
        assert self.num_errands == 0, f"{self.num_errands} requests are still expected to begin"
        for view in self.views.values():
            assert view.load.is_idle

    def _apply(self, view: View, report: Report, now_s: float) -> None:
        match report.event:
            case SnapshotEvent(prefix_keys, load, continues):
                if not continues:
                    self.counts.snapshots += 1
                    self._start_over(view)
                if load is not None:
                    self._hear_load(view, load, now_s)
                self.index.hold(view.holder, prefix_keys, view.max_blocks)
            case StoredEvent(prefix_keys):
                self.index.hold(view.holder, prefix_keys, view.max_blocks)
            case EvictedEvent(prefix_keys):
                self.index.drop(view.holder, prefix_keys)
            case LoadEvent() as load:
                self._hear_load(view, load, now_s)

    def _start_over(self, view: View) -> None:
        """With nothing but what is on its way there."""
        before = view.holder
        view.hold_as(self.index.join())
        for key, count in before.expected.items():
            for _ in range(count):
                self.index.expect(view.holder, [key])
        self.index.leave(before)

    def _hear_load(self, view: View, load: LoadEvent, now_s: float) -> None:
        if view.worker is None:
            return
        guess_s = 0.0 if view.load.token_s else self.typical_token_s
        view.load.hear(load, view.worker.in_flight, now_s)
        if guess_s and view.load.token_s:
            # It has been charged by a guess so far, and others may not have been.
            view.load.recent_s *= view.load.token_s / guess_s
        if now_s >= self._typical_due_s or not self._typical_token_s:
            # Not at each report: there are as many as workers, and each asks all of them.
            self._typical_due_s = now_s + TYPICAL_INTERVAL_S
            known = [each.load.token_s for each in self.views.values() if each.load.token_s]
            self._typical_token_s = median_low(known) if known else 0.0
            for each in self.views.values():
                each.load.doubt_speed(self._typical_token_s, now_s)

    def _assign_stores(self) -> None:
        for worker, view in self.views.items():
            host = worker.announced.address.rpartition(":")[0]
            view.store = self._stores.get(host)

    def _run_out(self, now_s: float) -> None:
        while self._ended and self._ended[0][0] <= now_s:
            self._ended.popleft()[1].settle()


class Errand:
    """One request at one worker, until it has ended there."""

    __slots__ = (
        "_begun_s",
        "_choice",
        "_is_alone",
        "_is_awaited",
        "_is_finished",
        "_keys",
        "_knowledge",
        "_prompt",
        "_view",
    )

    def __init__(
        self, knowledge: Knowledge, view: View, choice: Choice, prompt: Prompt, now_s: float
    ) -> None:
        self._knowledge = knowledge
        self._view = view
        self._choice = choice
        self._prompt = prompt
        self._begun_s = now_s
        # Nothing was before it there.
        self._is_alone = view.load.is_idle
        # Its first token has not been seen.
        self._is_awaited = True
        self._is_finished = False
        cached_blocks = (choice.predicted_tokens or 0) // prompt.block_tokens
        self._keys: list[bytes] | None = short_keys(prompt.prefix_keys, cached_blocks)
        knowledge.index.expect(view.holder, self._keys)
        view.load.begin(choice.work_s, choice.uncached_tokens, now_s)
        view.load.recent_s += choice.work_s * knowledge.scale(now_s)

    def first_token(self, now_s: float) -> None:
        """The prompt is computed."""
        self._end_work(now_s)
        if self._is_alone and not self._view.load.queue_s(now_s):
            self._view.load.learn_token(self._choice.uncached_tokens, now_s - self._begun_s)

    def finished(
        self,
        *,
        cached_tokens: int,
        evaluated_tokens: int,
        loaded_blocks: int,
        load_s: float,
        now_s: float,
    ) -> None:
        """It went well; the figures are the worker's."""
        self._end_work(now_s)
        self._is_finished = True
        # A worker may say anything, but it was not longer at it than it had the request.
        load_s = max(0.0, min(now_s - self._begun_s, load_s))
        view, knowledge, choice = self._view, self._knowledge, self._choice
        load = view.load
        if choice.uncached_tokens:  # else another worker computes it
            # It was charged what it was expected to take: at first by a speed that is a guess.
            spent_s = evaluated_tokens * knowledge.token_s(load) + load_s
            load.recent_s += (spent_s - choice.work_s) * knowledge.scale(now_s)
            load.recent_s = max(0.0, load.recent_s)
        load.learn_residence(now_s - self._begun_s)
        if loaded_blocks and load_s > 0:
            load.learn_load(loaded_blocks, load_s)
        predicted = choice.predicted_tokens or 0
        if predicted:
            load.learn_trust(predicted, cached_tokens)
        knowledge.compare(predicted, cached_tokens, is_reported=view.feed.is_live)
        if view.feed.is_live:
            knowledge.settle_later(self, now_s)
        else:
            self.settle()
            knowledge.assume(view, self._prompt)

    def release(self, now_s: float) -> None:
        """It is over, however it ended. May be called twice."""
        self._end_work(now_s)
        if not self._is_finished:
            self.settle()

    def settle(self) -> None:
        """What has not been reported by now is not there."""
        keys, self._keys = self._keys, None
        if keys is not None:
            self._knowledge.index.settle(self._view.holder, keys)

    def _end_work(self, now_s: float) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self._knowledge.num_errands -= 1
            self._view.load.end(self._choice.work_s, self._choice.uncached_tokens, now_s)
