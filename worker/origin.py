"""Where a request's first token and its KV came from. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core import attributes as names
from services.core.ledger import Interval, Ledger, Segment
from services.runtime.protocol import spend_callee
from worker.messages import FirstTokenTimes, Token
from worker.stream import Arrival
from worker.tier import KvLoad


class Origin:
    """Filled in while the request runs."""

    def __init__(self) -> None:
        self.path = common_pb2.KvPath()
        self.cached_tokens = 0
        self.evaluated_prompt_tokens = 0
        self.handoff_ms = 0.0
        # Of speculation.
        self.drafted_tokens = self.accepted_tokens = 0
        # Sequences in the first step that had some of its prompt; 0: unknown.
        self.batch_size = 0
        # Of the core here, when it has sampled the first token itself.
        self.first: FirstTokenTimes | None = None
        self.load: KvLoad | None = None
        self._remote: worker_pb2.FirstToken | None = None
        self._called_s = 0.0
        self._before: tuple[Interval, ...] = ()
        self._same_clock = False
        self._first_s: float | None = None
        self._num_tokens = 0

    @property
    def first_token_s(self) -> float | None:
        """When it was passed on."""
        return self._first_s

    def hand_off(
        self,
        first: worker_pb2.FirstToken,
        *,
        before: Iterable[Interval],
        called_s: float,
        same_clock: bool,
    ) -> None:
        """Another worker has sampled the first token; it was called at `called_s`.

        `before`: how this worker came to the call. `same_clock`: the other is on this host,
        and its readings are comparable.
        """
        self.path.handed_off = True
        self._remote = first
        self._before = tuple(before)
        self._called_s = called_s
        self._same_clock = same_clock

    def note_load(self, load: KvLoad) -> None:
        """What became of a load out of the KV store."""
        self.load = load
        self.path.loaded_blocks = load.loaded_blocks
        self.path.expected_load_ms = load.expected_load_ms
        self.path.expected_compute_ms = load.expected_compute_ms
        self.path.load_ms = load.load_ms
        self.path.reason = "; ".join(filter(None, (self.path.reason, load.reason)))

    def tell_hidden(self, ledger: Ledger) -> None:
        """Once the load is over."""
        if self.load is not None:
            ledger.hide("prefetch", self.load.prefetch_s)
            ledger.hide("load", self.load.overlap_s)

    def note(self, arrival: Arrival, ledger: Ledger) -> None:
        """Tokens have come: the first brings its times, the second ends a hand-off."""
        if self._first_s is None:
            self._first_s = arrival.taken_s
            if self._remote is not None:
                self._record_remote(self._remote, ledger, arrival.taken_s)
            elif (first := arrival.tokens[0].first) is not None:
                self._record_local(first, ledger, arrival.taken_s)
        num_before, self._num_tokens = self._num_tokens, self._num_tokens + len(arrival.tokens)
        if num_before < 2 <= self._num_tokens and self._remote is not None:
            self._record_second(self._remote, arrival.tokens[1 - num_before], arrival.taken_s)

    def leave(self, ledger: Ledger, now_s: float) -> None:
        """The first token is on its way to whoever asked."""
        if self._first_s is not None:
            ledger.spend(Segment.TRANSFER, now_s - self._first_s)
        ledger.mark_first_token(now_s)

    def attributes(self) -> dict[str, Any]:
        """Of the span."""
        path = self.path
        found: dict[str, Any] = {
            names.CACHED_TOKENS: self.cached_tokens,
            names.EVALUATED_TOKENS: self.evaluated_prompt_tokens,
            names.HANDOFF_MS: self.handoff_ms,
            names.KV_HANDED_OFF: path.handed_off,
            names.KV_LOADED_BLOCKS: path.loaded_blocks,
            names.KV_EXPECTED_LOAD_MS: path.expected_load_ms,
            names.KV_EXPECTED_COMPUTE_MS: path.expected_compute_ms,
            names.KV_LOAD_MS: path.load_ms,
            names.KV_REASON: path.reason,
        }
        if self.batch_size:
            found[names.BATCH_SIZE] = self.batch_size
        if self.drafted_tokens:
            found[names.DRAFTED_TOKENS] = self.drafted_tokens
            found[names.ACCEPTED_TOKENS] = self.accepted_tokens
        if path.handed_off:
            found[names.KV_PREFILL_WORKER_ID] = path.prefill_worker_id
            found[names.KV_TRANSPORT] = path.transport
        if path.prefill_failed:
            found[names.KV_PREFILL_FAILED] = True
        return found

    def _record_second(self, first: worker_pb2.FirstToken, second: Token, taken_s: float) -> None:
        assert self._first_s is not None
        self.handoff_ms = (taken_s - self._first_s) * 1e3
        if self._same_clock:
            self.path.handoff_gap_ms = (second.began_s - first.evaluated_s) * 1e3

    def _record_local(self, first: FirstTokenTimes, ledger: Ledger, taken_s: float) -> None:
        self.first = first
        self.batch_size = first.batch_size
        self.cached_tokens = first.cached_tokens
        self.evaluated_prompt_tokens = first.evaluated_prompt_tokens
        record_core(ledger, first, taken_s)

    def _record_remote(self, first: worker_pb2.FirstToken, ledger: Ledger, taken_s: float) -> None:
        self.cached_tokens = first.usage.cached_tokens
        self.evaluated_prompt_tokens = first.usage.evaluated_prompt_tokens
        for interval in self._before:
            ledger.record(*interval)
        spend_callee(ledger, first.ledger, seen_s=taken_s - self._called_s)


def record_core(ledger: Ledger, first: FirstTokenTimes, taken_s: float) -> None:
    """Front and core are one hop: they share this machine's monotonic clock."""
    ledger.intervals += first.intervals
    for segment, spent_s in first.spent_s.items():
        ledger.spend(segment, spent_s)
    ledger.record(Segment.TRANSFER, first.sampled_s, taken_s)
