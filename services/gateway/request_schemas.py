"""The bodies of requests, for the OpenAPI document. Pure."""

from __future__ import annotations

from services.core.keys import MAX_SALT_CHARACTERS
from services.core.sampling import (
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from services.core.settings import GatewaySettings
from services.gateway.fields import MAX_UINT32
from services.gateway.json_schema import (
    Schema,
    integer,
    list_of,
    nullable,
    number,
    object_of,
    optional,
    ref,
)
from services.gateway.request import MAX_INT64
from services.gateway.served import Served
from services.gateway.tools import MAX_TOOLS


def _common(served: Served, settings: GatewaySettings) -> dict[str, Schema]:
    """What both requests can have."""
    return {
        "model": optional({"enum": [served.model, ""]}, "Absent: the only one."),
        "n": optional(integer(1, settings.max_choices), "Answers. Default 1."),
        "stream": optional({"type": "boolean"}, "Send the answer as it comes. Default false."),
        "stream_options": optional(
            object_of(
                {
                    "include_usage": optional({"type": "boolean"}, "Usage in a last chunk."),
                    "include_ledger": _include_ledger(),
                },
                required=(),
            ),
            "Only with stream.",
        ),
        "include_ledger": _include_ledger(),
        **_sampling(served, settings),
        "user": optional({"type": "string"}, "Accepted, and not used."),
        "priority": optional(
            {"anyOf": [{"enum": ["interactive", "batch"]}, integer(-MAX_UINT32, MAX_UINT32)]},
            "Extension: the class of the request. A number above 0 is batch.",
        ),
        "service_tier": optional(
            {"enum": ["auto", "default", "priority", "scale", "flex", "batch"]},
            "flex and batch: the request may wait.",
        ),
        "cache_salt": optional(
            {"type": "string", "maxLength": MAX_SALT_CHARACTERS},
            "Extension: prefixes are shared only with requests of the same salt.",
        ),
        "response_format": optional(
            object_of({"type": {"const": "text"}}), "Answers cannot be held to another form."
        ),
    }


def _sampling(served: Served, settings: GatewaySettings) -> dict[str, Schema]:
    return {
        "stop": optional(
            {"anyOf": [_stop_string(), list_of(_stop_string(), most=MAX_STOP_STRINGS)]},
            "The answer ends before the first of these.",
        ),
        "stop_token_ids": optional(
            list_of(integer(0, served.vocabulary_size - 1), most=MAX_STOP_TOKEN_IDS), "Extension."
        ),
        "seed": optional(
            integer(-MAX_INT64 - 1, MAX_INT64), "The same seed gives the same answer."
        ),
        "temperature": optional(
            number(0, 100), f"0 is greedy. Default {settings.default_temperature:g}."
        ),
        "top_p": optional({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "Default 1."),
        "top_k": optional(integer(-1, MAX_UINT32), "Extension. 0 and -1: all. Default 0."),
        "min_p": optional(number(0, 1), "Extension. Default 0."),
        "repetition_penalty": optional(
            {"type": "number", "exclusiveMinimum": 0, "maximum": 10}, "Extension. Default 1."
        ),
        "presence_penalty": optional(number(-2, 2), "Default 0."),
        "frequency_penalty": optional(number(-2, 2), "Default 0."),
        "ignore_eos": optional({"type": "boolean"}, "Extension, for benchmarks."),
        "skip_special_tokens": optional(
            {"type": "boolean"}, "Extension. Leave control tokens out of the text. Default true."
        ),
    }


def chat_request(served: Served, settings: GatewaySettings) -> Schema:
    longest = served.max_context_tokens
    properties = {
        "messages": list_of(ref("Message"), least=1),
        **_common(served, settings),
        "max_tokens": optional(integer(1, longest), "Default: to the end of the context."),
        "max_completion_tokens": optional(integer(1, longest), "The newer name of max_tokens."),
        "logprobs": optional({"type": "boolean"}, "Default false."),
        "top_logprobs": optional(integer(0, MAX_LOGPROBS), "Only with logprobs."),
        "chat_template_kwargs": optional({"type": "object"}, "Extension."),
        "add_generation_prompt": optional({"type": "boolean"}, "Extension. Default true."),
    }
    rules = {
        "top_logprobs": {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
        **_needs_stream(),
    }
    if served.tools.renders_tools:
        properties |= {
            "tools": optional(
                list_of(ref("Tool"), most=MAX_TOOLS),
                "Functions that the model may call, each with a name of its own.",
            ),
            "tool_choice": optional({"enum": ["none", "auto"]}, "auto: only with tools."),
            "parallel_tool_calls": optional({"type": "boolean"}, "Default true."),
        }
        tools = {"tools": {"type": "array", "minItems": 1}}
        not_auto = {"properties": {"tool_choice": {"enum": ["none", None]}}}
        rules["tool_choice"] = {"anyOf": [not_auto, object_of(tools)]}
    return {**object_of(properties, required=("messages",)), "dependentSchemas": rules}


def completion_request(served: Served, settings: GatewaySettings) -> Schema:
    ids = list_of(integer(0, served.vocabulary_size - 1), least=1)
    text = {"type": "string", "minLength": 1}
    several = list_of({"anyOf": [text, ids]}, least=1, most=settings.max_choices)
    properties = {
        "prompt": {"anyOf": [text, ids, several]},
        **_common(served, settings),
        "max_tokens": optional(integer(1, served.max_context_tokens), "Default 16."),
        "logprobs": optional(integer(0, MAX_LOGPROBS), "Alternatives for each token."),
        "echo": optional({"type": "boolean"}, "Begin with the prompt. Not with logprobs."),
    }
    return {
        **object_of(properties, required=("prompt",)),
        "dependentSchemas": {
            "logprobs": {"properties": {"echo": {"enum": [False, None]}}},
            **_needs_stream(),
        },
    }


def _needs_stream() -> dict[str, Schema]:
    streamed = {"properties": {"stream": {"const": True}}, "required": ["stream"]}
    return {
        "stream_options": {
            "anyOf": [{"properties": {"stream_options": {"type": "null"}}}, streamed]
        }
    }


def message(served: Served) -> Schema:
    """What a template would have to leave out cannot be all that a message has."""
    text = {"type": "string"}
    part = object_of({"type": {"const": "text"}, "text": text})
    content = {"anyOf": [text, list_of(part)]}
    arguments = {"type": "string", "contentMediaType": "application/json", "format": "json"}
    function = object_of({"name": text, "arguments": nullable(arguments)}, required=("name",))
    call = object_of(
        {"id": nullable(text), "type": nullable({"const": "function"}), "function": function},
        required=("function",),
    )
    enough = [object_of({"content": content})]
    if served.tools.renders_tools:
        enough.append(object_of({"tool_calls": list_of(call, least=1)}))
    if "reasoning_content" in served.vocabulary.chat_template:
        enough.append(object_of({"reasoning_content": {"type": "string", "minLength": 1}}))
    return {
        "description": "Of a role that the model's chat template knows.",
        **object_of(
            {
                "role": {"type": "string", "minLength": 1},
                "content": nullable(content),
                "name": nullable(text),
                "tool_calls": nullable(list_of(call)),
                "tool_call_id": nullable(text),
                "reasoning_content": nullable(text),
            },
            required=("role",),
        ),
        "anyOf": enough,
    }


def tool() -> Schema:
    function = object_of(
        {
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
            "description": nullable({"type": "string"}),
            "parameters": nullable({"type": "object"}),
            "strict": nullable({"const": False}),
        },
        required=("name",),
    )
    return object_of({"type": {"const": "function"}, "function": function})


def _stop_string() -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}


def _include_ledger() -> Schema:
    return optional({"type": "boolean"}, "Extension: where the time to first token went.")
