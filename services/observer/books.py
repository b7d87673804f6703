"""All that the observer knows, and what it does with what it hears."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firsttoken.control.v1 import control_pb2
from firsttoken.observer.v1 import observer_pb2
from services.core.config import Snapshot
from services.core.errors import InvalidArgument
from services.core.metrics import Labels, Metric
from services.observer.effects import Effects
from services.observer.hearing import (
    MAX_DROPPED,
    MAX_LEVEL,
    MAX_SECONDS,
    Teller,
    read_eviction,
    read_hops,
    read_prompt,
)
from services.observer.history import History
from services.observer.mesh_state import Configurations, to_member
from services.observer.metrics import Metrics, Sender
from services.observer.model import BubbleSum, Member, Reading, Request, Window
from services.observer.prompts import PromptStore
from services.observer.requests import Assembly, Settled
from services.observer.sampling import TailRule
from services.observer.series import Family
from services.observer.window import RecentBubbles, RecentReadings, RecentRequests

if TYPE_CHECKING:
    from services.observer.explained_spans import ExplainedSpans


class Books:
    """Filled by what processes tell, read by whoever asks. It lives on one event loop."""

    def __init__(self, snapshot: Snapshot, spans: ExplainedSpans | None) -> None:
        settings = snapshot.config.observer
        window_s = settings.window_minutes * 60
        self.requests = RecentRequests(window_s=window_s, max_requests=settings.max_requests)
        self.readings = RecentReadings(window_s=window_s)
        self.bubbles = RecentBubbles(window_s=window_s)
        self.history = History()
        self.effects = Effects()
        self.metrics = Metrics()
        self.prompts = PromptStore()
        self.configurations = Configurations()
        self._generation = snapshot.generation
        self.members: tuple[Member, ...] = ()
        self._assembly = Assembly()
        self._tail = TailRule(slow_ttft_s=settings.slow_ttft_ms / 1e3)
        self._spans = spans
        self._block_tokens = snapshot.config.mesh.block_tokens
        self.model = snapshot.config.mesh.model
        self.shows_text = settings.show_text
        self.key_hashes = frozenset(settings.key_hashes.split())
        # Of the smallest worker; None: there is none.
        self.cache_blocks: int | None = None
        self._begin_unix_s = time.time()
        # By member; what those told that have left stays in the sum.
        self._num_dropped: dict[str, int] = {}

    @property
    def num_dropped(self) -> int:
        return sum(self._num_dropped.values())

    def configure(self, snapshot: Snapshot) -> None:
        settings = snapshot.config.observer
        self._tail.slow_ttft_s = settings.slow_ttft_ms / 1e3
        self.metrics.configure(
            slo_ttft_s=settings.slo_ttft_ms / 1e3, block_tokens=snapshot.config.mesh.block_tokens
        )
        self._generation = snapshot.generation
        self.shows_text = settings.show_text
        self.key_hashes = frozenset(settings.key_hashes.split())
        self.effects.add_generation(self.configurations.take(snapshot, time.time()))

    def update_members(self, members: Sequence[control_pb2.Member]) -> None:
        blocks = [each.worker.num_blocks for each in members if each.worker.num_blocks]
        self.cache_blocks = min(blocks, default=None)
        self.members = tuple(map(to_member, members))
        self.metrics.set_members(self.members, self._generation)

    def hear(self, teller: Teller, message: observer_pb2.ReportRequest) -> None:
        """Raises InvalidArgument for what makes no sense."""
        now_s, now_unix_s = time.monotonic(), time.time()
        for batch in message.hops_json:
            for hop in read_hops(batch, teller):
                self._assembly.hear(hop, now_s)
        for info in message.metrics:
            self.metrics.describe(Metric(info.name, info.unit, info.text, info.counts))
        for sample in message.samples:
            labels = tuple(sorted(sample.labels.items()))
            self._read(teller, sample.name, labels, sample.value, now_unix_s)
        for told in message.bubbles:
            if not 0 <= told.duration_s <= MAX_SECONDS:
                continue
            bubble = BubbleSum(now_unix_s, teller.member_id, told.stage, told.duration_s)
            self.bubbles.add(bubble)
            self.metrics.add_bubble(bubble)
        for prompt in message.prompts:
            self._hear_prompt(prompt, now_unix_s)
        for eviction in message.evictions:
            keys = read_eviction(eviction)
            of_store = teller.service == "kvstore"
            self.prompts.hear_evictions(eviction.holder_id, keys, now_unix_s, of_store=of_store)
        if message.num_dropped:
            num_dropped = min(message.num_dropped, MAX_DROPPED)
            self._num_dropped[teller.member_id] = num_dropped
            self.metrics.set_dropped(Sender(teller.service, teller.member_id), num_dropped)

    def tick(self) -> None:
        """To be called some times a second."""
        now_s, now_unix_s = time.monotonic(), time.time()
        for settled in self._assembly.settle(now_s):
            self._settle(settled, now_s)
        self.requests.expire(now_s)
        self.readings.expire(now_unix_s)
        self.bubbles.expire(now_unix_s)

    def close(self) -> None:
        """Nobody tells anything more."""
        now_s = time.monotonic()
        for settled in self._assembly.settle_all():
            self._settle(settled, now_s)

    def families(self) -> list[Family]:
        """All metrics, with their values now."""
        return self.metrics.families(time.time())

    def window(self) -> Window:
        now_unix_s = time.time()
        return Window(
            begin_unix_s=max(self._begin_unix_s, now_unix_s - self.requests.window_s),
            end_unix_s=now_unix_s,
            requests=tuple(self.requests),
            readings=tuple(self.readings),
            bubbles=tuple(self.bubbles),
            members=self.members,
            generations=self.configurations.generations,
            config=self.configurations.flat,
            num_dropped=self.num_dropped,
        )

    def _read(
        self, teller: Teller, name: str, labels: Labels, value: float, now_unix_s: float
    ) -> None:
        reading = Reading(now_unix_s, teller.member_id, teller.service, name, labels, value)
        if abs(value) <= MAX_LEVEL:  # nothing can be worked out with others
            self.readings.add(reading)
        self.metrics.hear(reading)

    def _hear_prompt(self, told: observer_pb2.Prompt, now_unix_s: float) -> None:
        prompt = read_prompt(told)
        try:
            self.prompts.hear(prompt, now_unix_s)
        except ValueError as error:
            raise InvalidArgument.of("prompts", str(error)) from None

    def _settle(self, settled: Settled, now_s: float) -> None:
        """Late hops share the fate of those that came in time."""
        joined = self.requests.join(settled.trace_id, settled.hops, now_s)
        for request in joined.new:
            self.history.add(request, time.time())
            self.metrics.add(request)
            self.effects.add(request)
        kept = [request for request in joined.new if self._tail.keep(request)]
        kept += [request for request in joined.completed if self._tail.would_keep(request)]
        spans = {hop.span_id for request in kept for hop in request.hops}
        exported = [hop for hop in settled.hops if hop.sampled or hop.span_id in spans]
        if self._spans is not None and exported:
            missed = [request for request in joined.new if self._has_missed(request)]
            self._spans.export(
                exported, frozenset(hop.span_id for request in missed for hop in request.hops)
            )

    def _has_missed(self, request: Request) -> bool:
        """The last token is computed in any case, and so is what is no full block."""
        size = self._block_tokens
        return max(0, request.prompt_tokens - 1) // size > request.cached_tokens // size

    def check_integrity(self) -> None:
        self._assembly.check_integrity()
        self.requests.check_integrity()
