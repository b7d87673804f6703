"""Traces of real traffic, from files of several formats to one form.

    mooncake   JSON Lines, a request each        github.com/kvcache-ai/Mooncake
    agents     JSON Lines, a session each        github.com/callanjfox/kv-cache-tester
    azure      CSV: lengths and times alone      github.com/Azure/AzurePublicDataset
    firsttoken JSON Lines: a header, then a request each

A file's first line says which. Ids of blocks become prefix keys: equal ids are equal
blocks after equal prefixes, and a file in which they are not is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from services.bench.trace_lines import Order, Place, Row, Span, json_lines, read_text
from services.core.errors import InvalidArgument
from services.core.settings import REQUEST_CLASSES
from services.core.workload import MAX_DURATION_S, Arrival, Workload

FOLDER = Path(__file__).parent / "traces"
TRACES: Mapping[str, str] = {
    "mooncake": "mooncake_conversation_first30min.jsonl.gz",
    "agents": "claude_code_agents_a.jsonl.gz",
    "azure": "azure_conv_2023_first30min.csv.gz",
    "tau": "tau_airline_a_qwen3.jsonl.gz",
}
FORMAT, VERSION = "firsttoken-trace", 1

MOONCAKE_BLOCK_TOKENS = 512
AZURE_BLOCK_TOKENS = 64
SESSION_INTERVAL_S = 60.0

_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_SESSION_FIELDS = ("session", "block_size", "tool_tokens", "system_tokens", "requests")
_CALL_FIELDS = (
    *("t", "agent", "kind", "in", "out", "blocks"),
    *("api_s", "think_s", "in_types", "out_types"),
)
_AZURE_FIELDS = ("t_seconds", "context_tokens", "generated_tokens")
_HEADER_FIELDS = ("format", "version", "block_tokens", "source")
_REQUEST_FIELDS = (
    *("at_s", "prompt_tokens", "output_tokens", "blocks"),
    *("tenant", "request_class", "deadline_s"),
)

Rows: TypeAlias = Iterator[tuple[Place, dict[str, Any]]]


class Blocks:
    """Prefix keys of the ids of one session or file."""

    def __init__(self, space: str) -> None:
        self._space = space
        self._keys: dict[int, bytes] = {}
        # The id before each, and how far the ranges that begin with an id have been seen.
        self._parents: dict[int, int] = {}
        self._seen: dict[Span, int] = {}

    def check(self, row: Row, name: str, spans: Sequence[Span]) -> None:
        """That each block has the prefix that it had before."""
        last = -1
        for first, end in spans:
            seen = self._seen.get((last, first), first - 1)
            for block in range(seen + 1, end + 1):
                parent = last if block == first else block - 1
                known = self._parents.setdefault(block, parent)
                if known != parent:
                    after = "the first block" if known < 0 else f"after block {known}"
                    raise row.refuse(
                        name,
                        f"has block {block} where another prefix precedes it; it was {after}:"
                        " give different prefixes different ids",
                    )
            self._seen[last, first] = max(seen, end)
            last = end

    def keys(self, spans: Sequence[Span]) -> tuple[bytes, ...]:
        known = self._keys
        ids = [block for first, last in spans for block in range(first, last + 1)]
        for block in ids:
            if block not in known:
                known[block] = hashlib.sha256(f"{self._space}/{block}".encode()).digest()
        return tuple([known[block] for block in ids])


class Entry(NamedTuple):
    """An arrival whose chain is not made yet: `spans` of the ids in `blocks`."""

    arrival: Arrival
    blocks: Blocks
    spans: Sequence[Span]


class Chained:
    """Arrivals whose chains are made as they are asked for."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Arrival]:
        for arrival, blocks, spans in self._entries:
            yield arrival._replace(chain=blocks.keys(spans))


def read_trace(name: str | Path) -> Workload:
    """One of TRACES by its name, or a file. Raises InvalidArgument: file, line and field."""
    path = FOLDER / TRACES[str(name)] if str(name) in TRACES else Path(name)
    if str(name) not in TRACES and not path.exists():
        raise InvalidArgument.of(
            str(name), f"is neither a file nor a known trace; known: {', '.join(TRACES)}"
        )
    text = read_text(path)
    file = path.name
    if text.startswith(_AZURE_FIELDS[0]):
        return _workload(name, AZURE_BLOCK_TOKENS, _read_azure(file, text))
    place, first = next(json_lines(file, text))
    for field, read in _FORMATS.items():
        if field in first:
            block_tokens, entries = read(json_lines(file, text), file)
            return _workload(name, block_tokens, entries)
    raise place.refuse(
        "",
        f"is no line of a known format: it must have {', '.join(_FORMATS)}, or be the CSV header"
        f" {','.join(_AZURE_FIELDS)}",
    )


def _workload(name: str | Path, block_tokens: int, entries: Sequence[Entry]) -> Workload:
    return Workload(
        name=str(name),
        block_tokens=block_tokens,
        num_requests=len(entries),
        arrivals=Chained(entries),
    )


def _read_mooncake(rows: Rows, file: str) -> tuple[int, list[Entry]]:
    blocks, order, entries = Blocks(file), Order(unit_s=1e-3), []
    for place, fields in rows:
        row = Row(place, fields, _MOONCAKE_FIELDS)
        at_s = order.at_s(row, "timestamp")
        arrival = Arrival(at_s, (), row.tokens("input_length"), row.tokens("output_length"))
        spans = row.ids("hash_ids")
        entries.append(
            _entry(row, "hash_ids", arrival, blocks, spans, MOONCAKE_BLOCK_TOKENS, partial=True)
        )
    return MOONCAKE_BLOCK_TOKENS, entries


