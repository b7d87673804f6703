"""What every request has, whatever it asks for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.edges import CHAT, COMPLETION, MODEL, Edge, chat_body, run_edge
from tests.router.meshes import configure, simulated
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[Edge]:
    async with run_edge(simulated()) as edge:
        yield edge


async def test_the_model_is_listed(edge: Edge) -> None:
    listed = (await edge.http.get("/v1/models")).json()
    alone = (await edge.http.get(f"/v1/models/{MODEL}")).json()

    assert listed == {"object": "list", "data": [alone]}
    assert (alone["id"], alone["object"], alone["max_model_len"]) == (MODEL, "model", 2048)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/a/b", 404, "model_not_found"),
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", COMPLETION, 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("TRACE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_what_is_not_there_is_refused_in_openai_s_form(
    edge: Edge, method: str, path: str, status: int, code: str
) -> None:
    response = await edge.http.request(method, path)

    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert error["message"]
    assert (status == 405) == ("allow" in response.headers)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=UTF-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
    ],
)
async def test_a_body_must_be_json(edge: Edge, headers: dict[str, str], status: int) -> None:
    body = b'{"prompt": "Once", "max_tokens": 1}'
    response = await edge.http.post(COMPLETION, content=body, headers=headers)

    assert response.status_code == status, response.text
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_a_body_that_is_no_json_is_refused_with_the_place(edge: Edge) -> None:
    headers = {"content-type": "application/json"}
    response = await edge.http.post(CHAT, content=b'{"messages": [,]}', headers=headers)

    assert response.status_code == 400
    assert "line 1, column 15" in response.json()["error"]["message"]


async def test_a_body_too_long_is_refused_and_the_client_hears_why(edge: Edge) -> None:
    await configure(edge.mesh.control.address, {"gateway.max_body_bytes": "2000"})
    await eventually(lambda: edge.node.gateway.settings.max_body_bytes == 2000)

    async def in_parts() -> AsyncIterator[bytes]:
        for _ in range(500):
            yield b" " * 1000

    headers = {"content-type": "application/json"}
    for content in (b" " * 500_000, in_parts()):
        response = await edge.http.post(CHAT, content=content, headers=headers)
        assert response.status_code == 413
        assert "2000 bytes" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
    assert (await edge.http.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200
    await configure(edge.mesh.control.address, {"gateway.max_body_bytes": "8388608"})


async def test_health_readiness_and_metrics_are_there(edge: Edge) -> None:
    assert (await edge.http.get("/health")).json() == {"status": "ok"}
    ready = await edge.http.get("/ready")
    assert ready.status_code == 200
    assert ready.json() == {"status": "ready", "reason": None, "routers": 1, "workers": 1}
    assert await edge.metric("firsttoken_gateway_ready") == 1
    assert (await edge.http.head("/health")).content == b""


async def test_an_id_that_is_sane_comes_back_and_another_is_made(edge: Edge) -> None:
    async def id_for(given: str) -> str:
        headers = {b"x-request-id": given.encode("latin-1")}
        response = await edge.http.get("/health", headers=headers)
        return str(response.headers["x-request-id"])

    assert await id_for("abc-1.2:3_x/y+z=") == "abc-1.2:3_x/y+z="
    for given in ("", "a b", "x" * 129, "<script>", "a\xff"):
        made = await id_for(given)
        assert made.startswith("req_")
        assert len(made) == 36
    refused = await edge.http.get("/nothing", headers={"x-request-id": "mine"})
    assert refused.headers["x-request-id"] == "mine"


async def test_a_trace_goes_on_and_its_own_span_comes_back(edge: Edge) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "tracestate": "a=b"}
    body = chat_body(max_tokens=1, include_ledger=True)
    response = await edge.http.post(CHAT, json=body, headers=headers)

    version, trace_id, span_id, flags = response.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE_ID, "01")
    assert span_id != "b7ad6b7169203331"
    assert response.json()["firsttoken"][0]["trace_id"] == TRACE_ID


@pytest.mark.parametrize("traceparent", ["nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
async def test_a_trace_begins_where_there_is_none(edge: Edge, traceparent: str) -> None:
    response = await edge.http.get("/health", headers={"traceparent": traceparent})

    assert len(response.headers["traceparent"]) == 55
    assert TRACE_ID not in response.headers["traceparent"]


async def test_each_request_is_a_line_in_the_log(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="services.gateway.app")

    await edge.http.post(CHAT, json=chat_body(max_tokens=1), headers={"x-request-id": "mine"})
    await edge.http.get("/nothing")

    found = [record.__dict__["firsttoken_fields"] for record in caplog.records]
    assert [(each["path"], each["status"]) for each in found] == [(CHAT, 200), ("/nothing", 404)]
    assert found[0]["request_id"] == "mine"
    assert found[0]["ttft_ms"] > 0


async def test_labels_do_not_grow_with_what_is_asked(edge: Edge) -> None:
    for number in range(20):
        await edge.http.get(f"/{number}")
        await edge.http.get(f"/v1/models/{number}")
        await edge.http.request(f"M{number}", "/v1/models")

    text = (await edge.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("firsttoken_gateway_requests_t")]
    assert len(lines) < 30
    assert not any("/19" in line for line in lines)


async def test_no_script_of_another_site_may_call_unless_it_is_allowed(edge: Edge) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert (await edge.http.options(CHAT, headers=asked)).status_code == 405
    plain = await edge.http.get("/v1/models", headers=asked)
    assert "access-control-allow-origin" not in plain.headers

    await configure(edge.mesh.control.address, {"gateway.cors_origins": '"https://a.example"'})
    await eventually(lambda: edge.node.gateway.settings.cors_origins)

    preflight = await edge.http.options(CHAT, headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    refused = await edge.http.post(CHAT, json={}, headers=asked)
    assert refused.status_code == 400
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    other = await edge.http.get("/v1/models", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    await configure(edge.mesh.control.address, {"gateway.cors_origins": '""'})
    await eventually(lambda: not edge.node.gateway.settings.cors_origins)


async def test_a_full_queue_says_when_to_come_back(edge: Edge) -> None:
    await configure(edge.mesh.control.address, {"router.max_queue": "0"})
    await eventually(lambda: edge.mesh.router.mesh.snapshot.config.router.max_queue == 0)
    endless = chat_body(max_tokens=2000, ignore_eos=True, stream=True)
    busy = [asyncio.ensure_future(edge.http.post(CHAT, json=endless)) for _ in range(30)]

    statuses = [response.status_code for response in await asyncio.gather(*busy)]

    assert 429 in statuses
    assert 200 in statuses
    await configure(edge.mesh.control.address, {"router.max_queue": "1024"})
