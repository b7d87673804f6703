"""The bodies of requests and answers as JSON Schema, for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

from services.core.sampling import MAX_LOGPROBS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from services.core.sampling import MAX_STOP_TOKEN_IDS as MAX_STOP_IDS
from services.core.settings import GatewaySettings
from services.gateway.fields import MAX_UINT32
from services.gateway.request import MAX_INT64, MAX_SALT_CHARACTERS
from services.gateway.served import Served

Schema: TypeAlias = dict[str, Any]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def components(served: Served, settings: GatewaySettings) -> dict[str, Schema]:
    """By name."""
    return {
        "ChatCompletionRequest": _chat_request(served, settings),
        "CompletionRequest": _completion_request(served, settings),
        "Message": _message(),
        "Tool": _tool(),
        "ToolCall": _tool_call(),
        "ChatCompletion": _response("chat.completion", "chatcmpl", _chat_choice()),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", "chatcmpl", _chat_delta_choice()),
        "Completion": _response("text_completion", "cmpl", _completion_choice()),
        "CompletionChunk": _chunk("text_completion", "cmpl", _completion_choice()),
        "Usage": _usage(),
        "Journey": _journey(),
        "Model": _model(),
        "ModelList": _object({"object": {"const": "list"}, "data": _list_of(ref("Model"))}),
        "Health": _object({"status": {"const": "ok"}}),
        "Readiness": _object(
            {
                "status": {"enum": ["ready", "not ready"]},
                "reason": _nullable({"type": "string"}),
                "routers": _count(),
                "workers": _count(),
            }
        ),
        "Error": _error(),
    }


def _common(served: Served, settings: GatewaySettings) -> dict[str, Schema]:
    """What both requests can have."""
    return {
        "model": _optional({"enum": [served.model, ""]}, "Absent: the only one."),
        "n": _optional(_integer(1, settings.max_choices), "Answers. Default 1."),
        "stream": _optional({"type": "boolean"}, "Send the answer as it comes. Default false."),
        "stream_options": _optional(
            _object(
                {
                    "include_usage": _optional({"type": "boolean"}, "Usage in a last chunk."),
                    "include_ledger": _optional(
                        {"type": "boolean"}, "Extension: where the time to first token went."
                    ),
                },
                required=(),
            ),
            "Only with stream.",
        ),
        "include_ledger": _optional(
            {"type": "boolean"}, "Extension: where the time to first token went."
        ),
        "stop": _optional(
            {"anyOf": [_stop_string(), _list_of(_stop_string(), most=MAX_STOP_STRINGS)]},
            "The answer ends before the first of these.",
        ),
        "stop_token_ids": _optional(
            _list_of(_integer(0, served.vocabulary_size - 1), most=MAX_STOP_IDS), "Extension."
        ),
        "seed": _optional(
            _integer(-MAX_INT64 - 1, MAX_INT64), "The same seed gives the same answer."
        ),
        "temperature": _optional(
            _number(0, 100), f"0 is greedy. Default {settings.default_temperature:g}."
        ),
        "top_p": _optional({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "Default 1."),
        "top_k": _optional(_integer(-1, MAX_UINT32), "Extension. 0 and -1: all. Default 0."),
        "min_p": _optional(_number(0, 1), "Extension. Default 0."),
        "repetition_penalty": _optional(
            {"type": "number", "exclusiveMinimum": 0, "maximum": 10}, "Extension. Default 1."
        ),
        "presence_penalty": _optional(_number(-2, 2), "Default 0."),
        "frequency_penalty": _optional(_number(-2, 2), "Default 0."),
        "ignore_eos": _optional({"type": "boolean"}, "Extension, for benchmarks."),
        "skip_special_tokens": _optional(
            {"type": "boolean"}, "Extension. Leave control tokens out of the text. Default true."
        ),
        "user": _optional({"type": "string"}, "Accepted, and not used."),
        "priority": _optional(
            {"anyOf": [{"enum": ["interactive", "batch"]}, _integer(-MAX_UINT32, MAX_UINT32)]},
            "Extension: the class of the request. A number above 0 is batch.",
        ),
        "service_tier": _optional(
            {"enum": ["auto", "default", "priority", "scale", "flex", "batch"]},
            "flex and batch: the request may wait.",
        ),
        "cache_salt": _optional(
            {"type": "string", "maxLength": MAX_SALT_CHARACTERS},
            "Extension: prefixes are shared only with requests of the same salt.",
        ),
        "response_format": _optional(
            _object({"type": {"const": "text"}}), "Answers cannot be held to another form."
        ),
    }


def _chat_request(served: Served, settings: GatewaySettings) -> Schema:
    longest = served.max_context_tokens
    properties = {
        "messages": _list_of(ref("Message"), least=1),
        **_common(served, settings),
        "max_tokens": _optional(_integer(1, longest), "Default: to the end of the context."),
        "max_completion_tokens": _optional(_integer(1, longest), "The newer name of max_tokens."),
        "logprobs": _optional({"type": "boolean"}, "Default false."),
        "top_logprobs": _optional(_integer(0, MAX_LOGPROBS), "Only with logprobs."),
        "chat_template_kwargs": _optional({"type": "object"}, "Extension."),
        "add_generation_prompt": _optional({"type": "boolean"}, "Extension. Default true."),
    }
    if served.tools.renders_tools:
        properties |= {
            "tools": _optional(_list_of(ref("Tool")), "Functions that the model may call."),
            "tool_choice": _optional({"enum": ["none", "auto"]}, "auto: only with tools."),
            "parallel_tool_calls": _optional({"type": "boolean"}, "Default true."),
        }
    return {
        **_object(properties, required=("messages",)),
        "dependentSchemas": {
            "top_logprobs": {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
            **_needs_stream(),
        },
    }


def _completion_request(served: Served, settings: GatewaySettings) -> Schema:
    ids = _list_of(_integer(0, served.vocabulary_size - 1), least=1)
    text = {"type": "string", "minLength": 1}
    properties = {
        "prompt": {"anyOf": [text, ids, _list_of({"anyOf": [text, ids]}, least=1)]},
        **_common(served, settings),
        "max_tokens": _optional(_integer(1, served.max_context_tokens), "Default 16."),
        "logprobs": _optional(_integer(0, MAX_LOGPROBS), "Alternatives for each token."),
        "echo": _optional({"type": "boolean"}, "Begin with the prompt. Not with logprobs."),
    }
    return {
        **_object(properties, required=("prompt",)),
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


def _message() -> Schema:
    text = {"type": "string"}
    part = _object({"type": {"const": "text"}, "text": text})
    content = {"anyOf": [text, _list_of(part)]}
    return {
        "description": "Of a role that the model's chat template knows.",
        **_object(
            {
                "role": {"type": "string", "minLength": 1},
                "content": _nullable(content),
                "name": _nullable(text),
                "tool_calls": _nullable(_list_of(ref("ToolCall"))),
                "tool_call_id": _nullable(text),
                "reasoning_content": _nullable(text),
            },
            required=("role",),
        ),
    }


def _tool() -> Schema:
    function = _object(
        {
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
            "description": _nullable({"type": "string"}),
            "parameters": _nullable({"type": "object"}),
            "strict": _nullable({"const": False}),
        },
        required=("name",),
    )
    return _object({"type": {"const": "function"}, "function": function})


def _tool_call() -> Schema:
    text = {"type": "string"}
    function = _object({"name": text, "arguments": text})
    return _object({"id": text, "type": {"const": "function"}, "function": function})


def _head(name: str, prefix: str) -> dict[str, Schema]:
    return {
        "id": {"type": "string", "pattern": f"^{prefix}-[0-9a-f]{{24}}$"},
        "object": {"const": name},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "system_fingerprint": {"type": "string"},
        "firsttoken": {**_list_of(ref("Journey")), "description": "Where include_ledger asks."},
    }


def _response(name: str, prefix: str, choice: Schema) -> Schema:
    properties = {**_head(name, prefix), "choices": _list_of(choice), "usage": ref("Usage")}
    required = tuple(each for each in properties if each != "firsttoken")
    return _object(properties, required=required)


def _chunk(name: str, prefix: str, choice: Schema) -> Schema:
    """The data of one event."""
    properties = {
        **_head(name, prefix),
        "choices": {**_list_of(choice), "description": "Empty in a chunk with usage."},
        "usage": _nullable(ref("Usage")),
    }
    required = tuple(each for each in properties if each not in ("firsttoken", "usage"))
    return _object(properties, required=required)


def _chat_choice() -> Schema:
    message = _object(
        {
            "role": {"const": "assistant"},
            "content": _nullable({"type": "string"}),
            "refusal": {"type": "null"},
            "tool_calls": _list_of(ref("ToolCall")),
        },
        required=("role", "content", "refusal"),
    )
    return _object(
        {
            "index": _count(),
            "message": message,
            "logprobs": _nullable(_chat_logprobs()),
            "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        }
    )


def _chat_delta_choice() -> Schema:
    return _object(
        {
            "index": _count(),
            "delta": {"type": "object"},
            "logprobs": _nullable(_chat_logprobs()),
            "finish_reason": {"enum": ["stop", "length", "tool_calls", None]},
        }
    )


def _chat_logprobs() -> Schema:
    token = {
        "token": {"type": "string"},
        "logprob": {"type": "number"},
        "bytes": _list_of(_integer(0, 255)),
    }
    entry = _object({**token, "top_logprobs": _list_of(_object(token))})
    return _object({"content": _list_of(entry), "refusal": {"type": "null"}})


def _completion_choice() -> Schema:
    logprobs = _object(
        {
            "tokens": _list_of({"type": "string"}),
            "token_logprobs": _list_of({"type": "number"}),
            "top_logprobs": _list_of({"type": "object"}),
            "text_offset": _list_of(_count()),
        }
    )
    return _object(
        {
            "index": _count(),
            "text": {"type": "string"},
            "logprobs": _nullable(logprobs),
            "finish_reason": {"enum": ["stop", "length", None]},
        }
    )


def _usage() -> Schema:
    return _object(
        {
            "prompt_tokens": _count(),
            "completion_tokens": _count(),
            "total_tokens": _count(),
            "prompt_tokens_details": _object({"cached_tokens": _count()}),
        }
    )


def _journey() -> Schema:
    return {
        "description": "The way of one answer through the mesh, and its TTFT ledger in ms.",
        **_object(
            {
                "index": _count(),
                "ledger": {"type": "object", "additionalProperties": {"type": "number"}},
                "trace_id": {"type": "string"},
                "worker_id": {"type": "string"},
            }
        ),
    }


def _model() -> Schema:
    return _object(
        {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
            "max_model_len": _count(),
        }
    )


def _error() -> Schema:
    text = {"type": "string"}
    error = {"message": text, "type": text, "param": _nullable(text), "code": _nullable(text)}
    return _object({"error": _object(error)})


def _object(properties: dict[str, Schema], required: tuple[str, ...] | None = None) -> Schema:
    """Unless said otherwise all are there."""
    needed = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": needed}


def _optional(schema: Schema, description: str) -> Schema:
    return {**_nullable(schema), "description": description}


def _nullable(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {"anyOf": [schema, {"type": "null"}]}


def _list_of(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most
    return schema


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _stop_string() -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}


def _count() -> Schema:
    return {"type": "integer", "minimum": 0}
