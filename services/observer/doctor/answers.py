"""How answers are computed, and what the mesh costs for them. Pure."""

from __future__ import annotations

import numpy as np

from services.observer.doctor.facts import Facts
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.readings import ENGINE_BUSY
from services.observer.doctor.words import at_least, at_most, ms, percent
from services.observer.statistics import Floats, mean, quantile

# A token that takes so long is slow.
SLOW_TPOT_S = 0.025
# So few sequences run at once, most often.
SMALL_BATCH = 4
# In the time of one token of an answer, so many of a prompt could be computed: what is read
# (weights) takes the time, not what is computed.
MEMORY_BOUND_TOKENS = 256
# Twice the sequences, and no more than this much longer a token.
FLAT = 0.25
MIN_ANSWERS = 20
# Drafts of which less is accepted, and an answer at least so much faster, to pay.
MIN_ACCEPTED, MIN_GAIN = 0.4, 0.05
MIN_DRAFTED = 200
# Engines busy for less, all workers together, and at their busiest.
IDLE_SHARE, IDLE_PEAK = 0.1, 0.35
LONG_WINDOW_S = 120.0


def memory_bound_decode(facts: Facts) -> Finding | Undecided | None:
    answers = [each for each in facts.requests if each.tpot_s and each.output_tokens > 4]
    if len(answers) < MIN_ANSWERS:
        return None
    tpot_s = facts.column(each.tpot_s or 0.0 for each in answers)
    batch = facts.column(each.batch_size for each in answers)
    calm_s, typical = quantile(tpot_s, 0.25), quantile(batch, 0.5)
    if calm_s < SLOW_TPOT_S or typical > SMALL_BATCH:
        return None
    rate = facts.alone_tokens_per_s
    if not rate:
        return Undecided(Cause.MEMORY_BOUND_DECODE, "how fast prompts are computed")
    in_its_time = calm_s * rate
    growth = _growth(tpot_s, batch)
    if in_its_time < MEMORY_BOUND_TOKENS or growth > FLAT:
        return None
    return Finding(
        cause=Cause.MEMORY_BOUND_DECODE,
        summary=(
            f"A token takes {ms(calm_s)} with {typical:.0f} sequences at once: reading the weights"
            " takes that time, whatever the batch."
        ),
        share=1 - 1 / max(1.0, in_its_time / MEMORY_BOUND_TOKENS),
        evidence=(
            Evidence("TPOT, lower quartile", ms(calm_s), at_least(ms(SLOW_TPOT_S))),
            Evidence("sequences at once, median", f"{typical:.0f}", at_most(str(SMALL_BATCH))),
            Evidence(
                "prompt tokens computed in the time of a token",
                f"{in_its_time:.0f}",
                at_least(str(MEMORY_BOUND_TOKENS)),
            ),
            Evidence("TPOT's growth per doubled batch", percent(growth), at_most(percent(FLAT))),
        ),
        trace_ids=tuple(
            answers[index].trace_id for index in np.argsort(tpot_s, kind="stable")[::-1][:5]
        ),
        expected="larger batches on fewer workers cost no TPOT; smaller weights lower it",
    )


def speculation_does_not_pay(facts: Facts) -> Finding | Undecided | None:
    drafted = facts.column(each.drafted_tokens for each in facts.requests)
    if not drafted.any():
        return None
    accepted = facts.column(each.accepted_tokens for each in facts.requests)
    total = float(drafted.sum())
    if total < MIN_DRAFTED:
        needs = f"at least {MIN_DRAFTED} drafted tokens"
        return Undecided(Cause.SPECULATION_DOES_NOT_PAY, needs)
    share = float(accepted.sum()) / total
    paced = np.array([each.tpot_s is not None for each in facts.requests])
    tpot_s = facts.column(each.tpot_s or 0.0 for each in facts.requests)
    with_it, without = tpot_s[paced & (drafted > 0)], tpot_s[paced & (drafted == 0)]
    # Tokens that come all at once have no pace.
    compared = min(with_it.size, without.size) >= MIN_ANSWERS and quantile(without, 0.5) > 0
    gain = 1 - quantile(with_it, 0.5) / quantile(without, 0.5) if compared else None
    if gain is None and share >= MIN_ACCEPTED:
        needs = f"{MIN_ANSWERS} answers without speculation to compare with"
        return Undecided(Cause.SPECULATION_DOES_NOT_PAY, needs)
    if gain is not None and gain >= MIN_GAIN:
        return None
    comparison = "nothing to compare with" if gain is None else f"TPOT {percent(-gain)} longer"
    if gain is not None and gain > 0:
        comparison = f"TPOT only {percent(gain)} shorter"
    return Finding(
        cause=Cause.SPECULATION_DOES_NOT_PAY,
        summary=(
            f"Of {total:.0f} drafted tokens {percent(share)} are accepted; {comparison} with it."
        ),
        share=1 - share,
        evidence=(
            Evidence("accepted / drafted", percent(share), at_least(percent(MIN_ACCEPTED))),
            Evidence(
                "TPOT saved",
                "not enough evidence" if gain is None else percent(gain),
                at_least(percent(MIN_GAIN)),
            ),
        ),
        trace_ids=facts.worst(drafted - accepted),
        setting="worker.max_draft_tokens",
        before="on",
        after="0",
        expected="the verifying of drafts saved"
        if gain is None
        else f"TPOT from {ms(quantile(with_it, 0.5))} to {ms(quantile(without, 0.5))}",
    )


def healthy_but_costly(facts: Facts) -> Finding | Undecided | None:
    workers = facts.workers
    if len(workers) < 2 or not facts.num_requests:
        return None
    busy = mean([each.busy_share for each in workers])
    if busy > IDLE_SHARE:
        return None
    if facts.duration_s < LONG_WINDOW_S:
        return Undecided(Cause.COSTLY, f"a window of {LONG_WINDOW_S:.0f} s")
    peak = _peak(facts)
    if peak > IDLE_PEAK:
        return None
    needed = max(1, -(-int(len(workers) * max(peak, 2 * busy) * 100) // 60))
    if needed >= len(workers):
        return None
    return Finding(
        cause=Cause.COSTLY,
        summary=f"{len(workers)} workers are {percent(busy)} busy: {needed} would do.",
        share=1 - busy,
        evidence=(
            Evidence("engines busy", percent(busy), at_most(percent(IDLE_SHARE))),
            Evidence("at their busiest", percent(peak), at_most(percent(IDLE_PEAK))),
        ),
        setting="number of workers",
        before=len(workers),
        after=needed,
        expected="the same TTFT at less cost",
    )


def _growth(tpot_s: Floats, batch: Floats) -> float:
    """How much longer a token takes when twice as many sequences run; 0 where batches are alike."""
    logs = np.log2(np.maximum(batch, 1.0))
    if logs.std() < 0.25:
        return 0.0
    slope = float(np.polyfit(logs, tpot_s, 1)[0])
    return max(0.0, slope / float(tpot_s.mean()))


def _peak(facts: Facts) -> float:
    """Of all workers together, in the busiest tenth of the time."""
    by_time: dict[int, list[float]] = {}
    for series in facts.readings.series(ENGINE_BUSY):
        points = zip(series.times_s[1:], series.steps_per_s, strict=False)
        for at_s, share in points:
            by_time.setdefault(int(at_s // 10), []).append(share)
    if not by_time:
        return max((each.busy_share for each in facts.workers), default=0.0)
    return quantile([mean(shares) for shares in by_time.values()], 0.9)
