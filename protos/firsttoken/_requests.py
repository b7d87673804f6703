"""Python values to a GenerateRequest. Raises TypeError or ValueError for misuse."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2

# Text, a chat in OpenAI's form, or token ids.
Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int]

MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class Sampling(TypedDict, total=False):
    """Defaults and ranges as in firsttoken/common/v1/common.proto; None is absent."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logprobs: int | None
    ignore_eos: bool | None
    skip_special_tokens: bool | None


class ChatOptions(TypedDict, total=False):
    """Only with a chat. `tools` in OpenAI's form; `template_args` go to the model's template."""

    tools: Sequence[Mapping[str, Any]] | None
    template_args: Mapping[str, Any] | None
    add_generation_prompt: bool | None


class Options(Sampling, ChatOptions, total=False):
    model: str
    request_class: Literal["interactive", "batch"]
    # Requests share cached prefixes only with the same salt.
    cache_salt: str
    # Seconds from the call to its last token, at most.
    deadline_s: float | None
    # W3C trace context of the caller.
    traceparent: str | None
    tracestate: str | None


def build_request(prompt: Prompt, options: Options) -> inference_pb2.GenerateRequest:
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"there is no option {name!r}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request = inference_pb2.GenerateRequest(
        model=given.get("model", ""),
        cache_salt=given.get("cache_salt", ""),
        request_class=_request_class(given.get("request_class")),
        sampling=_sampling(given),
    )
    chat_options = {name: given[name] for name in ChatOptions.__annotations__ if name in given}
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, bytes | Mapping):
        raise TypeError("the prompt must be a string, a list of messages or a list of token ids")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(prompt, chat_options))
    else:
        request.token_ids = _pack(prompt)
    if chat_options and not request.HasField("chat"):
        raise ValueError(f"only a chat takes {', '.join(chat_options)}")
    return request


def _request_class(name: str | None) -> common_pb2.RequestClass.ValueType:
    match name:
        case None:  # the highest that the caller may ask for
            return common_pb2.REQUEST_CLASS_UNSPECIFIED
        case "interactive":
            return common_pb2.REQUEST_CLASS_INTERACTIVE
        case "batch":
            return common_pb2.REQUEST_CLASS_BATCH
    raise ValueError(f"request_class must be 'interactive' or 'batch'; got {name!r}")


def _sampling(given: Mapping[str, Any]) -> common_pb2.SamplingParams:
    values = {name: given[name] for name in Sampling.__annotations__ if name in given}
    if isinstance(values.get("stop"), str):  # else each letter would be one
        values["stop"] = [values["stop"]]
    return common_pb2.SamplingParams(**values)


def _pack(token_ids: Sequence[Any]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"token ids must be whole numbers in [0, 2**32): {error}") from None


def _chat(messages: Sequence[Any], options: Mapping[str, Any]) -> common_pb2.Chat:
    chat = common_pb2.Chat(
        messages=[_message(message) for message in messages],
        tools_json=[_json(tool) for tool in options.get("tools", ())],
    )
    if "template_args" in options:
        chat.template_args_json = _json(options["template_args"])
    if "add_generation_prompt" in options:
        chat.add_generation_prompt = options["add_generation_prompt"]
    return chat


def _message(message: Mapping[str, Any]) -> common_pb2.ChatMessage:
    if unknown := sorted(set(message) - set(MESSAGE_KEYS)):
        raise ValueError(f"a message has no {', '.join(map(repr, unknown))}")
    given = {key: value for key, value in message.items() if value is not None}
    if "content" in given:
        given["content"] = _content(given["content"])
    given["tool_calls"] = [_tool_call(call) for call in given.get("tool_calls", ())]
    return common_pb2.ChatMessage(**given)


def _content(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A string, or OpenAI's list of parts, all of them text."""
    if isinstance(content, str):
        return content
    if other := [part.get("type") for part in content if part.get("type") != "text"]:
        raise ValueError(f"only text can be in a message's content; got {other[0]!r}")
    return "".join(part["text"] for part in content)


def _tool_call(call: Mapping[str, Any]) -> common_pb2.ToolCall:
    function = call["function"]
    arguments = function.get("arguments", "{}")
    return common_pb2.ToolCall(
        id=call.get("id", ""),
        name=function["name"],
        arguments_json=arguments if isinstance(arguments, str) else _json(arguments),
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
