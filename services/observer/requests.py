"""From hops to requests. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.core import attributes as names
from services.observer.model import Hop, Request

# The outermost first: what a request may begin with.
REQUEST_HOPS = ("gateway.request", "router.generate", "worker.generate")
# Processes tell now and then, so that of a request's end all have told that long after.
GRACE_S = 2.0
# The longest that a request may run: its first hops wait that long for the others.
ORPHANED_S = 900.0
MAX_TRACES = 20_000
MAX_HOPS = 256
# Nothing that is counted comes near it, and sums of many still fit what JSON takes.
MAX_NUMBER = 1e12


class Settled(NamedTuple):
    trace_id: str
    # Without those of an earlier time.
    hops: tuple[Hop, ...]


@dataclass(slots=True)
class _Waiting:
    heard_s: float
    hops: list[Hop] = field(default_factory=list)


class Assembly:
    """Hops that wait for the others of their trace. Times are of one monotonic clock."""

    def __init__(self) -> None:
        # Those with a hop that a request may end with, and those that have none yet.
        self._ending: OrderedDict[str, _Waiting] = OrderedDict()
        self._running: OrderedDict[str, _Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ending) + len(self._running)

    def hear(self, hop: Hop, now_s: float) -> None:
        trace_id = hop.trace_id
        waiting = self._ending.get(trace_id)
        if waiting is None and hop.name in REQUEST_HOPS and not _awaits_router(hop):
            before = self._running.pop(trace_id, None)
            waiting = _Waiting(now_s, before.hops if before else [])
            self._ending[trace_id] = waiting
        elif waiting is None:
            waiting = self._running.setdefault(trace_id, _Waiting(now_s))
        if len(waiting.hops) < MAX_HOPS:
            waiting.hops.append(hop)
        while len(self._running) > MAX_TRACES:
            self._running.popitem(last=False)

    def settle(self, now_s: float) -> Iterator[Settled]:
        """Traces that have waited for long enough."""
        for traces, patience_s in ((self._ending, GRACE_S), (self._running, ORPHANED_S)):
            while traces and now_s - next(iter(traces.values())).heard_s >= patience_s:
                trace_id, waiting = traces.popitem(last=False)
                yield Settled(trace_id, tuple(waiting.hops))

    def settle_all(self) -> Iterator[Settled]:
        """Those that wait as well."""
        return self.settle(math.inf)

    def check_integrity(self) -> None:
        assert not self._ending.keys() & self._running.keys()
        assert len(self._running) <= MAX_TRACES
        for traces in (self._ending, self._running):
            heard_s = [waiting.heard_s for waiting in traces.values()]
            assert heard_s == sorted(heard_s)
            for trace_id, waiting in traces.items():
                assert 0 < len(waiting.hops) <= MAX_HOPS
                assert {hop.trace_id for hop in waiting.hops} == {trace_id}


def _awaits_router(hop: Hop) -> bool:
    """A worker is done, and its router may not be for long: after a failure another worker goes
    on, and a client may read slowly. Who is cancelled is so because the caller ends.
    """
    has_caller = hop.name == "worker.generate" and bool(hop.parent_span_id)
    return has_caller and hop.attributes.get(names.ERROR_TYPE) != "CANCELLED"


def assemble(hops: Iterable[Hop]) -> list[Request]:
    """The requests of a trace, in the order of their arrival.

    A client may put several into one. What is below no request (a prompt that was encoded for
    its own sake) is none.
    """
    by_span = {hop.span_id: hop for hop in hops}
    children: dict[str, list[Hop]] = defaultdict(list)
    roots: list[Hop] = []
    for hop in sorted(by_span.values(), key=lambda hop: hop.arrived_unix_s):
        if hop.parent_span_id in by_span and hop.parent_span_id != hop.span_id:
            children[hop.parent_span_id].append(hop)
        elif hop.name in REQUEST_HOPS:
            roots.append(hop)
    return [_request(root, _below(root, children)) for root in roots]


def _below(root: Hop, children: Mapping[str, Sequence[Hop]]) -> tuple[Hop, ...]:
    """All of them, level by level. Hops in a ring have no root, and are not met."""
    found = [root]
    for hop in found:
        found += children.get(hop.span_id, ())
    return tuple(found)


class _Attributes:
    """Of all hops: the outermost hop's, and of several at one level the last one's, count."""

    def __init__(self, hops: Sequence[Hop]) -> None:
        merged: dict[str, Any] = {}
        for hop in sorted(hops, key=lambda hop: _RANKS.get(hop.name, len(_RANKS)), reverse=True):
            merged |= hop.attributes
        self._merged = merged

    def text(self, name: str) -> str:
        value = self._merged.get(name, "")
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> float:
        return self.maybe_number(name) or 0.0

    def count(self, name: str) -> int:
        return int(self.number(name))

    def maybe_number(self, name: str) -> float | None:
        value = self._merged.get(name)
        return value if isinstance(value, float | int) and 0 <= value <= MAX_NUMBER else None

    def flag(self, name: str) -> bool:
        return self._merged.get(name) is True


_RANKS = {name: rank for rank, name in enumerate((*REQUEST_HOPS, "worker.prefill"))}


def _request(root: Hop, hops: tuple[Hop, ...]) -> Request:
    found = _Attributes(hops)
    tpot_ms, predicted = (
        found.maybe_number(names.TPOT_MS),
        found.maybe_number(names.PREDICTED_TOKENS),
    )
    return Request(
        trace_id=root.trace_id,
        hops=hops,
        arrived_unix_s=root.arrived_unix_s,
        ttft_s=root.first_token_s,
        duration_s=root.ended_s,
        spent_s=root.spent_s,
        residual_s=root.residual_s,
        hidden_s=_hidden_s(hops),
        handoff_s=found.number(names.HANDOFF_MS) / 1e3,
        tpot_s=None if tpot_ms is None else tpot_ms / 1e3,
        model=found.text(names.MODEL),
        tenant=found.text(names.TENANT),
        request_class=found.text(names.REQUEST_CLASS),
        generation=found.count(names.GENERATION),
        worker_id=found.text(names.WORKER_ID),
        engine=found.text(names.ENGINE),
        strategy=found.text(names.STRATEGY),
        prompt_tokens=found.count(names.INPUT_TOKENS),
        output_tokens=found.count(names.OUTPUT_TOKENS),
        cached_tokens=found.count(names.CACHED_TOKENS),
        predicted_tokens=None if predicted is None else int(predicted),
        best_elsewhere_tokens=found.count(names.BEST_ELSEWHERE_TOKENS),
        loaded_blocks=found.count(names.KV_LOADED_BLOCKS),
        expected_load_s=found.number(names.KV_EXPECTED_LOAD_MS) / 1e3,
        expected_compute_s=found.number(names.KV_EXPECTED_COMPUTE_MS) / 1e3,
        load_s=found.number(names.KV_LOAD_MS) / 1e3,
        handed_off=found.flag(names.KV_HANDED_OFF),
        queue_position=found.count(names.QUEUE_POSITION),
        batch_size=found.count(names.BATCH_SIZE),
        attempts=found.count(names.ATTEMPTS),
        migrations=found.count(names.MIGRATIONS),
        drafted_tokens=found.count(names.DRAFTED_TOKENS),
        accepted_tokens=found.count(names.ACCEPTED_TOKENS),
        error=root.error,
    )


def _hidden_s(hops: Iterable[Hop]) -> dict[str, float]:
    """A hop may know of the hidden work below it: the most that any tells."""
    most: dict[str, float] = {}
    for hop in hops:
        for name, spent_s in hop.hidden_s.items():
            most[name] = max(most.get(name, 0.0), spent_s)
    return most
