from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

from services.core.settings import GatewaySettings, MeshSettings
from services.gateway.app import make_router
from services.gateway.openapi import document
from services.gateway.served import Served, load_served
from services.gateway.tools import ToolFormat, ToolSupport


@pytest.fixture(scope="module")
def served() -> Served:
    return load_served(MeshSettings(), max_context_tokens=2048)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_it_describes_every_route_and_no_other(served: Served) -> None:
    told = document(served, GatewaySettings())["paths"]

    # Handlers are not called here.
    routes = make_router(gateway=None).routes  # type: ignore[arg-type]
    there = {
        (route.path.replace(":path", ""), method.lower())
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in told.items() for method in methods} == there


def test_every_reference_leads_somewhere_and_every_schema_is_used(served: Served) -> None:
    whole = document(served, GatewaySettings())

    schemas = {f"#/components/schemas/{name}" for name in whole["components"]["schemas"]}
    used = set(references(whole))
    assert used <= schemas
    # An event of a stream is text to OpenAPI; its description names them.
    chunks = {name for name in schemas if name.endswith("Chunk")}
    assert schemas - used == chunks


def test_tools_are_told_only_where_the_model_can_be_shown_them(served: Served) -> None:
    with_tools = served._replace(tools=ToolSupport(renders_tools=True, format=ToolFormat.HERMES))

    def fields(of: Served) -> set[str]:
        schemas = document(of, GatewaySettings())["components"]["schemas"]
        return set(schemas["ChatCompletionRequest"]["properties"])

    assert fields(with_tools) - fields(served) == {"tools", "tool_choice", "parallel_tool_calls"}
