"""The bodies of answers, for the OpenAPI document. Pure."""

from __future__ import annotations

from services.gateway.json_schema import Schema, count, integer, list_of, nullable, object_of, ref


def _head(name: str, prefix: str) -> dict[str, Schema]:
    return {
        "id": {"type": "string", "pattern": f"^{prefix}-[0-9a-f]{{24}}$"},
        "object": {"const": name},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "system_fingerprint": {"type": "string"},
        "firsttoken": {**list_of(ref("Journey")), "description": "Where include_ledger asks."},
    }


def response(name: str, prefix: str, choice: Schema) -> Schema:
    properties = {**_head(name, prefix), "choices": list_of(choice), "usage": ref("Usage")}
    required = tuple(each for each in properties if each != "firsttoken")
    return object_of(properties, required=required)


def chunk(name: str, prefix: str, choice: Schema) -> Schema:
    """The data of one event."""
    properties = {
        **_head(name, prefix),
        "choices": {**list_of(choice), "description": "Empty in a chunk with usage."},
        "usage": nullable(ref("Usage")),
    }
    required = tuple(each for each in properties if each not in ("firsttoken", "usage"))
    return object_of(properties, required=required)


def chat_choice() -> Schema:
    message = object_of(
        {
            "role": {"const": "assistant"},
            "content": nullable({"type": "string"}),
            "refusal": {"type": "null"},
            "tool_calls": list_of(ref("ToolCall")),
        },
        required=("role", "content", "refusal"),
    )
    return object_of(
        {
            "index": count(),
            "message": message,
            "logprobs": nullable(_chat_logprobs()),
            "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        }
    )


def chat_delta_choice() -> Schema:
    return object_of(
        {
            "index": count(),
            "delta": {"type": "object"},
            "logprobs": nullable(_chat_logprobs()),
            "finish_reason": {"enum": ["stop", "length", "tool_calls", None]},
        }
    )


def _chat_logprobs() -> Schema:
    token = {
        "token": {"type": "string"},
        "logprob": {"type": "number"},
        "bytes": list_of(integer(0, 255)),
    }
    entry = object_of({**token, "top_logprobs": list_of(object_of(token))})
    return object_of({"content": list_of(entry), "refusal": {"type": "null"}})


def completion_choice() -> Schema:
    logprobs = object_of(
        {
            "tokens": list_of({"type": "string"}),
            "token_logprobs": list_of({"type": "number"}),
            "top_logprobs": list_of({"type": "object"}),
            "text_offset": list_of(count()),
        }
    )
    return object_of(
        {
            "index": count(),
            "text": {"type": "string"},
            "logprobs": nullable(logprobs),
            "finish_reason": {"enum": ["stop", "length", None]},
        }
    )


def tool_call() -> Schema:
    text = {"type": "string"}
    function = object_of({"name": text, "arguments": text})
    return object_of({"id": text, "type": {"const": "function"}, "function": function})


def usage() -> Schema:
    return object_of(
        {
            "prompt_tokens": count(),
            "completion_tokens": count(),
            "total_tokens": count(),
            "prompt_tokens_details": object_of({"cached_tokens": count()}),
        }
    )


def journey() -> Schema:
    return {
        "description": "The way of one answer through the mesh, and its TTFT ledger in ms.",
        **object_of(
            {
                "index": count(),
                "ledger": {"type": "object", "additionalProperties": {"type": "number"}},
                "hidden": {"type": "object", "additionalProperties": {"type": "number"}},
                "trace_id": {"type": "string"},
                "worker_id": {"type": "string"},
            }
        ),
    }


def model() -> Schema:
    return object_of(
        {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
            "max_model_len": count(),
        }
    )


def error() -> Schema:
    text = {"type": "string"}
    error = {"message": text, "type": text, "param": nullable(text), "code": nullable(text)}
    return object_of({"error": object_of(error)})