def _read_agents(rows: Rows, file: str) -> tuple[int, list[Entry]]:
    """A session begins each minute. A call that answered nothing counts as one of one token."""
    entries: list[Entry] = []
    block_tokens = 0
    for number, (place, fields) in enumerate(rows):
        session = Row(place, fields, _SESSION_FIELDS)
        size = session.count("block_size")
        block_tokens = block_tokens or size
        if size != block_tokens:
            raise session.refuse(
                "block_size", f"must be the same in all lines: {size}, {block_tokens} before"
            )
        # People leave a session for days.
        blocks, order = Blocks(f"{file}/{number}"), Order(max_gap_s=MAX_DURATION_S)
        for index, call in enumerate(session.items("requests")):
            if not isinstance(call, dict):
                raise session.refuse(f"requests[{index}]", "must be a JSON object")
            named = {f"requests[{index}].{name}": value for name, value in call.items()}
            row = Row(place, named, [f"requests[{index}].{name}" for name in _CALL_FIELDS])
            at = f"requests[{index}]."
            at_s = order.at_s(row, at + "t")
            output_tokens = max(1, row.count(at + "out", low=0))
            arrival = Arrival(
                number * SESSION_INTERVAL_S + at_s, (), row.tokens(at + "in"), output_tokens
            )
            spans = row.spans(at + "blocks")
            entries.append(_entry(row, at + "blocks", arrival, blocks, spans, size))
    if not entries:
        raise InvalidArgument.of(file, "has sessions and no request")
    entries.sort(key=lambda entry: entry.arrival.at_s)
    return block_tokens, entries


def _read_own(rows: Rows, file: str) -> tuple[int, list[Entry]]:
    header = Row(*next(rows), _HEADER_FIELDS)
    header.text("format", "", choices=(FORMAT,))
    if (version := header.count("version")) != VERSION:
        raise header.refuse("version", f"must be {VERSION}; got {version}")
    block_tokens = header.count("block_tokens")
    blocks, order, entries = Blocks(file), Order(), []
    for place, fields in rows:
        row = Row(place, fields, _REQUEST_FIELDS)
        arrival = Arrival(
            order.at_s(row, "at_s"),
            (),
            row.tokens("prompt_tokens"),
            row.tokens("output_tokens"),
            row.text("tenant", ""),
            row.text("request_class", REQUEST_CLASSES[0], choices=REQUEST_CLASSES),
            row.optional("deadline_s"),
        )
        entries.append(_entry(row, "blocks", arrival, blocks, row.spans("blocks"), block_tokens))
    if not entries:
        raise InvalidArgument.of(file, "has a header and no request")
    return block_tokens, entries


def _read_azure(file: str, text: str) -> list[Entry]:
    """Nothing is known of prefixes: each prompt is of blocks that no other has."""
    rows = [(number, line.split(",")) for number, line in enumerate(text.splitlines(), 1) if line]
    (_, columns), *lines = rows
    entries: list[Entry] = []
    order = Order()
    for number, cells in lines:
        place = Place(file, number)
        if len(cells) != len(columns):
            raise place.refuse("", f"must have {len(columns)} cells; got {len(cells)}")
        fields = {name: _cell(cell) for name, cell in zip(columns, cells, strict=True)}
        row = Row(place, fields, _AZURE_FIELDS)
        at_s = order.at_s(row, "t_seconds")
        prompt_tokens = row.tokens("context_tokens")
        arrival = Arrival(at_s, (), prompt_tokens, row.tokens("generated_tokens"))
        num_blocks = prompt_tokens // AZURE_BLOCK_TOKENS
        spans = [(0, num_blocks - 1)] if num_blocks else []
        entries.append(Entry(arrival, Blocks(f"{file}/{number}"), spans))
    if not entries:
        raise InvalidArgument.of(file, "has a header and no request")
    return entries


def _entry(
    row: Row,
    name: str,
    arrival: Arrival,
    blocks: Blocks,
    spans: Sequence[Span],
    block_tokens: int,
    *,
    partial: bool = False,
) -> Entry:
    """`partial`: the chain may end with the id of a block that the prompt does not fill."""
    num_blocks = sum(last - first + 1 for first, last in spans)
    num_full = arrival.prompt_tokens // block_tokens
    most = -(-arrival.prompt_tokens // block_tokens) if partial else num_full
    if num_blocks > most:
        raise row.refuse(
            name,
            f"has {num_blocks} blocks of {block_tokens} tokens, and the prompt of"
            f" {arrival.prompt_tokens} tokens fills {num_full}: drop the rest, or correct the"
            " length",
        )
    blocks.check(row, name, spans)
    return Entry(arrival, blocks, spans[:num_full] if partial else spans)


def _cell(text: str) -> object:
    if not text.isascii() or "_" in text:  # Python would take them for numbers
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


_FORMATS: Mapping[str, Callable[[Rows, str], tuple[int, list[Entry]]]] = {
    "format": _read_own,
    "hash_ids": _read_mooncake,
    "requests": _read_agents,
}
