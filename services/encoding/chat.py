"""From a Chat message to what a template expects, every broken field named at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import NoneType
from typing import Any, NoReturn, TypeAlias

from firsttoken.common.v1 import common_pb2
from services.core.errors import InvalidArgument, Violation
from services.core.settings import TokenizerSettings
from services.encoding.template import ChatPrompt

Object: TypeAlias = dict[str, Any]

RESERVED_ARGUMENTS = ("messages", "tools", "add_generation_prompt")
_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def parse_chat(chat: common_pb2.Chat, settings: TokenizerSettings) -> ChatPrompt:
    """Raises InvalidArgument with paths that start at `chat`."""
    reader = _Reader(settings)
    prompt = ChatPrompt(
        messages=reader.messages(chat),
        tools=reader.tools(chat),
        add_generation_prompt=(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        ),
        template_args=reader.template_args(chat),
    )
    if reader.violations:
        raise InvalidArgument(reader.violations)
    return prompt


class _Reader:
    """Collects violations while it reads."""

    def __init__(self, settings: TokenizerSettings) -> None:
        self._sort_tools = settings.sort_tools
        self._arguments_as_text = settings.tool_arguments == "text"
        self.violations: list[Violation] = []

    def messages(self, chat: common_pb2.Chat) -> list[Object]:
        if not chat.messages:
            self._refuse("chat.messages", "must not be empty")
        return [
            self._message(message, f"chat.messages[{index}]")
            for index, message in enumerate(chat.messages)
        ]

    def tools(self, chat: common_pb2.Chat) -> list[Object] | None:
        """None rather than an empty list: templates ask for either."""
        make_object = _sorted_object if self._sort_tools else dict
        return [
            self._object(text, f"chat.tools_json[{index}]", make_object)
            for index, text in enumerate(chat.tools_json)
        ] or None

    def template_args(self, chat: common_pb2.Chat) -> Object:
        if not chat.HasField("template_args_json"):
            return {}
        field = "chat.template_args_json"
        arguments = self._object(chat.template_args_json, field)
        for name in RESERVED_ARGUMENTS:
            if name in arguments:
                self._refuse(field, f"must not set {name}")
        return arguments

    def _message(self, message: common_pb2.ChatMessage, field: str) -> Object:
        if not message.role:
            self._refuse(f"{field}.role", "must not be empty")
        if not (message.HasField("content") or message.tool_calls or message.reasoning_content):
            self._refuse(f"{field}.content", "must be there, unless there are tool_calls")
        # As OpenAI has it: content is always there, and null when there is none.
        fields: Object = {
            "role": message.role,
            "content": message.content if message.HasField("content") else None,
        }
        if message.tool_calls:
            fields["tool_calls"] = [
                self._tool_call(call, f"{field}.tool_calls[{index}]")
                for index, call in enumerate(message.tool_calls)
            ]
        if message.HasField("tool_call_id"):
            fields["tool_call_id"] = message.tool_call_id
        if message.HasField("name"):
            fields["name"] = message.name
        if message.HasField("reasoning_content"):
            fields["reasoning_content"] = message.reasoning_content
        return fields

    def _tool_call(self, call: common_pb2.ToolCall, field: str) -> Object:
        arguments = self._object(call.arguments_json, f"{field}.arguments_json")
        function = {
            "name": call.name,
            "arguments": call.arguments_json if self._arguments_as_text else arguments,
        }
        return {"id": call.id, "type": "function", "function": function}

    def _object(
        self,
        text: str,
        field: str,
        make_object: Callable[[list[tuple[str, Any]]], Object] = dict,
    ) -> Object:
        # The standard library's parser keeps integers of any size as they are written.
        try:
            value = json.loads(text, object_pairs_hook=make_object, parse_constant=_no_constant)
        except RecursionError:
            self._refuse(field, "is nested too deeply")
        except ValueError as error:
            self._refuse(field, f"must be JSON: {error}")
        else:
            if isinstance(value, dict):
                return value
            # Not what it says: refusals are told to the observer, and this may be text of a prompt.
            self._refuse(field, f"must be a JSON object; got {_KINDS[type(value)]}")
        return {}

    def _refuse(self, field: str, description: str) -> None:
        self.violations.append(Violation(field, description))


def _sorted_object(pairs: list[tuple[str, Any]]) -> Object:
    return dict(sorted(pairs, key=lambda pair: pair[0]))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
