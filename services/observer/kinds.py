"""What kind of text changes from prompt to prompt: a time stamp, a counter, a uuid. Pure.

Comparing prompts finds what changes; its form only gives that a name.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_TIME = r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?(\s?[AaPp]\.?[Mm]\b\.?)?"
_ZONE = r"(\s?(Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_MONTH = r"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DATE = (
    rf"(\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{4}}"
    rf"|{_MONTH}\s\d{{1,2}}(st|nd|rd|th)?(,?\s\d{{4}})?|\d{{1,2}}\.?\s{_MONTH}(\s\d{{4}})?)"
)
_TIME_STAMP = re.compile(
    rf"{_DATE}(\s?[T,@]?\s?(at\s)?{_TIME}{_ZONE}(\s\d{{4}}\b)?)?|(?<![\d:]){_TIME}{_ZONE}"
)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NUMBER = re.compile(r"\d+(\.\d+)?")
# Letters and digits, mixed as nobody writes them. Looked for at the beginning of each run alone:
# from each of its characters on, a long run of dashes would hold the interpreter for seconds.
_RANDOM = re.compile(r"(?<![A-Za-z0-9_-])(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{8,}")
_DAY_S = 86_400.0
# A stamp of now, in s, ms, µs or ns.
_EPOCH_UNITS = (1.0, 1e3, 1e6, 1e9)
EPOCH_WITHIN_S = 2 * _DAY_S
# From one prompt to the next, a counter grows by no more on average.
MAX_COUNTER_STEP = 1000
MIN_NONCE_DIGITS = 6
# Of what changes, the part that has the form: else it is text with a number in it.
MIN_SHARE = 0.3
# Of all sights, those that must have it.
MOST_SIGHTS = 0.8


class Kind(enum.StrEnum):
    TIME_STAMP = "time stamp"
    COUNTER = "counter"
    UUID = "uuid"
    NONCE = "random value"
    # Words, or what has no form that is known here.
    TEXT = "text"


class Sight(NamedTuple):
    """What one prompt has where prompts differ, with some of the text around it."""

    before: str
    text: str
    after: str
    seen_unix_s: float


class Form(NamedTuple):
    """What kind of text it is, and how it is found in the text around what changes."""

    kind: Kind
    pattern: re.Pattern[str] | None

    def locate(self, sight: Sight) -> tuple[int, int]:
        """Where it begins and ends in `before + text + after`: all of it, of which only a part
        may change. Where the form is missing, what changes."""
        match = _match(sight, self.pattern) if self.pattern is not None else None
        if match is not None:
            return match.span()
        return len(sight.before), len(sight.before) + len(sight.text)

    def cut_out(self, sight: Sight) -> str:
        """What has the form."""
        return (sight.before + sight.text + sight.after)[slice(*self.locate(sight))]


def name_form(sights: Sequence[Sight]) -> Form:
    """`sights`: of several prompts."""
    shown = _distinct(sights)
    for kind, pattern in (
        (Kind.UUID, _UUID),
        (Kind.TIME_STAMP, _TIME_STAMP),
        (Kind.NONCE, _RANDOM),
    ):
        num_matches = sum(_match(each, pattern) is not None for each in shown)
        if shown and num_matches >= MOST_SIGHTS * len(shown):
            return Form(kind, pattern)
    numbers = [(match[0], each) for each in shown if (match := _match(each, _NUMBER))]
    if shown and len(numbers) >= MOST_SIGHTS * len(shown):
        kind_of_numbers = _kind_of_numbers(*zip(*numbers, strict=True))
        if kind_of_numbers is not None:
            return Form(kind_of_numbers, _NUMBER)
    return Form(Kind.TEXT, None)


def _distinct(sights: Sequence[Sight]) -> list[Sight]:
    """One of each text, in the order of time. Prompts without the stamp all have one text there:
    what stands there instead, which has not its form."""
    counts = Counter(each.text for each in sights)
    [(usual, count)] = counts.most_common(1)
    by_text = {each.text: each for each in sights if each.text.strip()}
    if count > 1 and len(by_text) > 1 and not any(map(str.isdigit, usual)):
        by_text.pop(usual, None)
    return sorted(by_text.values(), key=lambda each: each.seen_unix_s)


def _match(sight: Sight, pattern: re.Pattern[str]) -> re.Match[str] | None:
    """The first one that has a part in what changes, and most of it."""
    whole = sight.before + sight.text + sight.after
    start, end = len(sight.before), len(sight.before) + len(sight.text)
    for match in pattern.finditer(whole):
        covered = min(end, match.end()) - max(start, match.start())
        if covered > 0 and covered >= MIN_SHARE * len(sight.text.strip()):
            return match
    return None


def _kind_of_numbers(numbers: Sequence[str], sights: Sequence[Sight]) -> Kind | None:
    if all(map(_is_epoch, numbers, sights)):
        return Kind.TIME_STAMP
    if not all(each.isdecimal() for each in numbers):
        return None
    values = [int(each) for each in numbers]
    steps = [after - before for before, after in itertools.pairwise(values)]
    # Equal ones are several prompts of one turn.
    if steps and min(steps) >= 0 and 0 < sum(steps) <= MAX_COUNTER_STEP * len(steps):
        return Kind.COUNTER
    if min(map(len, numbers)) >= MIN_NONCE_DIGITS:
        return Kind.NONCE
    return None


def _is_epoch(number: str, sight: Sight) -> bool:
    value = float(number)
    return any(abs(value / unit - sight.seen_unix_s) <= EPOCH_WITHIN_S for unit in _EPOCH_UNITS)
