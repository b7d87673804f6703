"""Prompts that were made from one text, and the places where they change. Pure.

Each prompt is compared with two others: the one most like it, and the first one that is like
it. So what changes in all prompts of a family is found at one place, in its first prompt,
and is cut out of all of them in the same way.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from services.core.tokens import TokenArray
from services.observer.alignment import Alignment, align, shingles

MOST_FAMILIES = 512
# A run of tokens that more families have says little: it counts for the first ones.
FAMILIES_PER_RUN = 4
# Prompts are alike with so many tokens in common, or with such a share: a few sentences are
# in prompts that are not.
ALIKE_TOKENS, ALIKE_SHARE = 48, 0.15
# Of a prompt, behind what it shares with its family: with more, it begins one of its own too.
OWN_TOKENS = 256
# Places that are closer to each other are one.
CLOSE_TOKENS = 4


class Site(NamedTuple):
    """A place that changes: tokens start..end of its family's first prompt."""

    family: int
    start: int
    end: int


class Span(NamedTuple):
    """Tokens start..end of one prompt, which are at `site`."""

    site: Site
    start: int
    end: int
    # Of the prompt, behind `end`, what others have too; up to the next place that changes.
    agreed_behind: int


class _Member(NamedTuple):
    prompt: int
    # From the family's first prompt to this one.
    alignment: Alignment


class _Family:
    def __init__(self, prompt: int, token_ids: TokenArray) -> None:
        self.prompt = prompt
        self.token_ids = token_ids
        self.members: list[_Member] = []

    def sites(self, number: int) -> list[Site]:
        """Where any member differs, and agrees again behind: joined where they touch."""
        intervals = sorted(
            (each.start, each.end)
            for member in self.members
            for each in member.alignment.differences
        )
        sites: list[Site] = []
        for start, end in intervals:
            if sites and start <= sites[-1].end + CLOSE_TOKENS:
                sites[-1] = sites[-1]._replace(end=max(end, sites[-1].end))
            else:
                sites.append(Site(number, start, end))
        return sites


def find_spans(prompts: Sequence[TokenArray], *, block_tokens: int) -> list[list[Span]]:
    """Of each prompt, in its order. Without a span, at least one prompt of its family has a block
    of `block_tokens` more in common with others: else nothing more could be reused."""
    spans: list[list[Span]] = [[] for _ in prompts]
    for number, family in enumerate(_gather(prompts, block_tokens)):
        sites = family.sites(number)
        first = [(site, site.start, site.end) for site in sites]
        reach = max((member.alignment.end for member in family.members), default=0)
        places = {family.prompt: _spans(first, reach)}
        for member in family.members:
            reach = member.alignment.end
            inside = [site for site in sites if site.end <= reach and site.start < reach]
            there = [(site, *member.alignment.in_other(site.start, site.end)) for site in inside]
            places[member.prompt] = _spans(there, member.alignment.other_end)
        kept = _worthwhile(places, block_tokens)
        for prompt, found in places.items():
            spans[prompt] += [span for span in found if span.site in kept]
    return [_without_overlaps(each) for each in spans]


def cut(token_ids: TokenArray, spans: Iterable[Span]) -> bytes:
    """Packed, without them. They may overlap."""
    pieces, start = [], 0
    for span in spans:
        pieces.append(token_ids[start : max(start, span.start)].tobytes())
        start = max(start, span.end)
    return b"".join((*pieces, token_ids[start:].tobytes()))


def _gather(prompts: Sequence[TokenArray], block_tokens: int) -> list[_Family]:
    families: list[_Family] = []
    having: dict[int, list[int]] = {}
    for number, token_ids in enumerate(prompts):
        runs = shingles(token_ids).tolist()
        votes = Counter(itertools.chain.from_iterable(having.get(run, ()) for run in runs))
        reach = 0
        for chosen in _likest_and_first(votes, len(runs), len(token_ids)):
            alignment = align(families[chosen].token_ids, token_ids)
            if alignment.agreed_tokens >= block_tokens:
                families[chosen].members.append(_Member(number, alignment))
                reach = max(reach, alignment.other_end)
        if (not reach or len(token_ids) - reach >= OWN_TOKENS) and len(families) < MOST_FAMILIES:
            for run in runs:
                known = having.setdefault(run, [])
                if len(known) < FAMILIES_PER_RUN:
                    known.append(len(families))
            families.append(_Family(number, token_ids))
    return families


def _likest_and_first(votes: Counter[int], num_runs: int, num_tokens: int) -> Sequence[int]:
    """Of the families that have most of the prompt's runs in common with it."""
    enough = num_runs * min(ALIKE_TOKENS / num_tokens, ALIKE_SHARE)
    alike = [family for family, count in votes.items() if count >= enough]
    if not alike:
        return ()
    return tuple(dict.fromkeys((max(alike, key=lambda each: (votes[each], -each)), min(alike))))


def _spans(places: Sequence[tuple[Site, int, int]], reach: int) -> list[Span]:
    """`reach`: up to where the prompt is like its family's first."""
    if not places:
        return []
    ends = [*(start for _, start, _ in places[1:]), reach]
    return [
        Span(site, start, end, max(0, until - end))
        for (site, start, end), until in zip(places, ends, strict=True)
    ]


def _worthwhile(places: Mapping[int, Sequence[Span]], block_tokens: int) -> set[Site]:
    """Those without which another whole block agrees, in any prompt, if all that change go."""
    kept = set()
    for spans in places.values():
        behind = sum(span.agreed_behind for span in spans)
        before = spans[0].start if spans else 0
        for span in spans:
            if before % block_tokens + behind >= block_tokens:
                kept.add(span.site)
            before += span.agreed_behind
            behind -= span.agreed_behind
    return kept


def _without_overlaps(spans: list[Span]) -> list[Span]:
    """Two families may have found one place: the wider one stays."""
    kept: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, each.start - each.end)):
        if kept and span.start < kept[-1].end:
            continue
        if kept and span.start == kept[-1].start and span.end == kept[-1].end:
            continue
        kept.append(span)
    return kept
