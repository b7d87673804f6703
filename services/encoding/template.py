"""The model's own chat template: from a chat to the text that the model reads.

Rendered as Hugging Face's `apply_chat_template` does, in a Jinja2 sandbox: the same
whitespace rules, functions and JSON. Pure, and safe to use from several threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from services.core.errors import InvalidArgument, Violation

FIELD = "chat"


class ChatPrompt(NamedTuple):
    """A chat as templates expect it: messages and tools are JSON objects in OpenAI's form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    template_args: dict[str, Any]


class ChatTemplate:
    """A template, compiled once. Raises ValueError when `source` is no template.

    `special_tokens` are variables such as bos_token. `now` serves `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._has_tool_calls = "tool_calls" in source

    def render(self, chat: ChatPrompt, *, max_characters: int) -> str:
        """Raises InvalidArgument when the template refuses the chat, or renders more.

        The template is the model's and not hostile, yet it may be wrong, and what
        drives its loops comes from the request: it is stopped as soon as its
        output or its ranges grow too long. OpenAI has null for the content of a message
        that only calls tools; a template that knows calls but no null gets "" instead.
        """
        try:
            return self._render(chat, max_characters)
        except TypeError as error:
            filled = _without_nulls(chat)
            if not self._has_tool_calls or filled == chat:
                raise InvalidArgument(_violations(error, chat)) from error
        except InvalidArgument:
            raise
        except Exception as error:  # a sandboxed template may raise anything at all
            raise InvalidArgument(_violations(error, chat)) from error
        return self.render(filled, max_characters=max_characters)

    def _render(self, chat: ChatPrompt, max_characters: int) -> str:
        pieces = []
        room = max_characters
        for piece in self._template.generate(self._variables(chat)):
            room -= len(piece)
            if room < 0:
                raise InvalidArgument.of(
                    FIELD, f"renders to more than {max_characters} bytes of text"
                )
            pieces.append(piece)
        return "".join(pieces)

    def _variables(self, chat: ChatPrompt) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "range": _BoundedRange(),
            **chat.template_args,
            "messages": chat.messages,
            "tools": chat.tools,
            "add_generation_prompt": chat.add_generation_prompt,
        }


def _without_nulls(chat: ChatPrompt) -> ChatPrompt:
    messages = [
        {**message, "content": ""}
        if message.get("content") is None and message.get("tool_calls")
        else message
        for message in chat.messages
    ]
    return chat._replace(messages=messages)


def _violations(error: Exception, chat: ChatPrompt) -> list[Violation]:
    if isinstance(error, TypeError):
        # As good as certain: it joined texts, and one was not there.
        contents = [message.get("content", "") for message in chat.messages]
        missing = [index for index, content in enumerate(contents) if content is None]
        if missing:
            rule = "must be there: the model's chat template needs it"
            return [Violation(f"{FIELD}.messages[{index}].content", rule) for index in missing]
    reason = str(error) or type(error).__name__
    return [Violation(FIELD, f"the chat template refuses it: {reason}")]


class _BoundedRange:
    """`range` for one rendering. The sandbox bounds each range, but not one nested in another."""

    def __init__(self) -> None:
        self._left = MAX_RANGE

    def __call__(self, *arguments: int) -> range:
        numbers = range(*arguments)
        self._left -= len(numbers)
        if self._left < 0:
            raise OverflowError(f"its ranges have more than {MAX_RANGE} numbers")
        return numbers


class _GenerationBlocks(Extension):
    """{% generation %} marks what an assistant wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
