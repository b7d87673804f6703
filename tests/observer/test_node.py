"""The observer as others meet it: a member of the mesh, told over gRPC and asked over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import httpx
import orjson
import pytest

from firsttoken.observer.v1 import observer_pb2, observer_pb2_grpc
from router.prompt import Prompt
from router.telling import Telling
from services.control.node import ControlNode
from services.core import attributes as names
from services.core import config
from services.core.keys import extend_keys, join_keys, root_key
from services.core.ledger import Ledger, Segment
from services.core.tenants import hash_key
from services.core.tokens import pack
from services.observer import requests
from services.observer.books import Books
from services.observer.node import ObserverNode
from services.runtime import hops
from services.runtime.channels import open_channel
from services.runtime.telemetry import TraceContext
from tests.runtime.collector import collecting
from tests.runtime.waiting import eventually

SENDER = observer_pb2.Sender(member_id="router-1", service="router", host="h", pid=7)


class Observed(NamedTuple):
    node: ObserverNode
    stub: observer_pb2_grpc.ObserverServiceStub
    http: httpx.AsyncClient

    @property
    def books(self) -> Books:
        return self.node.books

    async def tell(self, *messages: observer_pb2.ReportRequest) -> observer_pb2.ReportResponse:
        return await self.stub.Report(iter(messages))

    async def get(self, path: str, status: int = 200) -> Any:
        response = await self.http.get(path)
        assert response.status_code == status, response.text
        return response.json()


@asynccontextmanager
async def observing(**settings: Any) -> AsyncIterator[Observed]:
    async with (
        ControlNode(config=config.parse(settings)) as control,
        ObserverNode(control=control.address) as node,
        open_channel(node.report_address) as channel,
        httpx.AsyncClient(base_url=node.url, trust_env=False) as http,
    ):
        observed = Observed(node, observer_pb2_grpc.ObserverServiceStub(channel), http)
        # With each change of the members, what a stranger told is forgotten: let there be none.
        await eventually(
            lambda: any(each.state == "ready" and each.generation for each in node.books.members)
        )
        yield observed


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "GRACE_S", 0.05)


def told(ttft_s: float = 0.5, *, sampled: bool = True, error: str = "") -> hops.Told:
    ledger = Ledger(time.monotonic())
    ledger.record(Segment.QUEUE, ledger.arrived_s, ledger.arrived_s + ttft_s / 2)
    ledger.mark_first_token(ledger.arrived_s + ttft_s)
    context = TraceContext.new().child(sampled=sampled)
    return hops.Told(
        "router.generate", context, "", ledger, {}, error, ledger.arrived_s + ttft_s + 1
    )


def message(*requests: hops.Told, **fields: Any) -> observer_pb2.ReportRequest:
    offset_ns = time.time_ns() - time.monotonic_ns()
    batch = [hops.encode(requests, offset_ns)] if requests else []
    return observer_pb2.ReportRequest(sender=SENDER, hops_json=batch, **fields)


def ids(rows: Sequence[Any]) -> list[str]:
    return [row["trace_id"] for row in rows]


async def test_requests_that_were_told_are_listed_and_shown_whole() -> None:
    fast, slow = told(0.25), told(0.75)
    async with observing() as observed:
        await observed.tell(message(slow, fast))
        await eventually(lambda: len(observed.books.requests) == 2)

        newest = await observed.get("/api/requests")
        assert set(ids(newest)) == {fast.context.trace_id, slow.context.trace_id}
        assert ids(await observed.get("/api/requests?slow=1&limit=1")) == [slow.context.trace_id]
        trace = await observed.get(f"/api/requests/{slow.context.trace_id}")
        assert trace["ttft_s"] == pytest.approx(0.75)
        assert [hop["name"] for hop in trace["hops"]] == ["router.generate"]
        state = await observed.get("/api/state")
        assert state["now_unix_s"] == pytest.approx(time.time(), abs=60)


async def test_what_is_not_there_or_cannot_be_is_said() -> None:
    async with observing() as observed:
        assert "error" in await observed.get("/api/requests/0123", 404)
        assert "error" in await observed.get("/api/why/0123456789", 404)
        for limit in ("x", "0", "501", "9" * 5000):
            said = await observed.get(f"/api/requests?limit={limit}", 400)
            assert "limit" in said["error"]
        assert (await observed.http.get("/api/nothing")).status_code == 404
        assert (await observed.http.get("/../settings.py")).status_code == 404


async def test_the_page_takes_nothing_from_anywhere_else() -> None:
    async with observing() as observed:
        page = await observed.http.get("/")

    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"


async def test_metrics_are_those_that_processes_told() -> None:
    info = observer_pb2.MetricInfo(name="firsttoken.test.level", unit="{x}", text="Xs.")
    sample = observer_pb2.Sample(name=info.name, value=7, labels={"kind": "a"})
    async with observing() as observed:
        await observed.tell(message(metrics=[info], samples=[sample]))
        text = (await observed.http.get("/metrics")).text

    line = next(line for line in text.splitlines() if line.startswith("firsttoken_test_level{"))
    assert 'kind="a"' in line
    assert 'service_name="router"' in line or 'service="router"' in line
    assert line.endswith(" 7.0")


async def refusal(observed: Observed, bad: observer_pb2.ReportRequest) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await observed.tell(bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


async def test_what_makes_no_sense_is_refused_and_the_observer_goes_on() -> None:
    nobody = observer_pb2.Sender(service="x")
    async with observing() as observed:
        assert "sender: " in await refusal(observed, observer_pb2.ReportRequest())
        nameless = observer_pb2.ReportRequest(sender=nobody)
        assert "sender.member_id: " in await refusal(observed, nameless)
        for batch in (b"nonsense", b"[[], [[1, 2]]]", b'{"a": 1}', b"[" * 100_000):
            bad = observer_pb2.ReportRequest(sender=SENDER, hops_json=[batch])
            assert "hops_json: " in await refusal(observed, bad)
        empty = observer_pb2.ReportRequest(sender=SENDER, prompts=[observer_pb2.Prompt()])
        assert "prompts: " in await refusal(observed, empty)
        await observed.tell(message(told()))
        await eventually(lambda: len(observed.books.requests) == 1)


async def test_each_field_of_a_hop_is_checked() -> None:
    fields, [good] = orjson.loads(hops.encode([told()], 0))
    bad: dict[int, list[Any]] = {
        1: ["", "x", 7, None],
        2: ["0" * 15],
        3: ["zz"],
        4: [4],
        6: ["soon", None, []],
        7: ["late", 1e300],
        8: ["late", -1e300],
        9: [[["nowhere", 0, 1]], [["queue", 0]], 7],
        10: [[["queue", "x"]], 7],
        11: [[[1, 2]]],
        12: [None],
        13: [1, -2, None],
        14: [[1], None],
    }
    async with observing() as observed:
        for place, values in bad.items():
            for value in values:
                row = [*good[:place], value, *good[place + 1 :]]
                batch = orjson.dumps([fields, [row]])
                bad_hop = observer_pb2.ReportRequest(sender=SENDER, hops_json=[batch])
                assert "hops_json: " in await refusal(observed, bad_hop), (place, value)
        observed.books.check_integrity()
        assert len(observed.books.requests) == 0


async def test_a_defect_in_one_trace_does_not_stop_the_clock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with observing() as observed:
        tick, failed = observed.books.tick, asyncio.Event()

        def fail_once() -> None:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("a defect")
            tick()

        monkeypatch.setattr(observed.books, "tick", fail_once)
        await asyncio.wait_for(failed.wait(), 20)
        await observed.tell(message(told()))
        await eventually(lambda: len(observed.books.requests) == 1)

    assert "could not be taken together" in caplog.text


async def test_spans_of_slow_and_failed_requests_are_exported_whatever_the_head_chose() -> None:
    slow, failed, plain = (
        told(0.9, sampled=False),
        told(0.1, sampled=False, error="no worker"),
        told(0.1, sampled=False),
    )
    chosen = told(0.1)
    async with collecting() as collector:
        telemetry = {"otlp_endpoint": collector.endpoint}
        async with observing(telemetry=telemetry, observer={"slow_ttft_ms": 500}) as observed:
            await observed.tell(message(slow, failed, plain, chosen))
        exported = {span.trace_id.hex() for span in collector.spans}

    assert exported == {each.context.trace_id for each in (slow, failed, chosen)}


def with_prompt(tenant: str) -> observer_pb2.ReportRequest:
    """Of 100 tokens, the same for everybody, none of them cached."""
    prompt_ids = pack(range(100))
    root = root_key(model="m", block_tokens=64, tenant=tenant)
    prompt = Prompt(prompt_ids, join_keys([root, *extend_keys(root, prompt_ids, 64)]), 64)
    request = told()._replace(
        attributes={names.TENANT: tenant, names.INPUT_TOKENS: 100, names.CACHED_TOKENS: 0}
    )
    context = request.context
    given = Telling().message(
        prompt, trace_id=context.trace_id, span_id=context.span_id, tenant=tenant, now_s=0.0
    )
    return message(request, prompts=[given])


async def test_why_a_prompt_missed_is_told_and_is_on_its_span() -> None:
    async with collecting() as collector:
        telemetry = {"otlp_endpoint": collector.endpoint}
        async with observing(telemetry=telemetry) as observed:
            await observed.tell(with_prompt("ada"), with_prompt("bob"))
            await eventually(lambda: len(observed.books.requests) == 2)
            trace_id = list(observed.books.requests)[-1].trace_id
            assert (await observed.get(f"/api/why/{trace_id}"))["cause"] == "other_tenant"
            assert (await observed.get("/api/hygiene"))["requests"] == 0
            await eventually(lambda: len(collector.spans) == 4)
        span = next(
            each
            for each in collector.spans
            if each.trace_id.hex() == trace_id and each.name == "router.generate"
        )

    found = {each.key: each.value.string_value for each in span.attributes}
    assert found[names.MISS_CAUSE] == "other_tenant"
    assert "prefixes are not shared" in found[names.MISS_SUMMARY]


async def test_leaving_does_not_wait_for_those_who_tell() -> None:
    async with observing() as observed:

        async def forever() -> AsyncIterator[observer_pb2.ReportRequest]:
            yield message(told())
            await asyncio.Event().wait()

        call = observed.stub.Report(forever())
        await eventually(lambda: len(observed.books.requests) == 1)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 20
    assert call.done()


async def test_secrets_of_the_configuration_are_not_shown() -> None:
    tenants = {"acme": {"key_hashes": f"sha256:{'a' * 64}", "salt": "s3cret", "weight": 2.0}}
    async with observing(
        tenants=tenants, kvstore={"redis_url": "redis://user:s3cret@h:1"}
    ) as observed:
        shown = observed.books.window().config

    assert shown["tenants.acme.weight"] == 2.0
    assert "s3cret" not in str(shown)
    assert "a" * 64 not in str(shown)


async def test_the_page_opens_for_those_who_have_a_key() -> None:
    key = "ft-for-the-page"
    async with observing(observer={"key_hashes": hash_key(key)}) as observed:
        refused = await observed.http.get("/api/state")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        for path in ("/", "/metrics", "/api/window", "/api/why/0123456"):
            assert (await observed.http.get(path)).status_code == 401
        for wrong in (("", "x"), ("x", hash_key(key)), (key, "")):
            assert (await observed.http.get("/", auth=wrong)).status_code == 401
        for header in ("Bearer", "Basic ???", "Basic /w==", "Basic \xe9", f"Digest {key}"):
            headers = [(b"authorization", header.encode("latin-1"))]
            answer = await observed.http.get("/", headers=headers)
            assert answer.status_code == 401
        assert (await observed.http.get("/", auth=("anybody", key))).status_code == 200
        bearer = {"authorization": f"Bearer {key}"}
        assert (await observed.http.get("/metrics", headers=bearer)).status_code == 200


async def test_on_this_machine_alone_no_other_name_leads_to_it() -> None:
    async with observing() as observed:
        port = observed.node.address.rpartition(":")[2]
        for name in (f"localhost:{port}", f"127.0.0.1:{port}", "LOCALHOST"):
            answer = await observed.http.get("/", headers={"host": name})
            assert answer.status_code == 200, name
        for name in (f"evil.example:{port}", "127.0.0.1.evil.example", ""):
            answer = await observed.http.get("/api/state", headers={"host": name})
            assert answer.status_code in (400, 421), name
