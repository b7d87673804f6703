"""Work that lies on the wrong workers, or on one that is slow. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.core.ledger import Segment
from services.observer.doctor.facts import Facts
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.words import at_least, ms, of_ttft, percent, times
from services.observer.statistics import Floats, mean, quantile

MIN_SHARE, MIN_EXPLAINED_S = 0.15, 0.005
# The busiest worker's work, in means; and its wait, in those of the others.
SKEWED, WAITS_LONGER = 1.4, 2.0
MIN_LATER_S = 0.015
# A worker that computes prompts so many times slower than most is slow.
SLOWER = 1.6
MIN_TOLD, MIN_OTHERS, MIN_TOKENS = 8, 5, 32
# Few prompts are enough where the difference is so large.
MUCH_SLOWER, FEW_TOLD = 4.0, 3
# Of two kinds of workers, the busy one and how many times busier it is.
BUSY, BUSIER, FULL = 0.5, 1.5, 0.8


def skewed_routing(facts: Facts) -> Finding | Undecided | None:
    workers = facts.answering
    if len(workers) < 2 or _slow(facts):
        return None
    work_s = {each.id: float(each.active.lengths_s.sum()) for each in workers}
    average_s = mean([*work_s.values()])
    busiest = max(work_s, key=lambda each: work_s[each])
    if not average_s or work_s[busiest] < SKEWED * average_s:
        return None
    loaded = {name for name, value in work_s.items() if value > average_s}
    there = np.isin(facts.worker_ids.astype(str), sorted(loaded))
    # The router's queue is for all workers.
    waits_s = facts.spent_s[Segment.PREFILL_QUEUE] + _crowded_s(facts)
    elsewhere_s = mean(waits_s[~there])
    lost_s = np.where(there, np.maximum(0.0, waits_s - elsewhere_s), 0.0)
    explains_s = mean(lost_s)
    is_longer = mean(waits_s[there]) >= WAITS_LONGER * elsewhere_s
    if not is_longer or explains_s < max(MIN_SHARE * facts.mean_ttft_s, MIN_EXPLAINED_S):
        return None
    if explains_s < MIN_LATER_S:
        return None
    key, before, after = _spread(facts)
    idle = [name for name, value in work_s.items() if not value]
    return Finding(
        cause=Cause.SKEWED_ROUTING,
        summary=(
            f"{busiest} has {times(work_s[busiest] / average_s)} the work of the average worker:"
            f" requests wait {ms(mean(waits_s[there]))} there, {ms(elsewhere_s)} elsewhere."
        ),
        explains_s=explains_s,
        share=min(1.0, explains_s / facts.mean_ttft_s),
        evidence=(
            Evidence(
                "busiest worker / mean", times(work_s[busiest] / average_s), at_least(times(SKEWED))
            ),
            Evidence(
                "mean wait there, and elsewhere",
                f"{ms(mean(waits_s[there]))}, {ms(elsewhere_s)}",
                at_least(times(WAITS_LONGER)),
            ),
            *((Evidence("workers without a request", ", ".join(idle)),) * bool(idle)),
        ),
        trace_ids=facts.worst(lost_s),
        setting=key,
        before=before,
        after=after,
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def slow_worker(facts: Facts) -> Finding | Undecided | None:
    slow = _slow(facts)
    if not slow:
        return None
    name = max(slow, key=lambda each: slow[each])
    there = np.isin(facts.prefill_ids.astype(str), sorted(slow))
    lost_s = np.where(there, np.maximum(0.0, facts.ttft_s - mean(facts.ttft_s[~there])), 0.0)
    explains_s = mean(lost_s)
    if explains_s < max(0.1 * facts.mean_ttft_s, MIN_EXPLAINED_S):
        return None
    return Finding(
        cause=Cause.SLOW_WORKER,
        summary=(f"{name} takes {times(slow[name])} as long for a prompt as the other workers do."),
        explains_s=explains_s,
        share=min(1.0, explains_s / facts.mean_ttft_s),
        evidence=(
            Evidence(
                "its prefill / others', of equal prompts",
                times(slow[name]),
                at_least(times(SLOWER)),
            ),
            Evidence("requests there", f"{there.sum()} of {facts.num_requests}"),
        ),
        trace_ids=facts.worst(lost_s),
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def wrong_pd_ratio(facts: Facts) -> Finding | Undecided | None:
    prefill = [each for each in facts.workers if each.for_prefill]
    decode = facts.answering
    if not prefill or not decode:
        return None
    busy_p, busy_d = (mean([each.busy_share for each in kind]) for kind in (prefill, decode))
    handed_off = np.array([each.handed_off for each in facts.requests])
    inside_s, queue_s = (
        facts.spent_s[segment] for segment in (Segment.PREFILL_QUEUE, Segment.QUEUE)
    )
    at_prefill_s, queue_s = np.where(handed_off, inside_s, 0.0), queue_s + inside_s
    least_s = max(MIN_SHARE * facts.mean_ttft_s, MIN_EXPLAINED_S)
    # A decode worker is busy with one answer as with many: only waiting says that it is full.
    is_prefill = busy_p >= FULL and mean(at_prefill_s) >= least_s
    is_prefill |= busy_p >= BUSY and busy_p >= BUSIER * busy_d
    is_decode = not is_prefill and busy_d >= BUSY and busy_d >= BUSIER * busy_p
    lost_s = at_prefill_s if is_prefill else queue_s
    explains_s = mean(lost_s)
    if not (is_prefill or is_decode) or explains_s < least_s:
        return None
    if is_prefill and busy_d >= FULL and mean(facts.spent_s[Segment.QUEUE]) > explains_s:
        return None
    busy, free = (busy_p, busy_d) if is_prefill else (busy_d, busy_p)
    before = f"{len(prefill)}:{len(decode)}"
    after = _ratio(busy_p * len(prefill), busy_d * len(decode), len(prefill) + len(decode))
    which = "prefill" if is_prefill else "decode"
    return Finding(
        cause=Cause.WRONG_PD_RATIO,
        summary=(
            f"{which.capitalize()} workers are {percent(busy)} busy and keep requests waiting; the"
            f" others are {percent(free)} busy."
        ),
        explains_s=explains_s,
        share=min(1.0, explains_s / facts.mean_ttft_s),
        evidence=(
            Evidence(f"{which} workers busy", percent(busy), at_least(percent(BUSY))),
            Evidence("busier than the others", times(busy / max(free, 1e-3)), times(BUSIER)),
            Evidence("mean wait for them", ms(explains_s), at_least(percent(MIN_SHARE))),
        ),
        trace_ids=facts.worst(lost_s),
        setting="prefill to decode workers",
        before=before,
        after=after if after != before else None,
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def _crowded_s(facts: Facts) -> Floats:
    """How much longer a prompt is in the engine than it would be alone: others share its steps."""
    rate = facts.alone_tokens_per_s
    if not rate:
        return np.zeros(facts.num_requests)
    return np.maximum(0.0, facts.prefill_s - facts.computed_tokens / rate)


def slowness(facts: Facts) -> dict[str, float]:
    """By worker of which enough is known: how long its prompts take, in times of the others'.

    Prompts of about equal length are compared.
    """
    telling = (facts.computed_tokens >= MIN_TOKENS) & (facts.prefill_s > 0)
    sizes = np.floor(2 * np.log2(np.maximum(facts.computed_tokens, 1.0)))
    ratios: dict[str, list[float]] = {each.id: [] for each in facts.workers}
    for size in np.unique(sizes[telling]):
        alike = telling & (sizes == size)
        for worker in facts.workers:
            here = facts.prefill_ids == worker.id
            others_s = facts.prefill_s[alike & ~here]
            if others_s.size >= MIN_OTHERS:
                ratios[worker.id] += list(facts.prefill_s[alike & here] / quantile(others_s, 0.5))
    found = {name: quantile(each, 0.5) for name, each in ratios.items()}
    return {
        name: ratio
        for name, ratio in found.items()
        if len(ratios[name]) >= (FEW_TOLD if ratio >= MUCH_SLOWER else MIN_TOLD)
    }


def _slow(facts: Facts) -> dict[str, float]:
    """Those, fewer than half, that are slower than the others."""
    found = slowness(facts)
    slow = {name: ratio for name, ratio in found.items() if ratio >= SLOWER}
    return slow if len(slow) <= len(found) / 2 else {}


def _spread(facts: Facts) -> tuple[str, object, object]:
    strategies = facts.strategies
    if strategies == {"prefix_aware"}:
        threshold = facts.config("router.concurrency_threshold")
        if threshold is not None and threshold > 1:
            return "router.concurrency_threshold", threshold, max(1, threshold // 4)
    if strategies and strategies != {"kv_aware"}:
        return "router.routing_strategy", ", ".join(sorted(strategies)), "kv_aware"
    return "", None, None


def _ratio(prefill_work: float, decode_work: float, num_workers: int) -> str:
    """How many of each would be equally busy with that work."""
    counts: Sequence[int] = range(1, num_workers)
    best = min(
        counts,
        key=lambda count: max(prefill_work / count, decode_work / (num_workers - count)),
    )
    return f"{best}:{num_workers - best}"
