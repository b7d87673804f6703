"""What a router has recorded (router/decisions.py), read back as something to replay.

A file may come from anywhere: whatever is wrong with it is said with its line. Its last line
may be cut, as a router leaves it that was killed.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import orjson

from router.decisions import FORMAT, NAME_BYTES
from services.core.errors import InvalidArgument
from services.core.keys import KEY_BYTES
from services.core.settings import REQUEST_CLASSES
from services.core.workload import MAX_DURATION_S, Arrival

_MOST = 1 << 40
# As worker.max_context_tokens at most.
_MOST_TOKENS = 1 << 20
# Far more than a request with that many tokens and thousands of workers makes.
_MAX_LINE_BYTES = 1 << 24


class Recorded(NamedTuple):
    """A request that came so far that a worker could be asked. NaN: it had no such time."""

    arrival: Arrival
    ttft_s: float
    tpot_s: float
    # Of `ttft_s`, what neither waiting nor an engine took.
    overhead_s: float
    worker: str
    cached_tokens: int
    evaluated_tokens: int
    prefill_s: float
    predicted_tokens: int | None
    error: str


class WorkerRecord(NamedTuple):
    id: str
    # "both", "prefill" or "decode".
    role: str
    num_slots: int
    num_blocks: int
    max_context_tokens: int


class Membership(NamedTuple):
    """Who was ready from then on."""

    at_s: float
    workers: tuple[WorkerRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """`settings`: dotted key to value, as they were at the start. `requests`: by arrival."""

    name: str
    sample: float
    settings: Mapping[str, Any]
    block_tokens: int
    memberships: tuple[Membership, ...]
    requests: tuple[Recorded, ...]
    num_settings_changes: int
    # Without a prompt: refused before it was read. And those that no line is there for.
    num_without_prompt: int
    num_dropped: int
    is_cut: bool


class _Line:
    """One line of a file, whose fields are asked for by what they must be."""

    def __init__(self, place: str, fields: Mapping[str, Any]) -> None:
        self._place = place
        self._fields = fields

    def fail(self, field: str, problem: str) -> NoReturn:
        raise InvalidArgument.of(f"{self._place}: {field}", problem)

    def text(self, field: str, *, choices: Iterable[str] = ()) -> str:
        value = self._fields.get(field)
        if not isinstance(value, str):
            self.fail(field, f"must be a text; got {_shown(value)}")
        if choices and value not in choices:
            self.fail(field, f"must be one of {', '.join(choices)}; got {_shown(value)}")
        return value

    def integer(self, field: str, *, low: int = 0, high: int = _MOST) -> int:
        value = self._fields.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(field, f"must be a whole number in [{low}, {high}]; got {_shown(value)}")
        return value

    def tokens(self, field: str) -> int:
        return self.integer(field, high=_MOST_TOKENS)

    def number(self, field: str) -> float:
        value = self._fields.get(field)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST:
            self.fail(field, f"must be a number of at least 0; got {_shown(value)}")
        return float(value)

    def at_s(self) -> float:
        value = self.number("at_s")
        if value > MAX_DURATION_S:
            self.fail("at_s", f"must be at most {MAX_DURATION_S:g}; cut the file before it")
        return value

    def has(self, field: str) -> bool:
        return self._fields.get(field) is not None

    def seconds(self, field: str) -> float:
        """Of a field in milliseconds; NaN where there is none."""
        return self.number(field) / 1e3 if self.has(field) else math.nan

    def table(self, field: str) -> Mapping[str, Any]:
        value = self._fields.get(field)
        if not isinstance(value, dict):
            self.fail(field, f"must be an object; got {_shown(value)}")
        return value

    def lines(self, field: str) -> Iterator[_Line]:
        values = self._fields.get(field)
        if not isinstance(values, list):
            self.fail(field, f"must be a list; got {_shown(values)}")
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                self.fail(f"{field}[{index}]", f"must be an object; got {_shown(value)}")
            yield _Line(f"{self._place}: {field}[{index}]", value)


class _Reader:
    def __init__(self, name: str, header: _Line) -> None:
        self.name = name
        self.sample = header.number("sample")
        self.settings = header.table("settings")
        block_tokens = self.settings.get("mesh.block_tokens")
        if not isinstance(block_tokens, int) or block_tokens < 1:
            header.fail("settings", "must have mesh.block_tokens, a whole number of at least 1")
        self.block_tokens: int = block_tokens
        self.memberships: list[Membership] = []
        self.requests: list[Recorded] = []
        self.num_settings_changes = self.num_without_prompt = self.num_dropped = 0
        # One object for each block, in however many chains it is.
        self._keys: dict[bytes, bytes] = {}

    def take(self, line: _Line) -> None:
        kinds = ("workers", "settings", "decision", "dropped", "end")
        match line.text("kind", choices=kinds):
            case "workers":
                self.memberships.append(self._membership(line))
            case "settings":
                self.num_settings_changes += 1
            case "dropped":
                self.num_dropped += line.integer("count")
            case "decision":
                if line.tokens("prompt_tokens"):
                    self.requests.append(self._request(line))
                else:
                    self.num_without_prompt += 1

    def result(self, *, is_cut: bool) -> Recording:
        return Recording(
            name=self.name,
            sample=self.sample,
            settings=self.settings,
            block_tokens=self.block_tokens,
            memberships=tuple(self.memberships),
            requests=tuple(sorted(self.requests, key=lambda each: each.arrival.at_s)),
            num_settings_changes=self.num_settings_changes,
            num_without_prompt=self.num_without_prompt,
            num_dropped=self.num_dropped,
            is_cut=is_cut,
        )

    def _membership(self, line: _Line) -> Membership:
        workers = tuple(
            WorkerRecord(
                id=each.text("id"),
                role=each.text("role", choices=("both", "prefill", "decode")),
                num_slots=each.integer("num_slots", low=1),
                num_blocks=each.integer("num_blocks"),
                max_context_tokens=each.integer("max_context_tokens", low=1),
            )
            for each in line.lines("workers")
        )
        return Membership(line.at_s(), workers)

    def _request(self, line: _Line) -> Recorded:
        prompt_tokens = line.tokens("prompt_tokens")
        arrival = Arrival(
            at_s=line.at_s(),
            chain=self._chain(line, prompt_tokens // self.block_tokens),
            prompt_tokens=prompt_tokens,
            output_tokens=line.tokens("output_tokens"),
            tenant=line.text("tenant"),
            request_class=line.text("class", choices=REQUEST_CLASSES),
            deadline_s=line.number("deadline_s") if line.has("deadline_s") else None,
        )
        has_usage = line.has("cached_tokens")
        is_predicted = line.has("predicted_tokens")
        return Recorded(
            arrival=arrival,
            ttft_s=line.seconds("ttft_ms"),
            tpot_s=line.seconds("tpot_ms"),
            overhead_s=line.seconds("overhead_ms"),
            worker=line.text("chosen") if line.has("chosen") else "",
            cached_tokens=line.tokens("cached_tokens") if has_usage else 0,
            evaluated_tokens=line.tokens("evaluated_tokens") if has_usage else 0,
            prefill_s=line.seconds("prefill_ms"),
            predicted_tokens=line.tokens("predicted_tokens") if is_predicted else None,
            error=line.text("error"),
        )

    def _chain(self, line: _Line, most: int) -> tuple[bytes, ...]:
        try:
            names = base64.b64decode(line.text("chain"), validate=True)
        except binascii.Error:
            line.fail("chain", "must be base64")
        if len(names) % NAME_BYTES:
            line.fail("chain", f"must be whole names of {NAME_BYTES} bytes; got {len(names)} bytes")
        if len(names) // NAME_BYTES > most:
            line.fail("chain", f"has more blocks than the prompt, which has {most}")
        starts = range(0, len(names), NAME_BYTES)
        return tuple(self._key(names[start : start + NAME_BYTES]) for start in starts)

    def _key(self, name: bytes) -> bytes:
        return self._keys.setdefault(name, name * (KEY_BYTES // NAME_BYTES))


def read_recording(path: Path) -> Recording:
    """Raises InvalidArgument, with the line and the field, and OSError."""
    reader: _Reader | None = None
    with path.open("rb") as file:
        for number, data in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 1):
            place = f"{path.name}, line {number}"
            is_whole = data.endswith(b"\n") or len(data) == _MAX_LINE_BYTES
            try:
                fields = orjson.loads(data)
            except orjson.JSONDecodeError:
                if reader is not None and not is_whole:
                    return reader.result(is_cut=True)
                raise InvalidArgument.of(place, f"is no JSON: {_hint(number)}") from None
            if not isinstance(fields, dict):
                raise InvalidArgument.of(place, f"is no JSON object: {_hint(number)}")
            line = _Line(place, fields)
            if reader is None:
                reader = _Reader(path.name, _header(line, fields))
            else:
                reader.take(line)
    if reader is None:
        raise InvalidArgument.of(path.name, "is empty")
    return reader.result(is_cut=False)


def _header(line: _Line, fields: Mapping[str, Any]) -> _Line:
    if fields.get("kind") != "header" or fields.get("program") != "firsttoken":
        line.fail("kind", _hint(1))
    if fields.get("format") != FORMAT:
        version = _shown(fields.get("format"))
        line.fail("format", f"this firsttoken reads format {FORMAT}; the file has {version}")
    return line


def _hint(number: int) -> str:
    if number > 1:
        return "the file is damaged; keep the lines before it"
    return "give a file that a router wrote (router.record_decisions)"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
