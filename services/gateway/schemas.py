"""All bodies by name, for the OpenAPI document. Pure."""

from __future__ import annotations

from services.core.settings import GatewaySettings
from services.gateway import answer_schemas, request_schemas
from services.gateway.json_schema import Schema, count, list_of, nullable, object_of, ref
from services.gateway.served import Served


def components(served: Served, settings: GatewaySettings) -> dict[str, Schema]:
    """By name."""
    return {
        "ChatCompletionRequest": request_schemas.chat_request(served, settings),
        "CompletionRequest": request_schemas.completion_request(served, settings),
        "Message": request_schemas.message(served),
        **({"Tool": request_schemas.tool()} if served.tools.renders_tools else {}),
        "ToolCall": answer_schemas.tool_call(),
        "ChatCompletion": answer_schemas.response(
            "chat.completion", "chatcmpl", answer_schemas.chat_choice()
        ),
        "ChatCompletionChunk": answer_schemas.chunk(
            "chat.completion.chunk", "chatcmpl", answer_schemas.chat_delta_choice()
        ),
        "Completion": answer_schemas.response(
            "text_completion", "cmpl", answer_schemas.completion_choice()
        ),
        "CompletionChunk": answer_schemas.chunk(
            "text_completion", "cmpl", answer_schemas.completion_choice()
        ),
        "Usage": answer_schemas.usage(),
        "Journey": answer_schemas.journey(),
        "Model": answer_schemas.model(),
        "ModelList": object_of({"object": {"const": "list"}, "data": list_of(ref("Model"))}),
        "Health": object_of({"status": {"const": "ok"}}),
        "Readiness": object_of(
            {
                "status": {"enum": ["ready", "not ready"]},
                "reason": nullable({"type": "string"}),
                "routers": count(),
                "workers": count(),
            }
        ),
        "Error": answer_schemas.error(),
    }
