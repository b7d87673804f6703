"""Lines of a trace file, with every field looked at before it is used.

Whatever is wrong is an InvalidArgument that names the file, the line and the field.
"""

from __future__ import annotations

import difflib
import gzip
import io
import json
import math
import reprlib
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from services.core.errors import InvalidArgument
from services.core.workload import MAX_DURATION_S, MAX_GAP_S

Span: TypeAlias = tuple[int, int]

# Far above any real prompt; a chain of such a length still fits in memory.
MAX_COUNT = 1 << 24
# Of a file, unpacked. An hour of a busy cluster is some ten million.
MAX_BYTES = 1 << 29
_GZIP_MAGIC = b"\x1f\x8b"


class Place(NamedTuple):
    """Where in a file something lies, for people. Lines count from 1."""

    file: str
    line: int

    def refuse(self, field: str, description: str) -> InvalidArgument:
        where = f"{self.file}, line {self.line}"
        return InvalidArgument.of(f"{where}, {field}" if field else where, description)


class Row:
    """One line: the fields of a JSON object, or the cells of a table."""

    def __init__(self, place: Place, fields: dict[str, Any], known: Collection[str]) -> None:
        self.place = place
        self._fields = fields
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise self.refuse(name[:40], f"is no field of this format; {hint}")

    def refuse(self, field: str, description: str) -> InvalidArgument:
        return self.place.refuse(field, description)

    def number(self, name: str) -> float:
        """Finite, and not negative."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"must be a number; got {reprlib.repr(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < 0:
            raise self.refuse(
                name, f"must not be negative, nor infinite; got {reprlib.repr(value)}"
            )
        return number

    def tokens(self, name: str) -> int:
        return self.count(name, zero=": leave out requests without tokens")

    def count(self, name: str, *, low: int = 1, zero: str = "") -> int:
        """`zero`: what to do where it is 0, and must not be."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"must be a whole number; got {reprlib.repr(value)}")
        if value < low:
            remedy = zero if value == 0 else ""
            raise self.refuse(name, f"must be at least {low}; got {reprlib.repr(value)}{remedy}")
        if value > MAX_COUNT:
            raise self.refuse(name, f"must be at most {MAX_COUNT}; got {reprlib.repr(value)}")
        return value

    def text(self, name: str, default: str, choices: Collection[str] = ()) -> str:
        value = self._fields.get(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, f"must be a text; got {reprlib.repr(value)}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise self.refuse(name, "has half of a surrogate pair, which is no character")
        if choices and value not in choices:
            raise self.refuse(name, f"must be one of {', '.join(choices)}; got {value[:40]!r}")
        return value

    def optional(self, name: str) -> float | None:
        """A number above 0, or None where there is none."""
        if self._fields.get(name) is None:
            return None
        value = self.number(name)
        if value == 0:
            raise self.refuse(name, "must be above 0; leave it out for none")
        return value

    def ids(self, name: str) -> list[Span]:
        """Of a list of ids, each a span of one."""
        values = self.items(name)
        if not all(type(each) is int and each >= 0 for each in values):
            raise self.refuse(name, "must be a list of whole numbers that are not negative")
        return [(each, each) for each in values]

    def spans(self, name: str) -> list[Span]:
        """Of a list of inclusive ranges [first, last]."""
        values = self.items(name)
        for span in values:
            if (
                not (isinstance(span, list) and len(span) == 2)
                or not (type(span[0]) is type(span[1]) is int)
                or not 0 <= span[0] <= span[1]
            ):
                raise self.refuse(
                    name, f"must be ranges [first, last] of block ids; got {reprlib.repr(span)}"
                )
        return [(first, last) for first, last in values]

    def items(self, name: str) -> list[Any]:
        value = self._fields.get(name, [])
        if not isinstance(value, list):
            raise self.refuse(name, f"must be a list; got {reprlib.repr(value)}")
        return value

    def _value(self, name: str) -> Any:
        if name not in self._fields:
            raise self.refuse(name, "must be there")
        return self._fields[name]


class Order:
    """Times of one clock, counted from the first. Refused: what goes back, or lasts too long."""

    def __init__(self, *, unit_s: float = 1.0, max_gap_s: float = MAX_GAP_S) -> None:
        self._unit_s = unit_s
        self._max_gap_s = max_gap_s
        self._first: float | None = None
        self._last = 0.0

    def at_s(self, row: Row, name: str) -> float:
        """Since the first."""
        value = row.number(name)
        if self._first is None:
            self._first = self._last = value
        if value < self._last:
            raise row.refuse(
                name,
                f"goes back: {value:g} after {self._last:g}; sort the lines by their times",
            )
        gap_s = (value - self._last) * self._unit_s
        at_s = (value - self._first) * self._unit_s
        if gap_s > self._max_gap_s or at_s > MAX_DURATION_S:
            raise row.refuse(
                name,
                f"is {gap_s:g} s after the one before, {at_s:g} s after the first; at most"
                f" {self._max_gap_s:g} and {MAX_DURATION_S:g}: check its unit, or cut the trace",
            )
        self._last = value
        return at_s


def read_text(path: Path) -> str:
    """Of a file, gzipped or not."""
    whole = Place(path.name, 1)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument.of(str(path), f"cannot be read: {error.strerror}") from error
    if content.startswith(_GZIP_MAGIC):
        try:
            with gzip.open(io.BytesIO(content)) as unpacked:
                content = unpacked.read(MAX_BYTES + 1)
        except (EOFError, OSError, zlib.error) as error:
            description = f"is damaged, or cut off: {error}; fetch or compress it again"
            raise InvalidArgument.of(path.name, description) from error
    elif path.suffix == ".gz":
        raise whole.refuse("", "is not gzip, though its name ends with .gz: rename or compress it")
    if len(content) > MAX_BYTES:
        raise InvalidArgument.of(
            path.name, f"has more than {MAX_BYTES >> 20} MiB, unpacked: cut it into parts"
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        description = "is not UTF-8: save it as JSON Lines or CSV in UTF-8"
        raise Place(path.name, line).refuse("", description) from error
    if not text.strip():
        raise InvalidArgument.of(path.name, "is empty: there must be a line for each request")
    return text


def json_lines(file: str, text: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Empty lines are passed over."""
    for number, line in enumerate(io.StringIO(text), start=1):
        if not line.strip():
            continue
        place = Place(file, number)
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            problem = "nested too deeply" if deep else getattr(error, "msg", "too long a number")
            description = f"is not JSON ({problem}): each line must be one JSON object"
            raise place.refuse("", description) from None
        if not isinstance(value, dict):
            raise place.refuse("", f"must be a JSON object; got {reprlib.repr(value)}")
        yield place, value
