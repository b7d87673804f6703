"""What would have happened: a record of decisions, sent again through a virtual mesh.

What a replay cannot know it takes as it was: of each request the time that neither waiting
nor an engine took, of a real engine how fast it was. Caches begin empty.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from services.core import config as mesh_config
from services.core.config import defaults, flatten, nest
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.core.workload import Arrival
from services.simulation.faults import Death
from services.simulation.mesh import MeshPlan, replay
from services.simulation.recorded import Recorded, Recording, WorkerRecord
from services.simulation.router import Outcome, Timing

# Of a real engine, prompts of which so much was computed tell how fast it is.
MIN_TELLING_TOKENS = 64
# A replay that differs by no more is taken for faithful: of the hit rate, and of TTFT's median.
HIT_POINTS, TTFT_SHARE = 2.0, 0.1
_SIMULATED = "simulated"


class Summary(NamedTuple):
    """Of the requests that were answered; times in milliseconds."""

    requests: int
    answered: int
    # Of their prompts' tokens, those found in a cache.
    hit_rate: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    # Prompt tokens computed by the busiest worker, over the mean of all.
    busiest_worker: float


class Spell(NamedTuple):
    """A worker that is there from one time to another; its end may be infinite."""

    begin_s: float
    end_s: float


def recorded(recording: Recording) -> Summary:
    """What did happen."""
    answered = [each for each in recording.requests if not each.error]
    work: Counter[str] = Counter()
    for each in answered:
        work[each.worker] += each.evaluated_tokens
    return _summary(
        len(recording.requests),
        [each.arrival for each in answered],
        cached=[each.cached_tokens for each in answered],
        ttft_s=[each.ttft_s for each in answered],
        tpot_s=[each.tpot_s for each in answered if not math.isnan(each.tpot_s)],
        work=[work[worker.id] for worker in _workers(recording)],
    )


def replayed(
    recording: Recording, changes: Mapping[str, Any] | None = None, num_workers: int | None = None
) -> Summary:
    """With `changes` of settings, and so many workers instead of those that were there.

    Raises InvalidArgument where there is nothing to replay, or a change cannot be.
    """
    if not recording.requests:
        raise InvalidArgument.of(recording.name, "has no request that got as far as a prompt")
    spells = [Spell(0.0, math.inf)] * num_workers if num_workers else worker_spells(recording)
    plan = MeshPlan(
        config=_config(recording, changes or {}),
        num_workers=len(spells),
        timing=Timing(hop_s=0.0),
        faults=tuple(_absences(spells)),
    )
    done = replay(_arrivals(recording), plan)
    overheads_s = _filled([each.overhead_s for each in recording.requests])
    answered = [
        (outcome, overhead_s)
        for outcome, overhead_s in zip(done.outcomes, overheads_s, strict=True)
        if not outcome.error
    ]
    outcomes: list[Outcome] = [outcome for outcome, _ in answered]
    return _summary(
        len(recording.requests),
        [outcome.arrival for outcome in outcomes],
        cached=[outcome.cached_tokens for outcome in outcomes],
        ttft_s=[outcome.ttft_s + overhead_s for outcome, overhead_s in answered],
        tpot_s=[outcome.tpot_s for outcome in outcomes if outcome.arrival.output_tokens > 1],
        work=[totals.uncached_tokens for totals in done.workers.values()],
    )


def is_faithful(was: Summary, again: Summary) -> bool:
    points = 100 * abs(was.hit_rate - again.hit_rate)
    return points <= HIT_POINTS and abs(again.ttft_p50_ms - was.ttft_p50_ms) <= (
        TTFT_SHARE * was.ttft_p50_ms
    )


def caveats(recording: Recording) -> Iterator[str]:
    """What makes a replay differ from what was, for people."""
    if recording.sample < 1:
        yield f"only a share of {recording.sample:g} of the requests was recorded"
    if recording.num_dropped:
        yield f"{recording.num_dropped} requests are missing: the disk was too slow"
    if recording.num_without_prompt:
        yield f"{recording.num_without_prompt} requests were refused before their prompt was read"
    if recording.is_cut:
        yield "the last line is cut: the router ended abruptly"
    if recording.num_settings_changes:
        yield "settings changed meanwhile; the replay keeps those of the start"
    if (older := _older_share(recording)) >= 0.001:
        yield (
            f"{older:.1%} of the prompt tokens were found in caches, and nothing recorded had"
            " brought them: they are older than the record, or were answers. A replay computes them"
        )
    if recording.settings.get("worker.engine") != _SIMULATED:
        yield "speeds are those measured in the record: a replay has no model of the engine"
    if any(each.role == "prefill" for each in _everyone(recording)):
        yield "prefill workers are left out: the others compute all prompts"
    if len({each[1:] for each in _workers(recording)}) > 1:
        yield "the workers differ; the replay makes them all like most of them"


def worker_spells(recording: Recording) -> list[Spell]:
    """For each place that a worker had, one after the other, when somebody was there.

    A place that is taken again counts as two. Raises InvalidArgument when there is none.
    """
    open_since: dict[str, float] = {}
    spells: list[Spell] = []
    for at_s, workers in recording.memberships:
        now = {each.id for each in workers if each.role != "prefill"}
        for gone in open_since.keys() - now:
            spells.append(Spell(open_since.pop(gone), at_s))
        for new in now - open_since.keys():
            open_since[new] = at_s
    spells += (Spell(begin_s, math.inf) for begin_s in open_since.values())
    if not spells:
        raise InvalidArgument.of(recording.name, "no worker was ready in it: use --workers")
    return sorted(spell for spell in spells if spell.begin_s < spell.end_s)


def _absences(spells: Iterable[Spell]) -> Iterator[Death]:
    for number, (begin_s, end_s) in enumerate(spells):
        if begin_s > 0:
            yield Death(0.0, number, begin_s)
        if end_s < math.inf:
            yield Death(end_s, number)


def _arrivals(recording: Recording) -> Iterator[Arrival]:
    """Of answers that came to nothing the length is not known: they are like most others."""
    known = [each.arrival.output_tokens for each in recording.requests if not each.error]
    typical = max(1, round(statistics.median(known))) if known else 1
    for each in recording.requests:
        yield each.arrival._replace(output_tokens=each.arrival.output_tokens or typical)


def _config(recording: Recording, changes: Mapping[str, Any]) -> MeshConfig:
    known = defaults()
    kept = {key: value for key, value in recording.settings.items() if key in known}
    workers = _workers(recording)
    typical = Counter(worker[2:] for worker in workers).most_common(1)
    if typical:
        (num_slots, num_blocks, max_context_tokens), _ = typical[0]
        kept |= {"worker.num_slots": num_slots, "worker.max_context_tokens": max_context_tokens}
        if kept.get("worker.engine") != _SIMULATED:
            # Beside what such an engine keeps for reuse, it has room for what runs.
            running = num_slots * -(-max_context_tokens // recording.block_tokens)
            kept |= measured(recording.requests)
            kept["worker.simulated.num_blocks"] = num_blocks + running
    kept["worker.engine"] = _SIMULATED
    return mesh_config.parse(nest({**flatten(MeshConfig()), **kept, **changes}))


def measured(requests: Iterable[Recorded]) -> dict[str, Any]:
    """The timing model of an engine that is not simulated, as settings of one that is."""
    answered = [each for each in requests if not each.error]
    rates = [
        each.evaluated_tokens / each.prefill_s
        for each in answered
        if each.evaluated_tokens >= MIN_TELLING_TOKENS and each.prefill_s > 0
    ]
    tpots_s = [each.tpot_s for each in answered if not math.isnan(each.tpot_s)]
    found: dict[str, Any] = {
        "worker.simulated.decode_step_ms_per_seq": 0.0,
        "worker.simulated.transfer_gb_per_s": 1e6,
    }
    if rates:
        found["worker.simulated.prefill_tokens_per_s"] = statistics.median(rates)
    if tpots_s:
        found["worker.simulated.decode_step_ms"] = statistics.median(tpots_s) * 1e3
    return found


def _everyone(recording: Recording) -> set[WorkerRecord]:
    return {each for membership in recording.memberships for each in membership.workers}


def _workers(recording: Recording) -> list[WorkerRecord]:
    """Those that answered requests."""
    return sorted(each for each in _everyone(recording) if each.role != "prefill")


def _older_share(recording: Recording) -> float:
    """Of all prompt tokens, those found in caches that no earlier prompt here had."""
    seen: set[bytes] = set()
    older = total = 0
    for each in recording.requests:
        chain = each.arrival.chain
        num_seen = next((i for i, key in enumerate(chain) if key not in seen), len(chain))
        older += max(0, each.cached_tokens - num_seen * recording.block_tokens)
        total += each.arrival.prompt_tokens
        seen.update(chain)
    return older / total if total else 0.0


def _filled(values: Sequence[float]) -> list[float]:
    """With the median where there is none."""
    known = [value for value in values if not math.isnan(value)]
    typical = statistics.median(known) if known else 0.0
    return [typical if math.isnan(value) else value for value in values]


def _summary(
    requests: int,
    arrivals: Sequence[Arrival],
    *,
    cached: Sequence[int],
    ttft_s: Sequence[float],
    tpot_s: Sequence[float],
    work: Sequence[int],
) -> Summary:
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    ttft_ms = sorted(value * 1e3 for value in ttft_s)
    mean_work = statistics.fmean(work) if work else 0.0
    return Summary(
        requests=requests,
        answered=len(arrivals),
        hit_rate=sum(cached) / prompt_tokens if prompt_tokens else 0.0,
        ttft_mean_ms=statistics.fmean(ttft_ms) if ttft_ms else math.nan,
        ttft_p50_ms=_quantile(ttft_ms, 0.5),
        ttft_p95_ms=_quantile(ttft_ms, 0.95),
        ttft_p99_ms=_quantile(ttft_ms, 0.99),
        tpot_mean_ms=statistics.fmean(tpot_s) * 1e3 if tpot_s else math.nan,
        busiest_worker=max(work) / mean_work if mean_work else math.nan,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
