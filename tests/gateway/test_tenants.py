"""Who may ask, where callers are told apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.core.config import flatten, nest, parse
from services.core.settings import MeshConfig
from services.core.tenants import hash_key
from tests.gateway.edges import CHAT, COMPLETION, MODEL, Edge, chat_body, refusal, run_edge
from tests.router.meshes import configure, simulated
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY, GOOD = "ft-acme", {"authorization": "Bearer ft-acme"}
BODY = {**chat_body(max_tokens=1), "prompt": "Once"}


def config() -> MeshConfig:
    tenant = {"key_hashes": hash_key(KEY), "max_class": "batch", "max_concurrent": 1}
    timed = simulated(timing={"decode_step_ms": 2.0})
    return parse({**nest(flatten(timed)), "tenants": {"acme": tenant}})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[Edge]:
    async with run_edge(config()) as edge:
        yield edge


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/v1/models", f"/v1/models/{MODEL}"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Basic ft-acme"},
        {"x-api-key": "wrong"},
        {"x-api-key": b"ft-acme\xff"},
        {"x-api-key": "x" * 3000},
        {"x-api-key": "x" * 9000},
        {"authorization": "Bearer ключ".encode()},
        {"authorization": "Bearer wrong", "x-api-key": KEY},
        {"firsttoken-tenant": "acme"},
    ],
)
async def test_nobody_without_a_key_is_told_anything(
    edge: Edge, path: str, headers: dict[str, Any]
) -> None:
    method = "GET" if "models" in path else "POST"
    response = await edge.http.request(method, path, json=BODY, headers=headers)

    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert MODEL not in response.text


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
@pytest.mark.parametrize("key", [b"x" * 9000, "ключ".encode()])
async def test_a_key_that_can_be_nobody_s_is_not_taken_for_none(
    edge: Edge, path: str, key: bytes
) -> None:
    method = "GET" if "models" in path else "POST"
    response = await edge.http.request(method, path, json=BODY, headers={b"x-api-key": key})

    assert "no tenant has this API key" in response.json()["error"]["message"]


async def test_many_keys_are_no_better_than_one(edge: Edge) -> None:
    error = refusal(await edge.http.post(CHAT, json=BODY, headers=[("x-api-key", KEY)] * 9))

    assert (error.status, error.code) == (400, "too_many_keys")


async def test_a_bad_key_is_refused_before_the_body_is_read(edge: Edge) -> None:
    response = await edge.http.post(CHAT, content=b"no json")

    assert response.status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/openapi.json"])
async def test_what_operators_need_asks_nobody(edge: Edge, path: str) -> None:
    assert (await edge.http.get(path)).status_code == 200


@pytest.mark.parametrize("headers", [GOOD, {"x-api-key": KEY}, {**GOOD, "x-api-key": KEY}])
async def test_a_key_is_taken_in_either_header(edge: Edge, headers: dict[str, str]) -> None:
    assert (await edge.http.get("/v1/models", headers=headers)).status_code == 200
    for path in (CHAT, COMPLETION):
        response = await edge.http.post(path, json=BODY, headers=headers)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_who_asks_one_after_the_other_never_has_two_at_once(edge: Edge, stream: bool) -> None:
    for _ in range(100):
        response = await edge.http.post(CHAT, json={**BODY, "stream": stream}, headers=GOOD)
        assert response.status_code == 200, response.text


async def test_a_class_above_the_tenant_s_is_forbidden(edge: Edge) -> None:
    error = await edge.refused(CHAT, {**BODY, "priority": "interactive"}, **GOOD)

    assert (error.status, error.type) == (403, "permission_error")


async def test_more_at_once_than_the_tenant_may_is_too_many(edge: Edge) -> None:
    long = {**BODY, "max_tokens": 500, "ignore_eos": True, "stream": True}
    async with edge.http.stream("POST", CHAT, json=long, headers=GOOD) as answer:
        assert answer.status_code == 200
        error = await edge.refused(CHAT, BODY, **GOOD)

    assert (error.status, error.type) == (429, "rate_limit_error")
    assert error.code == "rate_limit_exceeded"
    assert int(error.headers["retry-after"]) >= 1
    assert int(error.headers["retry-after-ms"]) >= 1


async def test_more_answers_than_the_tenant_may_have_at_once_are_refused_for_good(
    edge: Edge,
) -> None:
    error = await edge.refused(CHAT, {**BODY, "n": 2}, **GOOD)

    assert (error.status, error.param) == (400, "n")
    assert "max_concurrent" in error.message


async def test_more_answers_than_the_tenant_s_burst_are_refused_for_good(edge: Edge) -> None:
    bounds = {"requests_per_s": "1.0", "burst_requests": "3", "max_concurrent": "0"}
    await configure(
        edge.mesh.control.address, {f"tenants.acme.{key}": bounds[key] for key in bounds}
    )
    most = {"max_concurrent": "1", "requests_per_s": "0.0"}
    gateway = edge.node.gateway
    await eventually(lambda: gateway.snapshot.config.tenants["acme"].requests_per_s)
    error = await edge.refused(CHAT, {**BODY, "n": 4}, **GOOD)
    await configure(edge.mesh.control.address, {f"tenants.acme.{key}": most[key] for key in most})

    assert (error.status, error.param) == (400, "n")
    assert "burst_requests" in error.message


async def test_a_key_can_be_changed_while_it_runs(edge: Edge) -> None:
    hashes = f'"{hash_key(KEY)} {hash_key("ft-next")}"'
    await configure(edge.mesh.control.address, {"tenants.acme.key_hashes": hashes})

    async def is_taken() -> bool:
        headers = {"authorization": "Bearer ft-next"}
        response = await edge.http.post(CHAT, json=BODY, headers=headers)
        return response.status_code == 200

    await eventually(is_taken)
