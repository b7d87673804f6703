"""Answers that change when the numbers they are computed with do. Pure.

No one here knows whether an answer is good. Its length, and how much of a draft is accepted,
follow from the model's distribution: where they move with a change of precision, and prompts
have not, so has that.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from services.observer.doctor.facts import Facts
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.words import percent
from services.observer.model import Generation, Request
from services.observer.statistics import mann_whitney, mean

PRECISION = re.compile(r"kv_type|dtype|precision|quanti[sz]|mesh\.model$")
MIN_EACH = 40
# Chance of such a difference without a cause, and how far the samples are apart.
SURE, APART = 0.001, 0.1


class _Change(NamedTuple):
    generation: Generation
    key: str
    before: tuple[Request, ...]
    after: tuple[Request, ...]


def quality_drift(facts: Facts) -> Finding | Undecided | None:
    change = _precision_change(facts)
    if change is None:
        return None
    if min(len(change.before), len(change.after)) < MIN_EACH:
        needs = f"{MIN_EACH} answers before and after {change.key} changed"
        return Undecided(Cause.QUALITY_DRIFT, needs)
    prompts = mann_whitney(*_of(change, "prompt_tokens"))
    if prompts.p < SURE and abs(prompts.superiority - 0.5) > APART:
        needs = f"like prompts before and after {change.key} changed: they differ in length"
        return Undecided(Cause.QUALITY_DRIFT, needs)
    lengths = mann_whitney(*_of(change, "output_tokens"))
    accepted = [_acceptance(each) for each in (change.before, change.after)]
    has_moved = lengths.p < SURE and abs(lengths.superiority - 0.5) > APART
    is_less = _is_less(*accepted)
    if not has_moved and not is_less:
        return None
    old, new = change.generation.changes[change.key]
    first, second = (mean(each) for each in _of(change, "output_tokens"))
    return Finding(
        cause=Cause.QUALITY_DRIFT,
        summary=(
            f"Since {change.key} is {new} (was {old}), answers differ: {first:.0f} tokens long on"
            f" average before, {second:.0f} now. Compare their quality."
        ),
        share=2 * abs(lengths.superiority - 0.5),
        evidence=(
            Evidence(
                "answers longer than before, in pairs",
                percent(lengths.superiority),
                f"{100 * APART:.0f} points from 50 %",
            ),
            Evidence("by chance (Mann-Whitney)", f"p = {lengths.p:.2g}", f"below {SURE}"),
            *_accepted(accepted),
        ),
        trace_ids=tuple(each.trace_id for each in change.after[:5]),
        setting=change.key,
        before=new,
        after=old,
    )


def _precision_change(facts: Facts) -> _Change | None:
    """The last one."""
    for generation in sorted(facts.window.generations, reverse=True, key=lambda each: each.number):
        for key in generation.changes:
            if PRECISION.search(key):
                before = tuple(r for r in facts.requests if r.generation < generation.number)
                after = tuple(r for r in facts.requests if r.generation >= generation.number)
                return _Change(generation, key, before, after)
    return None


def _of(change: _Change, field: str) -> tuple[list[float], list[float]]:
    before, after = (
        [float(getattr(each, field)) for each in requests]
        for requests in (change.before, change.after)
    )
    return before, after


def _acceptance(requests: tuple[Request, ...]) -> float | None:
    drafted = sum(each.drafted_tokens for each in requests)
    return sum(each.accepted_tokens for each in requests) / drafted if drafted else None


def _accepted(shares: list[float | None]) -> tuple[Evidence, ...]:
    before, after = shares
    if before is None or after is None:
        return ()
    value = f"{percent(before)}, {percent(after)}"
    return (Evidence("accepted of drafts, before and after", value),)


def _is_less(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before - APART
