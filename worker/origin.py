"""Where a request's first token and its KV came from. Pure."""

from __future__ import annotations

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.ledger import Ledger, Segment
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
        # Of the core here, when it has sampled the first token itself.
        self.first: FirstTokenTimes | None = None
        self.load: KvLoad | None = None
        self._remote: worker_pb2.FirstToken | None = None
        self._called_s = 0.0
        self._submitted_s = 0.0
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
        submitted_s: float,
        called_s: float,
        same_clock: bool,
    ) -> None:
        """Another worker has sampled the first token; it was called at `called_s`.

        `same_clock`: it is on this host, and its readings are comparable.
        """
        self.path.handed_off = True
        self._remote = first
        self._submitted_s = submitted_s
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

    def note(self, arrival: Arrival, ledger: Ledger) -> None:
        """Tokens have come: the first brings its times, the second ends a hand-off."""
        if self._first_s is None:
            self._first_s = arrival.received_s
            if self._remote is not None:
                self._record_remote(self._remote, ledger, arrival.received_s)
            elif (first := arrival.tokens[0].first) is not None:
                self._record_local(first, ledger, arrival.received_s)
        num_before, self._num_tokens = self._num_tokens, self._num_tokens + len(arrival.tokens)
        if num_before < 2 <= self._num_tokens and self._remote is not None:
            self._record_second(self._remote, arrival.tokens[1 - num_before], arrival.received_s)

    def _record_second(
        self, first: worker_pb2.FirstToken, second: Token, received_s: float
    ) -> None:
        assert self._first_s is not None
        self.handoff_ms = (received_s - self._first_s) * 1e3
        if self._same_clock:
            self.path.handoff_gap_ms = (second.began_s - first.evaluated_s) * 1e3

    def _record_local(self, first: FirstTokenTimes, ledger: Ledger, received_s: float) -> None:
        self.first = first
        self.cached_tokens = first.cached_tokens
        self.evaluated_prompt_tokens = first.evaluated_prompt_tokens
        record_core(ledger, first, received_s)

    def _record_remote(
        self, first: worker_pb2.FirstToken, ledger: Ledger, received_s: float
    ) -> None:
        self.cached_tokens = first.usage.cached_tokens
        self.evaluated_prompt_tokens = first.usage.evaluated_prompt_tokens
        # Until the call there was no KV room here for what was to come.
        ledger.record(Segment.PREFILL_QUEUE, self._submitted_s, self._called_s)
        spend_callee(ledger, first.ledger, seen_s=received_s - self._called_s)


def record_core(ledger: Ledger, first: FirstTokenTimes, received_s: float) -> None:
    """Front and core are one hop: they share this machine's monotonic clock."""
    loaded_s = first.sampled_s - first.prefill_s
    started_s = loaded_s - first.kv_load_s
    ledger.record(Segment.PREFILL_QUEUE, started_s - first.prefill_queue_s, started_s)
    ledger.record(Segment.KV_LOAD, started_s, loaded_s)
    ledger.record(Segment.PREFILL, loaded_s, first.sampled_s)
    ledger.record(Segment.TRANSFER, first.sampled_s, received_s)
