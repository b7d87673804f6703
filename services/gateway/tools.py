"""Tools in a request, and calls of them in its answer. Pure.

    support = find_tool_support(chat_template)       # once for each model
    tools = read_tools(body, support)                # raises InvalidArgument: a 400
    chat.tools_json.extend(tools.tools_json)         # what the template renders
    parser = tools.new_parser(stream=True)           # None: the answer is content as it is
    for event in parser.feed(text): ...              # and parser.finish() at the end

Each event is one delta of a stream:

    Content(text)
        {"content": text}
    CallBegan(call_index, call_id, name)
        {"tool_calls": [{"index": call_index, "id": call_id, "type": "function",
                         "function": {"name": name, "arguments": ""}}]}
    Arguments(call_index, text)
        {"tool_calls": [{"index": call_index, "function": {"arguments": text}}]}

Of an answer that is not streamed, `tools.new_parser(stream=False).parse(text)` is the
message's content and calls. `parser.finish_reason(reason)` is "tool_calls" where there
are calls and the answer ended by itself. A parser that `is_finished` needs no more text.

The markers of some models are control tokens, which answers do not show unless they are
asked to: `tools.needs_control_tokens`.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
from jinja2 import Environment, TemplateError

from services.core.errors import InvalidArgument, Violation
from services.gateway.fields import kind_of
from services.gateway.tool_formats.grammars import ToolFormat, read_calls
from services.gateway.tool_formats.scanner import Arguments, CallBegan, Content, Event, Scanner

__all__ = [
    "Arguments",
    "CallBegan",
    "Content",
    "Event",
    "ParsedAnswer",
    "RequestedTools",
    "ToolCall",
    "ToolCallParser",
    "ToolFormat",
    "ToolSupport",
    "find_tool_support",
    "read_tools",
]

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID_ALPHABET = string.ascii_letters + string.digits
# Mistral's templates refuse ids that are longer or shorter.
_MISTRAL_ID_LENGTH = 9
_ID_LENGTH = 24


class ToolSupport(NamedTuple):
    """What a model's chat template knows of tools. `format` is None where it is unknown."""

    renders_tools: bool
    format: ToolFormat | None


class ToolCall(NamedTuple):
    """`arguments` is the text of a JSON object."""

    call_id: str
    name: str
    arguments: str


class ParsedAnswer(NamedTuple):
    """`content` is None where there are only calls."""

    content: str | None
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTools:
    """The tools of one request. `format` is None where its answer is not searched for calls."""

    tools_json: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    format: ToolFormat | None = None
    parallel: bool = True

    @property
    def needs_control_tokens(self) -> bool:
        return self.format not in (None, ToolFormat.HERMES)

    def new_parser(
        self, *, stream: bool, new_id: Callable[[], str] | None = None
    ) -> ToolCallParser | None:
        if self.format is None:
            return None
        return ToolCallParser(
            self.format,
            names=self.names,
            stream=stream,
            parallel=self.parallel,
            new_id=new_id or _new_id(self.format),
        )


