"""A request is one trace, from its caller through every process."""

from __future__ import annotations

from typing import NoReturn

import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from firsttoken.client import MeshClient, MeshError
from services.core import config
from services.core.ledger import Segment
from services.core.settings import MeshConfig
from services.core.tenants import hash_key
from tests.conftest import MeshFactory
from tests.runtime.collector import attributes_of, collecting
from tests.runtime.waiting import eventually

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(endpoint: str) -> MeshConfig:
    return config.parse(
        {"telemetry": {"otlp_endpoint": endpoint}, "worker": {"engine": "simulated"}}
    )


async def test_every_hop_is_a_span_of_the_caller_s_trace(mesh_of: MeshFactory) -> None:
    async with (
        collecting() as collector,
        mesh_of(traced(collector.endpoint), with_observer=True) as mesh,
    ):
        await mesh.client.complete("Hello", max_tokens=2, traceparent=f"00-{TRACE_ID}-{CALLER}-01")
    router = collector.named("router.generate")
    below = {span.name for span in collector.spans if span.parent_span_id == router.span_id}

    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert router.parent_span_id.hex() == CALLER
    assert below == {"tokenizer.encode", "worker.generate", Segment.QUEUE, Segment.ROUTE}
    assert attributes_of(router)["firsttoken.direct"] is True
    assert "first_token" in {event.name for event in router.events}


async def test_a_refused_request_is_a_span_that_says_why(mesh_of: MeshFactory) -> None:
    async with (
        collecting() as collector,
        mesh_of(traced(collector.endpoint), with_observer=True) as mesh,
    ):
        with pytest.raises(MeshError):
            await mesh.client.complete("")
    router = collector.named("router.generate")

    assert router.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert router.status.message == "text: must not be empty"


async def test_a_request_that_meets_a_defect_is_a_failed_span(
    mesh_of: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_request(*given: object) -> NoReturn:
        raise ZeroDivisionError

    async with (
        collecting() as collector,
        mesh_of(traced(collector.endpoint), with_observer=True) as mesh,
    ):
        for way in ("planning", "proxied"):
            monkeypatch.setattr(f"router.{way}.make_request", make_request)
        with pytest.raises(MeshError, match="internal error") as failure:
            await mesh.client.complete("Hello")
    router = collector.named("router.generate")

    assert router.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert attributes_of(router)["error.type"] == "INTERNAL"
    assert failure.value.ledger["preprocess"] > 0


async def test_a_span_names_the_tenant_and_never_its_key(mesh_of: MeshFactory) -> None:
    key = "ft-traced"
    tenants = {"acme": {"key_hashes": hash_key(key)}}
    async with collecting() as collector:
        settings = config.nest(config.flatten(traced(collector.endpoint)))
        known = config.parse({**settings, "tenants": tenants})
        async with (
            mesh_of(known, with_observer=True) as mesh,
            MeshClient(mesh.router.address, api_key=key) as client,
        ):
            await client.complete("Hello", max_tokens=2)
    router = collector.named("router.generate")

    assert attributes_of(router)["firsttoken.tenant"] == "acme"
    assert not any(key in str(span) for span in collector.spans)


async def test_who_has_as_much_as_it_may_is_refused_in_its_trace_and_with_a_ledger(
    mesh_of: MeshFactory,
) -> None:
    key = "ft-traced"
    tenants = {"acme": {"key_hashes": hash_key(key), "requests_per_s": 0.001, "burst_requests": 1}}
    settings = config.parse({"worker": {"engine": "simulated"}, "tenants": tenants})
    async with (
        mesh_of(settings, with_observer=True) as mesh,
        MeshClient(mesh.router.address, api_key=key) as client,
    ):
        assert mesh.observer is not None
        await client.complete("Hello", max_tokens=1)
        with pytest.raises(MeshError, match="asks too often") as refusal:
            await client.complete("Hello", traceparent=f"00-{TRACE_ID}-{CALLER}-01")
        requests = mesh.observer.books.requests
        await eventually(lambda: len(requests) == 2)
    [request] = requests.of_trace(TRACE_ID)

    assert refusal.value.ledger["preprocess"] > 0
    assert "asks too often" in request.error
    assert (request.tenant, request.ttft_s) == ("acme", None)


async def test_a_span_says_how_the_worker_was_chosen_and_what_it_had(mesh_of: MeshFactory) -> None:
    async with (
        collecting() as collector,
        mesh_of(traced(collector.endpoint), with_observer=True) as mesh,
    ):
        answer = await mesh.client.complete("Hello " * 200, max_tokens=2)
    attributes = {
        each.key.removeprefix("firsttoken.routing."): getattr(
            each.value, each.value.WhichOneof("value") or ""
        )
        for each in collector.named("router.generate").attributes
        if each.key.startswith("firsttoken.routing.")
    }
    assert attributes.pop("cost_s") > 0
    assert attributes == {
        "strategy": answer.routing.strategy,
        "reason": answer.routing.reason,
        "candidates": 1,
        "predicted_cached_tokens": 0,
        "actual_cached_tokens": 0,
        "best_elsewhere_cached_tokens": 0,
    }


async def test_an_answer_that_is_broken_off_has_the_first_token_s_ledger(
    mesh_of: MeshFactory,
) -> None:
    settings = config.parse({"worker": {"engine": "simulated"}})
    async with mesh_of(settings, with_observer=True) as mesh:
        assert mesh.observer is not None
        async with mesh.client.generate("Hello", max_tokens=500, ignore_eos=True) as stream:
            await anext(stream)
        requests = mesh.observer.books.requests
        await eventually(lambda: len(requests) == 1)
    [request] = requests
    spent_s = dict(request.spent_s)

    assert request.error
    assert request.ttft_s is not None
    assert spent_s[Segment.PREFILL] > 0
    assert sum(spent_s.values()) > request.ttft_s / 2
