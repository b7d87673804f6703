"""Words for JSON Schema. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def object_of(properties: dict[str, Schema], required: tuple[str, ...] | None = None) -> Schema:
    """Unless said otherwise all are there."""
    needed = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": needed}


def optional(schema: Schema, description: str) -> Schema:
    return {**nullable(schema), "description": description}


def nullable(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most
    return schema


def integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def count() -> Schema:
    return {"type": "integer", "minimum": 0}
