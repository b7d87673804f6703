"""Requests that hold each other up in one engine: prompts and answers, long and short. Pure.

Both come of what one engine step is given. Where both are there, the one is named that costs the
requests more of their time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.observer.doctor.facts import Facts, Mask
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.timeline import Coverage, Spans
from services.observer.doctor.words import at_least, ms, of_ttft, percent, times
from services.observer.statistics import Floats, mean, quantile, rank_correlation

# Answers of so many tokens have a pace.
MIN_ANSWER_TOKENS = 8
MIN_ANSWERS = 30
# Slowest twentieth against the pace without prompts beside, and how closely the one follows the
# other.
SLOWED, FOLLOWS = 3.0, 0.4
# Of an answer's time, at most, in which no prompt counts as one that disturbs.
CALM = 0.05
# A prompt that takes so many times as long as most, and so long, is a long one; they are few.
LONGER, LONG_S, FEW = 6.0, 0.1, 0.35
MIN_SQUEEZED = 10
# How much later others are beside a long prompt, and what that is of their mean TTFT.
SQUEEZED, SQUEEZED_SHARE = 2.0, 0.3


class Pace(NamedTuple):
    """Of answers: which have one, seconds a token, and prompts beside each."""

    answers: Mask
    tpot_s: Floats
    beside: Floats

    @property
    def calm_s(self) -> float:
        """Without prompts beside, or with as few as there are."""
        calm = self.tpot_s[self.beside <= max(CALM, quantile(self.beside, 0.1))]
        return quantile(calm, 0.5)

    @property
    def slow_s(self) -> float:
        return quantile(self.tpot_s, 0.95)

    @property
    def follows(self) -> float:
        return rank_correlation(self.beside, self.tpot_s)


class Squeeze(NamedTuple):
    long: Mask
    squeezed: Mask
    free: Mask
    # How much later each of the squeezed is.
    later_s: float


def interference(facts: Facts) -> Finding | Undecided | None:
    pace = pace_of(facts)
    if pace.tpot_s.size < MIN_ANSWERS or not pace.beside.any():
        return None
    slowed = pace.slow_s / max(pace.calm_s, 1e-9)
    if slowed < SLOWED or pace.follows < FOLLOWS:
        return None
    lost_s = _lost_pace_s(facts, pace)
    squeeze = squeeze_of(facts)
    if squeeze is not None and _lost_to_squeeze_s(squeeze) > float(lost_s[~squeeze.long].sum()):
        return None
    key = "worker.max_batch_tokens"
    before = facts.config(key)
    return Finding(
        cause=Cause.INTERFERENCE,
        summary=(
            "Answers slow down while prompts are computed beside them:"
            f" {ms(pace.slow_s)} a token at P95, {ms(pace.calm_s)} without."
        ),
        share=1 - pace.calm_s / max(mean(pace.tpot_s), pace.calm_s),
        evidence=(
            Evidence(
                "TPOT P95 / TPOT without prompts beside", times(slowed), at_least(times(SLOWED))
            ),
            Evidence(
                "rank correlation of TPOT and prompts beside",
                f"{pace.follows:.2f}",
                at_least(f"{FOLLOWS}"),
            ),
            Evidence("answers judged", str(pace.tpot_s.size), at_least(str(MIN_ANSWERS))),
        ),
        trace_ids=facts.worst(lost_s),
        setting=key,
        before=before,
        after=None if before is None else max(facts.config("worker.num_slots", 16), before // 4),
        expected=f"TPOT P95 toward {ms(pace.calm_s)}; prefill workers end it altogether",
    )


def long_prompts_squeeze(facts: Facts) -> Finding | Undecided | None:
    squeeze = squeeze_of(facts)
    if squeeze is None:
        return None
    pace = pace_of(facts)
    is_pace = pace.tpot_s.size >= MIN_ANSWERS and pace.follows >= FOLLOWS
    is_slowed = is_pace and pace.slow_s >= SLOWED * pace.calm_s
    if is_slowed:
        lost_s = _lost_pace_s(facts, pace)[~squeeze.long]
        if float(lost_s.sum()) >= _lost_to_squeeze_s(squeeze):
            return None
    explains_s = _lost_to_squeeze_s(squeeze) / facts.num_requests
    others = ~squeeze.long
    longest_s = quantile(facts.prefill_s[squeeze.long], 0.5)
    return Finding(
        cause=Cause.LONG_PROMPTS_SQUEEZE,
        summary=(
            f"{int(squeeze.long.sum())} long prompts ({ms(longest_s)} each) hold up"
            f" {int(squeeze.squeezed.sum())} others: {ms(squeeze.later_s)} later than the rest."
        ),
        explains_s=explains_s,
        share=min(1.0, explains_s / facts.mean_ttft_s),
        evidence=(
            Evidence("long prompts", f"{squeeze.long.sum()} of {facts.num_requests}"),
            Evidence(
                "TTFT beside a long prompt / else",
                times(mean(facts.ttft_s[squeeze.squeezed]) / mean(facts.ttft_s[squeeze.free])),
                at_least(times(SQUEEZED)),
            ),
            Evidence(
                "of the others' mean TTFT",
                percent(
                    squeeze.later_s * squeeze.squeezed.sum() / float(facts.ttft_s[others].sum())
                ),
                at_least(percent(SQUEEZED_SHARE)),
            ),
        ),
        trace_ids=facts.worst(facts.ttft_s, of=squeeze.squeezed),
        setting="worker.max_batch_tokens",
        before=facts.config("worker.max_batch_tokens"),
        after=None
        if facts.config("worker.max_batch_tokens") is None
        else max(
            facts.config("worker.num_slots", 16), facts.config("worker.max_batch_tokens") // 4
        ),
        expected=of_ttft(explains_s, facts.mean_ttft_s)
        + "; sent as batch, or to prefill workers, they hold up nobody",
    )


def pace_of(facts: Facts) -> Pace:
    answers = np.array(
        [
            each.tpot_s is not None and each.output_tokens >= MIN_ANSWER_TOKENS
            for each in facts.requests
        ]
    )
    tpot_s = facts.column(each.tpot_s or 0.0 for each in facts.requests)
    beside_s = np.zeros(facts.num_requests)
    answering = Spans(facts.first_s, facts.ended_s)
    for worker in facts.answering:
        here = facts.worker_ids == worker.id
        beside_s[here] = Coverage(worker.prefilling).union_within(answering.where(here))
    beside = beside_s / np.maximum(answering.lengths_s, 1e-9)
    return Pace(answers, tpot_s[answers], beside[answers])


def squeeze_of(facts: Facts) -> Squeeze | None:
    """None: there are no long prompts, or they hold up nobody."""
    typical_s = quantile(facts.prefill_s, 0.5)
    long = facts.prefill_s >= max(LONGER * typical_s, LONG_S)
    if not long.any() or mean(long.astype(np.float64)) > FEW:
        return None
    beside_s = np.zeros(facts.num_requests)
    waiting = Spans(facts.first_s - facts.ttft_s, facts.first_s)
    for worker in facts.workers:
        here = facts.prefill_ids == worker.id
        computing = Spans(facts.first_s - facts.prefill_s, facts.first_s).where(here & long)
        beside_s[here] = Coverage(computing).union_within(waiting.where(here))
    squeezed = ~long & (beside_s > 0.2 * facts.ttft_s)
    free = ~long & (beside_s == 0)
    if min(squeezed.sum(), free.sum()) < MIN_SQUEEZED:
        return None
    alone_s = mean(facts.ttft_s[free])
    later_s = mean(facts.ttft_s[squeezed]) - alone_s
    share = later_s * squeezed.sum() / float(facts.ttft_s[~long].sum())
    if later_s < (SQUEEZED - 1) * alone_s or share < SQUEEZED_SHARE:
        return None
    return Squeeze(long, squeezed, free, later_s)


def _lost_pace_s(facts: Facts, pace: Pace) -> Floats:
    """Of each request: what its answer lost."""
    tokens = facts.column(max(0, each.output_tokens - 1) for each in facts.requests)
    lost_s = np.zeros(facts.num_requests)
    lost_s[pace.answers] = np.maximum(0.0, pace.tpot_s - pace.calm_s) * tokens[pace.answers]
    return lost_s


def _lost_to_squeeze_s(squeeze: Squeeze) -> float:
    return float(squeeze.later_s * squeeze.squeezed.sum())