class ToolCallParser:
    """Finds the calls in one answer, as its text comes.

    The events depend on the text alone and not on how it was cut. Only what may be the
    beginning of a call is held back, with the white space before it. What turns out to be
    no call is content, as it was written. With `stream` a call is given as soon as its
    arguments begin and cannot be taken back: arguments that then are no JSON are the
    model's, as with OpenAI. Without, every call has a whole JSON object.
    """

    def __init__(
        self,
        format: ToolFormat,
        *,
        names: frozenset[str],
        stream: bool,
        parallel: bool,
        new_id: Callable[[], str],
    ) -> None:
        self._scanner = Scanner(new_id=new_id, stream_arguments=stream, only_one=not parallel)
        self._reading = read_calls(format, self._scanner, names)
        self.is_finished = False

    def feed(self, text: str) -> list[Event]:
        if self.is_finished:
            return []
        self._scanner.add(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """No more text comes. May be called twice."""
        self._scanner.end()
        return self._advance()

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer at once."""
        content: list[str] = []
        begun: list[CallBegan] = []
        arguments: list[str] = []
        for event in (*self.feed(text), *self.finish()):
            match event:
                case Content():
                    content.append(event.text)
                case CallBegan():
                    begun.append(event)
                    arguments.append("")
                case Arguments():
                    arguments[event.call_index] += event.text
        calls = tuple(
            ToolCall(call.call_id, call.name, text)
            for call, text in zip(begun, arguments, strict=True)
        )
        return ParsedAnswer("".join(content) or (None if calls else ""), calls)

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._scanner.num_calls and reason == "stop" else reason

    def _advance(self) -> list[Event]:
        if not self.is_finished:
            self.is_finished = next(self._reading, self) is self
        events = [event for event in self._scanner.events if not _is_empty(event)]
        self._scanner.events.clear()
        return events


def find_tool_support(chat_template: str) -> ToolSupport:
    try:
        tokens = list(Environment().lex(chat_template))
    except TemplateError:
        return ToolSupport(renders_tools=False, format=None)
    renders = any(kind == "name" and value == "tools" for _, kind, value in tokens)
    return ToolSupport(renders, _find_format(chat_template) if renders else None)


def read_tools(body: Mapping[str, Any], support: ToolSupport) -> RequestedTools:
    """From `tools`, `tool_choice` and `parallel_tool_calls` of a chat completion.

    Raises InvalidArgument, all broken fields named, also for what cannot be kept: without
    guided decoding no call can be had for certain.
    """
    violations: list[Violation] = []
    tools = body.get("tools")
    if tools is None:
        tools = []
    names = _check_tools(tools, violations)
    choice = body.get("tool_choice")
    if choice is None:
        choice = "auto" if tools else "none"
    if problem := _problem_of_choice(choice, bool(tools)):
        violations.append(Violation("tool_choice", problem))
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        violations.append(Violation("parallel_tool_calls", "must be true or false"))
    if tools and choice != "none" and not support.renders_tools and not violations:
        violations.append(Violation("tools", "the model's chat template does not know tools"))
    if violations:
        raise InvalidArgument(violations)
    if choice == "none":
        return RequestedTools()
    return RequestedTools(
        tools_json=tuple(orjson.dumps(tool).decode() for tool in tools),
        names=frozenset(names),
        format=support.format,
        parallel=parallel is not False,
    )


def _find_format(chat_template: str) -> ToolFormat | None:
    def has(*parts: str) -> bool:
        return all(part in chat_template for part in parts)

    if has("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"):  # noqa: RUF001
        return ToolFormat.DEEPSEEK
    if has("[TOOL_CALLS]"):
        return ToolFormat.MISTRAL
    # Some write XML inside the same marker.
    if has("<tool_call>") and not has("<function=") and not has("<arg_key>"):
        return ToolFormat.HERMES
    if has("<|start_header_id|>", '"parameters": '):
        return ToolFormat.LLAMA3_JSON
    return None


def _check_tools(tools: Any, violations: list[Violation]) -> list[str]:
    if not isinstance(tools, list):
        violations.append(Violation("tools", f"must be a list; got {kind_of(tools)}"))
        return []
    if len(tools) > MAX_TOOLS:
        violations.append(Violation("tools", f"must be at most {MAX_TOOLS}; got {len(tools)}"))
        return []
    names: list[str] = []
    for index, tool in enumerate(tools):
        before = len(violations)
        violations += _problems_of_tool(tool, f"tools[{index}]")
        if len(violations) == before:
            name = tool["function"]["name"]
            if name in names:
                violations.append(Violation(f"tools[{index}].function.name", "is there twice"))
            names.append(name)
    return names


def _problems_of_tool(tool: Any, field: str) -> list[Violation]:
    if not isinstance(tool, dict):
        return [Violation(field, "must be an object")]
    if tool.get("type") != "function":
        return [Violation(f"{field}.type", "must be 'function'")]
    function = tool.get("function")
    field = f"{field}.function"
    if not isinstance(function, dict):
        return [Violation(field, "must be an object")]
    problems = []
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "must be 1 to 64 of a-z, A-Z, 0-9, _ and -"
        problems.append(Violation(f"{field}.name", rule))
    if not isinstance(function.get("description"), str | None):
        problems.append(Violation(f"{field}.description", "must be a string"))
    if not isinstance(function.get("parameters"), dict | None):
        problems.append(Violation(f"{field}.parameters", "must be an object: a JSON schema"))
    strict = function.get("strict")
    if strict is not None and strict is not False:
        rule = "must be false: arguments are not held to the schema"
        problems.append(Violation(f"{field}.strict", rule))
    return problems


def _problem_of_choice(choice: Any, has_tools: bool) -> str | None:
    if choice == "none" or (choice == "auto" and has_tools):
        return None
    if not has_tools:
        return "needs tools"
    if choice == "required" or isinstance(choice, dict):
        return "must be 'auto' or 'none': a call cannot be forced, since decoding is not guided"
    return "must be 'auto' or 'none'"


def _new_id(format: ToolFormat) -> Callable[[], str]:
    if format is ToolFormat.MISTRAL:
        return lambda: _random_text(_MISTRAL_ID_LENGTH)
    return lambda: f"call_{_random_text(_ID_LENGTH)}"


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(length))


def _is_empty(event: Event) -> bool:
    return not isinstance(event, CallBegan) and not event.text
