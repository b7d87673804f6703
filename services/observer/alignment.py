"""Where two prompts differ, and which prompts are alike. Pure.

Two prompts that were made from the same text with another time stamp in it differ in a few
tokens, and agree again behind them. A prefix cache sees only that they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from services.core.tokens import BYTES_PER_TOKEN, TokenArray

Shingles: TypeAlias = npt.NDArray[np.uint64]

# Two prompts agree again where so many tokens in a row are the same. Fewer are common to
# any two chats: "<|im_end|>\n<|im_start|>assistant\n".
RUN_TOKENS = 16
# Longest text that changes. What is longer is another text, not a stamp in the same one.
MAX_SPAN_TOKENS = 192
MAX_SPANS = 16
# Of each prompt, by which it is compared with others; of short ones all runs, of others one
# in so many.
SHINGLED_TOKENS = 4096
SHORT_TOKENS = 512
ONE_IN = 8


class Difference(NamedTuple):
    """Tokens start..end of one prompt stand where other_start..other_end of the other do."""

    start: int
    end: int
    other_start: int
    other_end: int


class Alignment(NamedTuple):
    """Two prompts agree but for `differences` up to `end` and `other_end`, where they part."""

    differences: tuple[Difference, ...]
    end: int
    other_end: int

    @property
    def agreed_tokens(self) -> int:
        return self.end - sum(each.end - each.start for each in self.differences)

    def agreed_behind(self, token: int) -> int:
        """Of the first prompt, the tokens from `token` on that the other has too."""
        cut = sum(max(0, each.end - max(each.start, token)) for each in self.differences)
        return max(0, self.end - token - cut)

    def in_other(self, start: int, end: int) -> tuple[int, int]:
        """Where tokens start..end of the first prompt are in the other; both are aligned."""
        return self._start_in_other(start), self._end_in_other(end)

    def _start_in_other(self, token: int) -> int:
        shift = 0
        for each in self.differences:
            if token <= each.start:
                break
            if token < each.end:
                return each.other_start
            shift = each.other_end - each.end
        return token + shift

    def _end_in_other(self, token: int) -> int:
        """What stands there in the other prompt alone belongs to what ends there."""
        shift = 0
        for each in self.differences:
            if token < each.start:
                break
            if token <= each.end:
                return each.other_end
            shift = each.other_end - each.end
        return token + shift


def common_tokens(one: TokenArray, other: TokenArray) -> int:
    """How many from the start are the same."""
    most = min(len(one), len(other))
    unequal = one[:most] != other[:most]
    return int(unequal.argmax()) if unequal.any() else most


def align(one: TokenArray, other: TokenArray) -> Alignment:
    differences: list[Difference] = []
    start = other_start = common_tokens(one, other)
    while len(differences) < MAX_SPANS:
        found = _agree_again(one, start, other, other_start)
        if found is None:
            break
        differences.append(found)
        agreed = common_tokens(one[found.end :], other[found.other_end :])
        start, other_start = found.end + agreed, found.other_end + agreed
    return Alignment(tuple(differences), start, other_start)


def _agree_again(
    one: TokenArray, start: int, other: TokenArray, other_start: int
) -> Difference | None:
    """With the fewest tokens between, on both sides together."""
    places: dict[bytes, int] = {}
    for place, run in _runs(other, other_start):
        places.setdefault(run, place)
    best: Difference | None = None
    fewest = 2 * MAX_SPAN_TOKENS + 1
    for place, run in _runs(one, start):
        if place - start >= fewest:
            break
        there = places.get(run)
        if there is not None and place - start + there - other_start < fewest:
            fewest = place - start + there - other_start
            best = Difference(start, place, other_start, there)
    return best


def _runs(ids: TokenArray, start: int) -> Iterator[tuple[int, bytes]]:
    """Of RUN_TOKENS each, from each token on, as far as a span may reach."""
    packed = ids[start : start + MAX_SPAN_TOKENS + RUN_TOKENS].tobytes()
    size = RUN_TOKENS * BYTES_PER_TOKEN
    for begin in range(0, len(packed) - size + 1, BYTES_PER_TOKEN):
        yield start + begin // BYTES_PER_TOKEN, packed[begin : begin + size]


def shingles(ids: TokenArray) -> Shingles:
    """Hashes of some of its runs, chosen by what is in them: alike prompts have many in common."""
    ids = ids[:SHINGLED_TOKENS]
    num_runs = len(ids) - RUN_TOKENS + 1
    if num_runs < 1:
        return np.empty(0, np.uint64)
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    hashes = np.zeros(num_runs, np.uint64)
    for place in range(RUN_TOKENS):
        hashes *= np.uint64(0x100000001B3)
        hashes += mixed[place : place + num_runs]
    hashes ^= hashes >> np.uint64(32)
    if num_runs > SHORT_TOKENS:
        hashes = hashes[hashes % np.uint64(ONE_IN) == 0]
    return np.unique(hashes)
