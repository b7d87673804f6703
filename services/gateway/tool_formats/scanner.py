"""Reads text that comes in pieces, so that only the text matters and never where it was cut.

What needs more text is a generator that yields until there is more. What was taken for a
call is kept until the call is sure, so that it can still be given back as content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
# Yields where it needs more text.
Reading: TypeAlias = Generator[None, None, T]

SPACE = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SCALAR = re.compile(r"[^,}\]\s]+")


class Content(NamedTuple):
    text: str


class CallBegan(NamedTuple):
    """`call_index` counts the calls of an answer from 0."""

    call_index: int
    call_id: str
    name: str


class Arguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    call_index: int
    text: str


Event: TypeAlias = Content | CallBegan | Arguments


class Malformed(Exception):
    """It looked like a call and is none."""


class Enough(Exception):
    """No more calls are wanted."""


class Scanner:
    """`events` grows as the text is read; whoever reads them takes them out.

    With `stream_arguments`, a call is given as soon as its arguments begin.
    """

    def __init__(
        self, *, new_id: Callable[[], str], stream_arguments: bool, only_one: bool
    ) -> None:
        self.events: list[Event] = []
        self.num_calls = 0
        self.stream_arguments = stream_arguments
        self._new_id = new_id
        self._only_one = only_one
        self._text = ""
        self._at = 0
        self._ended = False
        self._taken: list[str] = []

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    def content_until(self, markers: Collection[str]) -> Reading[str | None]:
        """Gives content up to the first marker and takes that; None at the end of the text.

        White space before a marker belongs to it.
        """
        search = re.compile("|".join(map(re.escape, markers))).search
        while True:
            found = search(self._text, self._at)
            if found is not None:
                self._give_content(found.start())
                self._take(found.end())
                return found.group()
            if self._ended:
                self.events.append(Content(self._text[self._at :]))
                self._at = len(self._text)
                return None
            self._give_content(self._begun_marker(markers))
            yield

    def peek(self) -> Reading[str]:
        """The next character; empty at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in SPACE:
            self._take(self._at + 1)

    def literal(self, wanted: str) -> Reading[bool]:
        """Takes it if it is next."""
        while True:
            have = self._text[self._at : self._at + len(wanted)]
            if have == wanted:
                self._take(self._at + len(wanted))
                return True
            if self._ended or not wanted.startswith(have):
                return False
            yield

    def expect(self, wanted: str) -> Reading[None]:
        if not (yield from self.literal(wanted)):
            raise Malformed

    def closing(self, marker: str) -> Reading[None]:
        """Also where the answer ends before it, or within it."""
        if not (yield from self.literal(marker)):
            if not (self._ended and marker.startswith(self._text[self._at :])):
                raise Malformed
            self._take(len(self._text))

    def name(self) -> Reading[str]:
        name = yield from self._run_of(NAME)
        if not name:
            raise Malformed
        return name

    def value(self) -> Reading[str]:
        """The text of a JSON value, which need not be right inside."""
        if (yield from self.peek()) not in ("{", "[", '"'):
            return (yield from self._run_of(_SCALAR))
        parts: list[str] = []
        yield from self._nested(self._hold_in(parts))
        return "".join(parts)

    def arguments(self) -> Reading[None]:
        """Of the call that began last: an object, given as it comes."""
        yield from self._nested(self.give_arguments)

    def begin(self, name: str) -> None:
        """From now on it is a call: what was taken for it is not given back."""
        self.commit()
        self.events.append(CallBegan(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def end_call(self) -> None:
        """The call that began last is whole. Raises Enough."""
        self.commit()
        if self._only_one:
            raise Enough

    def give_arguments(self, text: str) -> None:
        self.events.append(Arguments(self.num_calls - 1, text))

    def give_back(self) -> None:
        self.events.append(Content("".join(self._taken)))
        self.commit()

    def commit(self) -> None:
        self._taken.clear()

    def _nested(self, give: Callable[[str], None]) -> Reading[None]:
        """An object, an array or a string, to its end."""
        extent = _Extent()
        while not extent.is_whole:
            if not (yield from self.peek()):
                raise Malformed
            end = extent.advance(self._text, self._at)
            give(self._text[self._at : end])
            self._at = end

    def _hold_in(self, parts: list[str]) -> Callable[[str], None]:
        def hold(text: str) -> None:
            parts.append(text)
            self._taken.append(text)

        return hold

    def _run_of(self, pattern: re.Pattern[str]) -> Reading[str]:
        parts = []
        while (yield from self.peek()) and (found := pattern.match(self._text, self._at)):
            parts.append(found.group())
            self._take(found.end())
        return "".join(parts)

    def _take(self, end: int) -> None:
        self._taken.append(self._text[self._at : end])
        self._at = end

    def _give_content(self, end: int) -> None:
        """Up to `end`, without the white space at its end."""
        text = self._text[self._at : end].rstrip(SPACE)
        if text:
            self.events.append(Content(text))
            self._at += len(text)

    def _begun_marker(self, markers: Collection[str]) -> int:
        """Where the text's end may be the beginning of a marker."""
        longest = max(map(len, markers)) - 1
        for start in range(max(self._at, len(self._text) - longest), len(self._text)):
            if any(marker.startswith(self._text[start:]) for marker in markers):
                return start
        return len(self._text)


class _Extent:
    """Where a JSON object, array or string ends, by its brackets and quotes alone."""

    def __init__(self) -> None:
        self.is_whole = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def advance(self, text: str, at: int) -> int:
        """The end of what belongs to it."""
        while not self.is_whole and at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            self._meet(found.group())
        return at

    def _meet(self, character: str) -> None:
        match character:
            case "\\":
                self._is_escaped = True
            case '"':
                self._in_string = not self._in_string
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
        self.is_whole = not self._depth and not self._in_string
