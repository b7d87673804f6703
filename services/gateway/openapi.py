"""The gateway's own OpenAPI 3.1 document. Pure."""

from __future__ import annotations

from typing import Any

from services.core.settings import GatewaySettings
from services.gateway.json_schema import Schema, object_of, ref
from services.gateway.schemas import components
from services.gateway.served import Served

_ERRORS = {
    "400": "A field is wrong: `param` names the first one.",
    "401": "No API key, or one that is nobody's, where tenants are configured.",
    "403": "The tenant may not have this.",
    "404": "No such model.",
    "408": "The body did not come in time.",
    "413": "The body is too long.",
    "415": "The body is not JSON.",
    "429": "Too many requests; see Retry-After.",
    "500": "A defect.",
    "503": "Nobody is there to answer; see Retry-After.",
    "504": "The answer took too long.",
}
_READ_ERRORS = ("401", "404")


def document(served: Served, settings: GatewaySettings) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "firsttoken gateway",
            "version": "1",
            "description": (
                "OpenAI-compatible. Fields that are not described are ignored; fields of"
                " OpenAI's that would change the answer and are not supported are refused."
            ),
        },
        "paths": _paths(served.model),
        # Without tenants nobody is asked for a key.
        "security": [{}, {"bearer": []}, {"apiKey": []}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": components(served, settings),
        },
    }


def _paths(model: str) -> dict[str, Any]:
    return {
        "/v1/chat/completions": {
            "post": _generation("createChatCompletion", "ChatCompletion", "Answer a chat.")
        },
        "/v1/completions": {
            "post": _generation("createCompletion", "Completion", "Go on with a text.")
        },
        "/v1/models": {"get": _read("listModels", "ModelList", "The model served.")},
        "/v1/models/{model}": {
            "get": {
                **_read("retrieveModel", "Model", "The model served."),
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "minLength": 1},
                        "example": model,
                    }
                ],
            }
        },
        "/health": {"get": _open("health", "Health", "200 while the process lives.")},
        "/ready": {
            "get": {
                **_open("ready", "Readiness", "200 while there is a router and a worker."),
                "responses": {
                    "200": _json("Ready.", ref("Readiness")),
                    "503": _json("Not ready.", ref("Readiness")),
                },
            }
        },
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "summary": "For Prometheus.",
                "security": [],
                "responses": {
                    "200": {
                        "description": "Prometheus's text format.",
                        "content": {"text/plain": {"schema": {"type": "string"}}},
                    }
                },
            }
        },
        "/openapi.json": {
            "get": {
                "operationId": "openapi",
                "summary": "This document.",
                "security": [],
                "responses": {"200": _json("This document.", {"type": "object"})},
            }
        },
    }


def _generation(operation: str, name: str, summary: str) -> dict[str, Any]:
    whole = _json("The answer; with `stream`, its chunks as they come.", ref(name))
    text = f"A {name}Chunk in JSON; the last event is [DONE]."
    data = {"data": {"type": "string", "description": text}}
    whole["content"]["text/event-stream"] = {"schema": object_of(data)}
    return {
        "operationId": operation,
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ref(f"{name}Request")}},
        },
        "responses": {"200": whole, **_errors(*_ERRORS)},
    }


def _read(operation: str, name: str, summary: str) -> dict[str, Any]:
    responses = {"200": _json(summary, ref(name)), **_errors(*_READ_ERRORS)}
    return {"operationId": operation, "summary": summary, "responses": responses}


def _open(operation: str, name: str, summary: str) -> dict[str, Any]:
    responses = {"200": _json(summary, ref(name))}
    return {"operationId": operation, "summary": summary, "security": [], "responses": responses}


def _errors(*statuses: str) -> dict[str, Any]:
    return {status: _json(_ERRORS[status], ref("Error")) for status in statuses}


def _json(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
