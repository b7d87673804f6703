"""The ways in which models write calls: each reads what follows a marker.

| format | what a model writes |
|---|---|
| HERMES (Qwen) | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` |
| MISTRAL | `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` |
| LLAMA3_JSON | `{"name": …, "parameters": {…}}` as the whole answer, or behind `<|python_tag|>` |
| DEEPSEEK | `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` in an outer pair, or `function` in place of the name, and name and fenced JSON behind |
"""  # noqa: E501, RUF002

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

from services.gateway.tool_formats.scanner import NAME, Enough, Malformed, Reading, Scanner


class ToolFormat(enum.Enum):
    HERMES = "hermes"
    MISTRAL = "mistral"
    LLAMA3_JSON = "llama3_json"
    DEEPSEEK = "deepseek"


class _Call(NamedTuple):
    """Read, and not given yet. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type")
_CALL_BEGIN, _CALL_SEP, _CALL_END, _CALLS_END = (
    f"<｜tool▁{name}｜>"  # noqa: RUF001
    for name in ("call▁begin", "sep", "call▁end", "calls▁end")
)


def read_calls(format: ToolFormat, scanner: Scanner, names: Collection[str]) -> Reading[None]:
    """Gives what is in an answer.

    `names`: of the functions there are. Only a call without a marker must be to one of them.
    """
    try:
        yield from _read_all(format, scanner, names)
    except Enough:
        return


def _read_all(format: ToolFormat, scanner: Scanner, names: Collection[str]) -> Reading[None]:
    grammar = _GRAMMARS[format]
    if grammar.may_be_bare:
        yield from scanner.skip_space()
        if (yield from scanner.peek()) == "{":
            yield from _attempt(scanner, _llama3_json(scanner, names))
        else:
            scanner.give_back()
    while (yield from scanner.content_until(grammar.markers)) is not None:
        yield from _attempt(scanner, grammar.read(scanner))


def _attempt(scanner: Scanner, reading: Reading[None]) -> Reading[None]:
    try:
        yield from reading
        yield from scanner.skip_space()
        scanner.commit()
    except Malformed:
        scanner.give_back()


def _hermes(scanner: Scanner) -> Reading[None]:
    yield from scanner.skip_space()
    call = yield from _object_call(scanner)
    yield from scanner.skip_space()
    yield from scanner.closing("</tool_call>")
    _give(scanner, call)


def _mistral(scanner: Scanner) -> Reading[None]:
    yield from scanner.skip_space()
    if not (yield from scanner.literal("[")):
        yield from _mistral_named(scanner)
        return
    while True:
        yield from scanner.skip_space()
        _give(scanner, (yield from _object_call(scanner)))
        yield from scanner.skip_space()
        if not (yield from scanner.literal(",")):
            break
    yield from scanner.closing("]")


def _mistral_named(scanner: Scanner) -> Reading[None]:
    name = yield from scanner.name()
    if (yield from scanner.literal("[CALL_ID]")):
        yield from scanner.name()
    yield from scanner.literal("[ARGS]")
    yield from scanner.skip_space()
    _give(scanner, (yield from _arguments_of(scanner, name)))


def _llama3_json(scanner: Scanner, names: Collection[str] | None = None) -> Reading[None]:
    while True:
        yield from scanner.skip_space()
        _give(scanner, (yield from _object_call(scanner, names)))
        yield from scanner.skip_space()
        if not (yield from scanner.literal(";")):
            break


def _deepseek(scanner: Scanner) -> Reading[None]:
    yield from scanner.skip_space()
    yield from scanner.expect(_CALL_BEGIN)
    while True:
        yield from _deepseek_call(scanner)
        yield from scanner.skip_space()
        if not (yield from scanner.literal(_CALL_BEGIN)):
            break
    yield from scanner.closing(_CALLS_END)


def _deepseek_call(scanner: Scanner) -> Reading[None]:
    name = yield from scanner.name()
    yield from scanner.expect(_CALL_SEP)
    yield from scanner.skip_space()
    is_fenced = name == "function" and (yield from scanner.peek()) != "{"
    if is_fenced:
        name = yield from scanner.name()
        yield from scanner.skip_space()
        yield from scanner.expect("```json")
        yield from scanner.skip_space()
    call = yield from _arguments_of(scanner, name)
    yield from scanner.skip_space()
    if is_fenced:
        yield from scanner.closing("```")
        yield from scanner.skip_space()
    yield from scanner.closing(_CALL_END)
    _give(scanner, call)


def _object_call(scanner: Scanner, names: Collection[str] | None = None) -> Reading[_Call | None]:
    """{"name": …, "arguments": {…}}. None: it was given while it was read."""
    name: str | None = None
    arguments: str | None = None
    is_given = False
    yield from scanner.expect("{")
    while True:
        key = yield from _key(scanner)
        if key == "name" and name is None:
            name = yield from _string(scanner)
            if not NAME.fullmatch(name) or (names is not None and name not in names):
                raise Malformed
        elif key in _ARGUMENTS and arguments is None and not is_given:
            if name and scanner.stream_arguments and (yield from scanner.peek()) == "{":
                scanner.begin(name)
                yield from scanner.arguments()
                is_given = True
            else:
                arguments = yield from scanner.value()
        elif key in _OTHERS:
            yield from scanner.value()
        else:
            raise Malformed
        yield from scanner.skip_space()
        if not (yield from scanner.literal(",")):
            break
    yield from scanner.expect("}")
    if is_given:
        return None
    if name is None:
        raise Malformed
    return _Call(name, _object_text(arguments))


def _arguments_of(scanner: Scanner, name: str) -> Reading[_Call | None]:
    """{…}. None: it was given while it was read."""
    if (yield from scanner.peek()) != "{":
        raise Malformed
    if scanner.stream_arguments:
        scanner.begin(name)
        yield from scanner.arguments()
        return None
    return _Call(name, _object_text((yield from scanner.value())))


def _key(scanner: Scanner) -> Reading[str]:
    yield from scanner.skip_space()
    key = yield from _string(scanner)
    yield from scanner.skip_space()
    yield from scanner.expect(":")
    yield from scanner.skip_space()
    return key


def _string(scanner: Scanner) -> Reading[str]:
    if (yield from scanner.peek()) != '"':
        raise Malformed
    return str(_parse((yield from scanner.value())))


def _give(scanner: Scanner, call: _Call | None) -> None:
    """The call is whole."""
    if call is not None:
        scanner.begin(call.name)
        scanner.give_arguments(call.arguments)
    scanner.end_call()


def _object_text(arguments: str | None) -> str:
    """An object's text: as it was written, or from a string that holds it."""
    if arguments is None:
        return "{}"
    value = _parse(arguments)
    if value is None:
        return "{}"
    if isinstance(value, str):
        arguments, value = value, _parse(value)
    if not isinstance(value, dict):
        raise Malformed
    return arguments


def _parse(text: str) -> Any:
    try:
        text.encode()  # an escape may stand for half a character
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise Malformed from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


class _Grammar(NamedTuple):
    markers: tuple[str, ...]
    read: Callable[[Scanner], Reading[None]]
    # An answer that is a call from its first character needs no marker.
    may_be_bare: bool = False


_GRAMMARS = {
    ToolFormat.HERMES: _Grammar(("<tool_call>",), _hermes),
    ToolFormat.MISTRAL: _Grammar(("[TOOL_CALLS]",), _mistral),
    ToolFormat.LLAMA3_JSON: _Grammar(("<|python_tag|>",), _llama3_json, may_be_bare=True),
    ToolFormat.DEEPSEEK: _Grammar(("<｜tool▁calls▁begin｜>",), _deepseek),  # noqa: RUF001
}
