"""A window as the rules read it: columns of its answered requests, and its workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from services.core import attributes
from services.core.ledger import Segment
from services.observer.doctor.finding import Clues
from services.observer.doctor.readings import ENGINE_BUSY, Readings
from services.observer.doctor.timeline import Coverage, Spans, merged
from services.observer.model import Request, Window
from services.observer.statistics import Floats, mean, quantile

# Fewer answered requests tell nothing.
MIN_REQUESTS = 20
# Of a prompt, so many tokens that were computed tell how fast the engine is.
MIN_TELLING_TOKENS = 64
MAX_TRACES = 5

Mask: TypeAlias = npt.NDArray[np.bool_]
CACHE_BLIND = frozenset(("round_robin", "random", "least_outstanding"))


class Moments(NamedTuple):
    """Of a request at the worker that answers it, by one clock."""

    arrived_s: float
    first_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One that answers requests, or computes prompts for those that do."""

    id: str
    for_prefill: bool
    # Requests that it answered, or whose prompts it computed.
    mask: Mask
    # When it computed prompts; and, of its requests, from there to their ends.
    prefilling: Spans
    active: Spans
    # From when to when it was there, as far as anything is known of it.
    alive_s: tuple[float, float]
    # Of the window's time. By the engine's own count, else by the requests.
    busy_share: float
    is_counted: bool

    @property
    def num_requests(self) -> int:
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Columns: one value for each of `requests`, those that were answered."""

    window: Window
    clues: Clues
    readings: Readings
    requests: tuple[Request, ...]
    ttft_s: Floats
    spent_s: Mapping[Segment, Floats]
    prompt_tokens: Floats
    cached_tokens: Floats
    worker_ids: npt.NDArray[np.object_]
    # Who computed the prompt: another one after a hand-off.
    prefill_ids: npt.NDArray[np.object_]
    # At the worker, on one clock.
    arrived_s: Floats
    first_s: Floats
    ended_s: Floats
    workers: tuple[WorkerFacts, ...]

    @classmethod
    def of(cls, window: Window, clues: Clues | None = None) -> Facts:
        answered = [each for each in window.requests if each.ttft_s is not None and not each.error]
        requests = tuple(sorted(answered, key=lambda each: each.arrived_unix_s))
        moments = [_moments(each, window.begin_unix_s) for each in requests]
        readings = Readings(window.readings)
        spent_s = {
            segment: _column(each.spent_s.get(segment, 0.0) for each in requests)
            for segment in Segment
        }
        first_s = _column(each.first_s for each in moments)
        ended_s = _column(each.ended_s for each in moments)
        worker_ids = _names(each.worker_id for each in requests)
        prefill_ids = _names(_prefill_id(each) for each in requests)
        prefilling = Spans(first_s - spent_s[Segment.PREFILL], first_s)
        return cls(
            window=window,
            clues=clues or Clues(),
            readings=readings,
            requests=requests,
            ttft_s=_column(each.ttft_s or 0.0 for each in requests),
            spent_s=spent_s,
            prompt_tokens=_column(each.prompt_tokens for each in requests),
            cached_tokens=_column(each.cached_tokens for each in requests),
            worker_ids=worker_ids,
            prefill_ids=prefill_ids,
            arrived_s=_column(each.arrived_s for each in moments),
            first_s=first_s,
            ended_s=ended_s,
            workers=tuple(_workers(window, readings, worker_ids, prefill_ids, prefilling, ended_s)),
        )

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def duration_s(self) -> float:
        return max(self.window.duration_s, 1e-9)

    @property
    def mean_ttft_s(self) -> float:
        """Above 0, since shares are of it: a file may say that no first token took any time."""
        return max(mean(self.ttft_s), 1e-9)

    @property
    def prefill_s(self) -> Floats:
        return self.spent_s[Segment.PREFILL]

    @property
    def waited_s(self) -> Floats:
        """For a worker, and at it for the engine."""
        return self.spent_s[Segment.QUEUE] + self.spent_s[Segment.PREFILL_QUEUE]

    @property
    def computed_tokens(self) -> Floats:
        return np.maximum(0.0, self.prompt_tokens - self.cached_tokens)

    @property
    def hit_rate(self) -> float:
        total = float(self.prompt_tokens.sum())
        return float(self.cached_tokens.sum()) / total if total else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """As requests met it, most often; 0 while nothing tells."""
        computed, spent_s = self.computed_tokens, self.prefill_s
        telling = (computed >= MIN_TELLING_TOKENS) & (spent_s > 0)
        rates = computed[telling] / spent_s[telling]
        return quantile(rates, 0.5) if rates.size else 0.0

    @property
    def alone_tokens_per_s(self) -> float:
        """Of prompts that had an engine nearly to themselves."""
        computed, spent_s = self.computed_tokens, self.prefill_s
        telling = (computed >= MIN_TELLING_TOKENS) & (spent_s > 0)
        rates = computed[telling] / spent_s[telling]
        return quantile(rates, 0.95) if rates.size else 0.0

    @property
    def answering(self) -> tuple[WorkerFacts, ...]:
        return tuple(each for each in self.workers if not each.for_prefill)

    @property
    def block_tokens(self) -> int:
        return int(self.config("mesh.block_tokens", 64))

    @property
    def strategies(self) -> set[str]:
        return {each.strategy for each in self.requests if each.strategy}

    @property
    def is_cache_blind(self) -> bool:
        """Requests are spread over several workers without a look at their caches."""
        strategies = self.strategies or {self.config("router.routing_strategy", "")}
        return len(self.answering) > 1 and strategies <= CACHE_BLIND and bool(strategies - {""})

    def config(self, key: str, default: Any = None) -> Any:
        return self.window.config.get(key, default)

    def column(self, values: Iterable[float]) -> Floats:
        return _column(values)

    def worst(self, values: Floats, *, of: Mask | None = None) -> tuple[str, ...]:
        """Trace ids of the largest values above 0."""
        masked = values if of is None else np.where(of, values, 0.0)
        order = np.argsort(masked, kind="stable")[::-1][:MAX_TRACES]
        return tuple(self.requests[index].trace_id for index in order if masked[index] > 0)


def _moments(request: Request, begin_unix_s: float) -> Moments:
    for hop in reversed(request.hops):
        is_here = hop.name == "worker.generate" and hop.member_id == request.worker_id
        if is_here and hop.first_token_s is not None:
            arrived_s = hop.arrived_unix_s - begin_unix_s
            return Moments(arrived_s, arrived_s + hop.first_token_s, arrived_s + hop.ended_s)
    arrived_s = request.arrived_unix_s - begin_unix_s
    return Moments(arrived_s, arrived_s + (request.ttft_s or 0.0), arrived_s + request.duration_s)


def _prefill_id(request: Request) -> str:
    if request.handed_off:
        for hop in request.hops:
            if hop.name == "worker.prefill":
                return hop.member_id
            if named := hop.attributes.get(attributes.KV_PREFILL_WORKER_ID):
                return str(named)
    return request.worker_id


def _workers(
    window: Window,
    readings: Readings,
    worker_ids: npt.NDArray[np.object_],
    prefill_ids: npt.NDArray[np.object_],
    prefilling: Spans,
    ended_s: Floats,
) -> Iterable[WorkerFacts]:
    counted = readings.per_s(ENGINE_BUSY)
    ids = {*worker_ids, *prefill_ids} - {""}
    # One that got nothing is there as well.
    ids |= {each.id for each in window.members if each.role == "worker" and each.state == "ready"}
    computing = {*prefill_ids} - {*worker_ids}
    answering_spans = Spans(
        np.where(prefill_ids == worker_ids, prefilling.begin_s, prefilling.end_s), ended_s
    )
    for name in sorted(ids):
        answers, computes = worker_ids == name, prefill_ids == name
        active = merged([answering_spans.where(answers), prefilling.where(computes)])
        for_prefill = name in computing or (name in counted and _is_prefill(window, name))
        covered = Coverage(active).union_s / max(window.duration_s, 1e-9)
        yield WorkerFacts(
            id=name,
            for_prefill=for_prefill,
            mask=computes if for_prefill else answers,
            prefilling=prefilling.where(computes),
            active=active,
            alive_s=_alive_s(name, window, readings, active),
            busy_share=min(1.0, counted.get(name, covered)),
            is_counted=name in counted,
        )


def _alive_s(name: str, window: Window, readings: Readings, active: Spans) -> tuple[float, float]:
    """One that is a member now and told nothing was there all the time."""
    told = [each for each in readings.series(ENGINE_BUSY) if each.member_id == name]
    begins = [*active.begin_s, *(each.times_s[0] - window.begin_unix_s for each in told)]
    ends = [*active.end_s, *(each.times_s[-1] - window.begin_unix_s for each in told)]
    is_here = not window.members or any(each.id == name for each in window.members)
    begin_s = float(min(begins)) if begins else 0.0
    return begin_s, window.duration_s if is_here or not ends else float(max(ends))


def _is_prefill(window: Window, name: str) -> bool:
    """It serves nothing else, as its member says."""
    return any(each.id == name and "for prefill" in each.detail for each in window.members)


def _column(values: Iterable[float]) -> Floats:
    return np.array([*values], np.float64)


def _names(values: Iterable[str]) -> npt.NDArray[np.object_]:
    names = [*values]
    column = np.empty(len(names), object)
    column[:] = names
    return column
