"""From OpenAI's chat messages to the mesh's Chat. Every broken field is named."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from firsttoken.common.v1 import common_pb2
from services.gateway.fields import Fields, kind_of

MAX_MESSAGES = 10_000
# Newer than the templates of models, which know it by its older name.
_ROLES = {"developer": "system"}
_TEXT_PARTS = ("text", "refusal")


def read_chat(body: Fields, *, tools_json: Sequence[str]) -> common_pb2.Chat:
    """What is wrong with it lands in `body.violations`. The tools are checked already."""
    messages = body.items("messages")
    if messages is None:
        if not body.has("messages"):
            body.refuse("messages", "must be there: the messages of the chat")
        messages = []
    elif not messages:
        body.refuse("messages", "must not be empty")
    elif len(messages) > MAX_MESSAGES:
        body.refuse("messages", f"must be at most {MAX_MESSAGES}; got {len(messages)}")
        messages = []
    chat = common_pb2.Chat(
        messages=[
            _message(fields)
            for index, value in enumerate(messages)
            if (fields := body.element("messages", index, value)) is not None
        ],
        tools_json=tools_json,
        add_generation_prompt=body.boolean("add_generation_prompt"),
    )
    arguments = body.section("chat_template_kwargs")
    if arguments is not None:
        chat.template_args_json = orjson.dumps(arguments.values).decode()
    return chat


def _message(fields: Fields) -> common_pb2.ChatMessage:
    role = _required_string(fields, "role")
    content = _content(fields)
    calls = fields.items("tool_calls") or []
    message = common_pb2.ChatMessage(
        role=_ROLES.get(role or "", role or ""),
        content=content,
        tool_calls=[
            _tool_call(call)
            for index, value in enumerate(calls)
            if (call := fields.element("tool_calls", index, value)) is not None
        ],
        tool_call_id=fields.string("tool_call_id"),
        name=fields.string("name"),
        reasoning_content=fields.string("reasoning_content"),
    )
    if not (fields.has("content") or calls or message.reasoning_content):
        fields.refuse("content", "must be there, unless there are tool_calls")
    return message


def _content(fields: Fields) -> str | None:
    """A string, or a list of parts that are all text."""
    value = fields.raw("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.refuse("content", f"must be a string or a list of parts; got {kind_of(value)}")
        return None
    texts = []
    for index, item in enumerate(value):
        part = fields.element("content", index, item)
        if part is None:
            continue
        kind = _required_string(part, "type")
        if kind in _TEXT_PARTS:
            texts.append(_required_string(part, kind) or "")
        elif kind is not None:
            part.refuse("type", f"must be text: this model reads no other; got {kind[:40]!r}")
    return "".join(texts)


def _tool_call(fields: Fields) -> common_pb2.ToolCall:
    fields.choice("type", "function")
    call = common_pb2.ToolCall(id=fields.string("id") or "")
    function = fields.section("function")
    if function is None:
        if not fields.has("function"):
            fields.refuse("function", "must be there")
        return call
    call.name = _required_string(function, "name") or ""
    call.arguments_json = function.string("arguments") or "{}"
    return call


def _required_string(fields: Fields, name: str) -> str | None:
    if not fields.has(name):
        fields.refuse(name, "must be there, and not be null")
    return fields.string(name)
