"""A window as a file: JSON Lines, the header first, then a line for each thing that is known.

Pure. Prompt text is not in it, nor token ids. A file may come from anywhere: whatever is wrong
with it is said with its line and field.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from services.core.config import declared, defaults
from services.core.errors import InvalidArgument
from services.core.ledger import Segment
from services.observer.doctor.finding import Clues, VolatileSpan
from services.observer.model import (
    BubbleSum,
    Generation,
    Hop,
    Member,
    Part,
    Reading,
    Request,
    Window,
)

FORMAT = 1
PROGRAM = "firsttoken"
# Of a value that is wrong, shown.
MOST_SHOWN = 40

_KINDS: Mapping[str, Any] = {
    "request": Request,
    "reading": Reading,
    "bubble": BubbleSum,
    "member": Member,
    "generation": Generation,
    "clues": Clues,
}


class Saved(NamedTuple):
    window: Window
    clues: Clues


class _Bad(Exception):
    """At the field of this path."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(problem)
        self.path = path
        self.problem = problem


def dump(window: Window, clues: Clues | None = None) -> Iterator[bytes]:
    """Lines, each with its end."""
    yield _line(
        "window",
        {
            "program": PROGRAM,
            "format": FORMAT,
            "begin_unix_s": window.begin_unix_s,
            "end_unix_s": window.end_unix_s,
            "num_dropped": window.num_dropped,
            "config": dict(window.config),
        },
    )
    if clues is not None:
        yield _line("clues", _plain(clues))
    parts: tuple[tuple[str, Iterable[Any]], ...] = (
        ("generation", window.generations),
        ("member", window.members),
        ("bubble", window.bubbles),
        ("reading", window.readings),
        ("request", window.requests),
    )
    for kind, values in parts:
        for value in values:
            yield _line(kind, _plain(value))


def load(lines: Iterable[bytes], name: str) -> Saved:
    """`name`: of the file, for messages. Raises InvalidArgument with the line and the field."""
    header: dict[str, Any] | None = None
    found: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for number, data in enumerate(lines, 1):
        if not data.strip():
            continue
        place = f"{name}, line {number}"
        fields = _object(data, place)
        if header is None:
            header = _header(fields, place)
            continue
        kind = fields.pop("kind", None)
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidArgument.of(f"{place}: kind", _one_of(_KINDS, kind))
        try:
            found[kind].append(_read(_KINDS[kind], fields, ""))
        except _Bad as bad:
            raise InvalidArgument.of(f"{place}: {bad.path}", bad.problem) from None
    if header is None:
        raise InvalidArgument.of(name, "is empty: save one with `firsttoken doctor --save FILE`")
    window = Window(
        **header,
        requests=tuple(found["request"]),
        readings=tuple(found["reading"]),
        bubbles=tuple(found["bubble"]),
        members=tuple(found["member"]),
        generations=tuple(found["generation"]),
    )
    return Saved(window, found["clues"][-1] if found["clues"] else Clues())


def _line(kind: str, fields: Mapping[str, Any]) -> bytes:
    return orjson.dumps({"kind": kind, **fields}, default=str, option=orjson.OPT_NON_STR_KEYS) + (
        b"\n"
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _object(data: bytes, place: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise InvalidArgument.of(place, "is no JSON") from None
    if not isinstance(fields, dict):
        raise InvalidArgument.of(place, "is no JSON object")
    return fields


def _header(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    if fields.get("kind") != "window" or fields.get("program") != PROGRAM:
        problem = "give a file that `firsttoken doctor --save` or /api/window wrote"
        raise InvalidArgument.of(f"{place}: kind", problem)
    if fields.get("format") != FORMAT:
        version = _shown(fields.get("format"))
        problem = f"this firsttoken reads format {FORMAT}; the file has {version}"
        raise InvalidArgument.of(f"{place}: format", problem)
    hints = typing.get_type_hints(Window)
    names = ("begin_unix_s", "end_unix_s", "num_dropped", "config")
    try:
        read = {name: _value(hints[name], _taken(fields, name, ""), name) for name in names}
        read["config"] = _settings(read["config"])
    except _Bad as bad:
        raise InvalidArgument.of(f"{place}: {bad.path}", bad.problem) from None
    if read["end_unix_s"] < read["begin_unix_s"]:
        raise InvalidArgument.of(f"{place}: end_unix_s", "must not be before begin_unix_s")
    return read


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are known are of their kind: rules compute with them."""
    known = defaults()
    return {
        key: _scalar(type(known[declared(key)]), value, f"config.{key}")
        if declared(key) in known
        else value
        for key, value in config.items()
    }


# --- values of the model, by their annotations


def _read(cls: Any, fields: Any, path: str) -> Any:
    if not isinstance(fields, dict):
        raise _Bad(path or "kind", f"must be an object; got {_shown(fields)}")
    prefix = f"{path}." if path else ""
    return cls(
        **{
            name: _value(hint, _taken(fields, name, prefix), f"{prefix}{name}")
            for name, hint in _hints(cls).items()
        }
    )


def _hints(cls: Any) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


_HINTS: dict[Any, dict[str, Any]] = {}


def _taken(fields: Mapping[str, Any], name: str, prefix: str) -> Any:
    if name not in fields:
        raise _Bad(f"{prefix}{name}", "is missing")
    return fields[name]


def _value(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _value(next(each for each in arguments if each is not type(None)), value, path)
    if hint is Any:
        return value
    if origin is tuple:
        return _tuple(arguments, value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments, value, path)
    if hint in (Hop, Part, VolatileSpan):
        return _read(hint, value, path)
    return _scalar(hint, value, path)


def _tuple(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _Bad(path, f"must be a list; got {_shown(value)}")
    if arguments[-1] is Ellipsis:
        return tuple(
            _value(arguments[0], each, f"{path}[{index}]") for index, each in enumerate(value)
        )
    if len(value) != len(arguments):
        raise _Bad(path, f"must have {len(arguments)} items; got {_shown(value)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(_value(hint, each, f"{path}[{n}]") for n, (hint, each) in enumerate(pairs))


def _mapping(arguments: tuple[Any, ...], value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _Bad(path, f"must be an object; got {_shown(value)}")
    of_key, of_value = arguments
    return {
        _value(of_key, key, path): _value(of_value, each, f"{path}.{key}")
        for key, each in value.items()
    }


def _scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is Segment:
        if value not in [each.value for each in Segment]:
            raise _Bad(path, _one_of((each.value for each in Segment), value))
        return Segment(value)
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[hint]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_number if hint is float else type(value) is hint
    if not fits:
        raise _Bad(path, f"must be {words}; got {_shown(value)}")
    return float(value) if hint is float else value


def _one_of(names: Iterable[str], value: object) -> str:
    return f"must be one of {', '.join(names)}; got {_shown(value)}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "what is nested too deeply"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
