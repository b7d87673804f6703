"""What changes in one prompt from request to request, found by comparing it with its like. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from services.core.tokens import TokenArray
from services.observer.alignment import Alignment, align, common_tokens, shingles
from services.observer.kinds import Form, Kind, Sight, name_form
from services.observer.past import Past, shared_blocks
from services.observer.prompts import KeptPrompt
from services.observer.spelling import Spelling

# Looked at, the latest first; and compared token by token, those most alike.
MOST_CANDIDATES = 256
MOST_COMPARED = 12
# Text on each side of what changes.
CONTEXT_TOKENS = 24


class Change(NamedTuple):
    """Tokens start..end of a prompt differ from those of all that were compared."""

    start: int
    end: int
    # Of the prompt, behind `end`: what another one has too.
    agreed_behind: int
    # Prompts that have something else here, and how many different values all have.
    num_compared: int
    num_values: int
    # Further places behind it that change.
    num_more: int
    sights: tuple[Sight, ...]
    form: Form | None

    @property
    def kind(self) -> Kind:
        return Kind.TEXT if self.form is None else self.form.kind


class _Compared(NamedTuple):
    past: Past
    token_ids: TokenArray
    alignment: Alignment


def most_alike(token_ids: TokenArray, others: Sequence[Past]) -> list[Past]:
    """Those that have most in common with the prompt, wherever in it."""
    own = shingles(token_ids)
    scored = []
    for number, past in enumerate(others[-MOST_CANDIDATES:]):
        shared = len(np.intersect1d(own, shingles(past.prompt.token_ids), assume_unique=True))
        if shared:
            scored.append((shared, number, past))
    scored.sort(key=lambda each: each[:2], reverse=True)
    return [past for _, _, past in scored[:MOST_COMPARED]]


def find_change(
    past: Past, at: int, others: Sequence[Past], spelling: Spelling | None
) -> Change | None:
    """What changes at token `at`, where the prompt of `past` leaves all earlier ones.

    `others`: alike. None: nothing does, for none of them agrees with it again behind.
    """
    token_ids = past.prompt.token_ids
    found = []
    for other in others:
        other_ids = other.prompt.token_ids
        alignment = align(token_ids, other_ids)
        if any(each.start <= at < each.end for each in alignment.differences):
            found.append(_Compared(other, other_ids, alignment))
    if not found:
        return None
    spans = [
        each
        for compared in found
        for each in compared.alignment.differences
        if each.start <= at < each.end
    ]
    start, end = min(each.start for each in spans), max(each.end for each in spans)
    found = [each for each in found if each.alignment.end >= end]
    best = max(found, key=lambda each: each.alignment.agreed_behind(end))
    behind = best.alignment.agreed_behind(end)
    values = {token_ids[start:end].tobytes()}
    for each in found:
        there = slice(*each.alignment.in_other(start, end))
        values.add(each.token_ids[there].tobytes())
    sights = _sights(past, start, end, found, spelling)
    return Change(
        start,
        end,
        behind,
        len(found),
        len(values),
        sum(each.start >= end for each in best.alignment.differences),
        sights,
        name_form(sights) if sights else None,
    )


def nearest(prompt: KeptPrompt, others: Sequence[Past]) -> tuple[Past | None, int]:
    """The one with the longest common start, and how many tokens that is; the latest of equals."""
    shared = [shared_blocks(prompt.contents, past.prompt.contents) for past in others]
    most_blocks = max(shared, default=0)
    near = [past for past, num in zip(others, shared, strict=True) if num == most_blocks]
    token_ids = prompt.token_ids
    best, most = None, most_blocks * prompt.block_tokens
    for past in near[-MOST_CANDIDATES:]:
        tokens = common_tokens(token_ids, past.prompt.token_ids)
        if tokens and tokens >= most:
            best, most = past, tokens
    return best, most


def sight(
    token_ids: TokenArray, start: int, end: int, seen_unix_s: float, spelling: Spelling
) -> Sight:
    return Sight(
        spelling.text(token_ids[max(0, start - CONTEXT_TOKENS) : start]),
        spelling.text(token_ids[start:end]),
        spelling.text(token_ids[end : end + CONTEXT_TOKENS]),
        seen_unix_s,
    )


def _sights(
    past: Past, start: int, end: int, found: Sequence[_Compared], spelling: Spelling | None
) -> tuple[Sight, ...]:
    """The prompt's own first."""
    if spelling is None:
        return ()
    sights = [sight(past.prompt.token_ids, start, end, past.arrived_s, spelling)]
    for each in found:
        there = each.alignment.in_other(start, end)
        sights.append(sight(each.token_ids, *there, each.past.arrived_s, spelling))
    return tuple(sights)
