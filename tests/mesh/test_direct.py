"""Answers that clients fetch from workers, past the router that planned them."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio

from firsttoken._direct import DirectCall, Reluctance, Ways
from firsttoken.client import SEGMENTS, Answer, MeshClient, MeshError, Options
from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2, direct_pb2_grpc
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from services.core import config as mesh_config
from services.core.tenants import hash_key, new_key
from services.core.tokens import unpack
from services.runtime.channels import open_channel
from tests.conftest import Mesh, MeshFactory
from tests.router.meshes import configure
from tests.runtime.ports import free_port
from tests.runtime.waiting import eventually

DRAWN: Options = {"max_tokens": 40, "temperature": 1.0, "seed": 7, "ignore_eos": True}
SAMPLING = common_pb2.SamplingParams(max_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
PROMPT = "The sea is wide and the sky above it is grey today. " * 8
CONFIG = mesh_config.parse(
    {
        "mesh": {"block_tokens": 16},
        "worker": {
            "engine": "simulated",
            "num_slots": 4,
            "simulated": {"prefill_tokens_per_s": 1e6, "decode_step_ms": 2.0},
        },
    }
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(mesh_of: MeshFactory) -> AsyncIterator[Mesh]:
    async with mesh_of(CONFIG, num_workers=2) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(shared: Mesh) -> AsyncIterator[Mesh]:
    """Ready, and idle again in the end."""
    await eventually(lambda: all(plans(shared).address_of(each.id) for each in shared.workers))
    yield shared
    await idle(shared)


async def idle(mesh: Mesh) -> None:
    router = mesh.router.mesh
    await eventually(lambda: not plans(mesh).num_open)
    await eventually(lambda: not router.limits.num_running)
    await eventually(lambda: all(worker.is_idle for worker in mesh.workers))
    router.dispatcher.check_idle()
    router.plans.check_idle()
    counts = plans(mesh).counts
    assert counts.planned == counts.answered + counts.failed + counts.expired + counts.lost


def plans(mesh: Mesh) -> Any:
    return mesh.router.mesh.plans


def stub_of(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(channel)


async def plan(
    mesh: Mesh, *, timeout_s: float | None = None, **fields: Any
) -> inference_pb2.PlanResponse:
    async with open_channel(mesh.router.address) as channel:
        request = inference_pb2.GenerateRequest(text=PROMPT, **fields)
        planned = inference_pb2.PlanRequest(request=request)
        response = await stub_of(channel).Plan(planned, timeout=timeout_s)
        assert isinstance(response, inference_pb2.PlanResponse)
        return response


async def fetch(planned: inference_pb2.PlanResponse) -> list[direct_pb2.GenerateResponse]:
    async with open_channel(planned.address) as channel:
        stub: Any = direct_pb2_grpc.DirectServiceStub(channel)
        message = direct_pb2.GenerateRequest(call=planned.call, ticket=planned.ticket)
        return [response async for response in stub.Generate(message)]


class Read(NamedTuple):
    token_ids: tuple[int, ...]
    finished: common_pb2.Finished
    # Until the first token.
    seen_ms: float


async def read(call: DirectCall) -> Read:
    began_s = time.monotonic()
    first_s, token_ids = 0.0, b""
    while (response := await call.read()) is not None and not response.HasField("finished"):
        first_s = first_s or time.monotonic()
        token_ids += response.chunk.token_ids
    assert response is not None
    ids = unpack(token_ids, field="", vocabulary_size=1 << 30).tolist()
    return Read(tuple(ids), response.finished, (first_s - began_s) * 1e3)


def said(answer: Answer) -> tuple[Any, ...]:
    return answer.text, answer.token_ids, answer.finish_reason, answer.usage.prompt_tokens


async def test_an_answer_is_the_same_on_either_way(mesh: Mesh) -> None:
    before = plans(mesh).counts.answered
    async with MeshClient(mesh.router.address, direct=False) as client:
        proxied = await client.complete(PROMPT, **DRAWN)
    fetched = await mesh.client.complete(PROMPT, **DRAWN)

    assert said(fetched) == said(proxied)
    assert fetched.worker_id in {worker.id for worker in mesh.workers}
    assert (fetched.attempts, fetched.migrations) == (1, 0)
    assert fetched.generation == proxied.generation
    assert fetched.routing.strategy == "kv_aware"
    assert len(fetched.trace_id) == 32
    await eventually(lambda: plans(mesh).counts.answered == before + 1)


async def test_the_ledger_adds_up(mesh: Mesh) -> None:
    answer = await mesh.client.complete(PROMPT, max_tokens=3)

    assert sum(answer.ledger.values()) + answer.residual_ms == pytest.approx(answer.ttft_ms)
    assert min(answer.ledger.values()) > -0.01
    for segment in ("preprocess", "route", "prefill", "transfer"):
        assert answer.ledger[segment] > 0


async def test_a_ticket_is_good_once(mesh: Mesh) -> None:
    planned = await plan(mesh, sampling=common_pb2.SamplingParams(max_tokens=2))
    assert (await fetch(planned))[-1].HasField("finished")
    with pytest.raises(grpc.aio.AioRpcError, match="used before") as raised:
        await fetch(planned)
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_changed_call_is_refused_and_its_plan_expires(mesh: Mesh) -> None:
    planned = await plan(mesh)
    before = plans(mesh).counts.expired
    [given_out] = plans(mesh)._open.values()
    planned.call += b"\x08\x01"
    with pytest.raises(grpc.aio.AioRpcError, match="for another call") as raised:
        await fetch(planned)

    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert mesh.router.mesh.dispatcher.num_in_flight == 1
    await eventually(lambda: plans(mesh).counts.expired == before + 1)
    assert given_out._account.ledger.first_token_s is None


async def test_another_worker_does_not_take_the_ticket(mesh: Mesh) -> None:
    planned = await plan(mesh)
    addresses = {plans(mesh).address_of(worker.id) for worker in mesh.workers}
    [planned.address] = addresses - {planned.address}
    with pytest.raises(grpc.aio.AioRpcError, match="the ticket is for worker-"):
        await fetch(planned)


class Elsewhere:
    """As WorkerChannels, for clients that cannot reach the workers."""

    def __init__(self, channel: grpc.aio.Channel | None) -> None:
        self._channel = channel

    def get(self, address: str, server_name: str) -> grpc.aio.Channel | None:
        return self._channel


@pytest.mark.parametrize("is_known", [True, False])
async def test_who_cannot_reach_the_worker_is_answered_through_the_router(
    mesh: Mesh, is_known: bool
) -> None:
    undisturbed = await mesh.client.complete(PROMPT, **DRAWN)
    request = inference_pb2.GenerateRequest(text=PROMPT, sampling=SAMPLING)
    async with (
        open_channel(mesh.router.address) as router,
        open_channel(f"127.0.0.1:{free_port()}") as nowhere,
    ):
        reluctance = Reluctance()
        ways = Ways(router, Elsewhere(nowhere if is_known else None), reluctance)
        answer = await read(DirectCall(ways, request, (), 60.0))

    assert answer.token_ids == undisturbed.token_ids
    assert (answer.finished.attempts, answer.finished.migrations) == (2, 0)
    assert not reluctance.may_plan
    ledger = answer.finished.ledger
    assert ledger.total_ms == pytest.approx(answer.seen_ms, abs=50.0)
    assert sum(getattr(ledger, f"{name}_ms") for name in SEGMENTS) <= ledger.total_ms
    assert ledger.route_ms > 0


async def test_a_plan_is_under_way_when_its_client_comes(mesh: Mesh) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=20, ignore_eos=True)
    planned = await plan(mesh, sampling=sampling)
    [worker] = [each for each in mesh.workers if each.id == worker_of(planned)]
    front = worker._front
    await eventually(lambda: front.num_streams == 1 and not front.num_held, "all to be computed")
    responses = await fetch(planned)

    assert len(responses[1].chunk.token_ids) == 4 * 19  # as one, behind the first
    assert responses[-1].finished.usage.completion_tokens == 20


async def test_a_plan_that_is_resumed_at_once_does_not_go_on_at_its_worker(mesh: Mesh) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=2000, ignore_eos=True)
    planned = await plan(mesh, sampling=sampling)
    [worker] = [each for each in mesh.workers if each.id == worker_of(planned)]
    before = plans(mesh).counts.expired
    await eventually(lambda: worker._plans.num_waiting == 1)
    async with open_channel(mesh.router.address) as channel:
        resumption = inference_pb2.Resumption(call=planned.call, ticket=planned.ticket)
        call = stub_of(channel).Generate(inference_pb2.GenerateRequest(resumption=resumption))
        assert (await call.read()).chunk.token_ids
        await eventually(lambda: not plans(mesh).num_open)
        call.cancel()
    assert worker._plans.num_waiting == 0
    assert plans(mesh).counts.expired == before


def worker_of(planned: inference_pb2.PlanResponse) -> str:
    ticket = direct_pb2.Ticket.FromString(planned.ticket)
    return direct_pb2.Plan.FromString(ticket.plan).worker_id


async def test_clients_that_leave_hold_nothing(mesh: Mesh) -> None:
    rng = random.Random(7)
    options: Options = {**DRAWN, "max_tokens": 200}

    async def leave() -> None:
        async with asyncio.timeout(rng.uniform(0.0, 0.06)):
            await mesh.client.complete(PROMPT, **options)

    for _ in range(6):
        left = await asyncio.gather(*(leave() for _ in range(10)), return_exceptions=True)
        assert all(isinstance(each, TimeoutError) for each in left), left
    await idle(mesh)
    assert said(await mesh.client.complete(PROMPT, **DRAWN))


async def test_a_client_may_be_closed_while_it_connects_to_a_worker(mesh: Mesh) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        client = MeshClient(mesh.router.address)
        silent = open_channel(f"127.0.0.1:{nobody.getsockname()[1]}")
        client._workers.get = lambda address, server_name: silent  # type: ignore[method-assign]
        await client.__aenter__()
        before = plans(mesh).counts.planned
        reading = asyncio.ensure_future(client.complete(PROMPT, **DRAWN))
        await eventually(lambda: plans(mesh).counts.planned > before)
        connecting = grpc.ChannelConnectivity.CONNECTING
        await eventually(lambda: silent.get_state() is connecting)
        await client.close()
        await silent.close()
        with pytest.raises(MeshError) as raised:
            await reading
    assert raised.value.code is grpc.StatusCode.CANCELLED


async def test_a_deadline_ends_the_answer(mesh: Mesh) -> None:
    with pytest.raises(MeshError) as raised:
        await mesh.client.complete(PROMPT, max_tokens=2000, ignore_eos=True, deadline_s=0.2)
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_plans_time_is_over_also_for_who_does_not_read(mesh: Mesh) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=2000, ignore_eos=True, logprobs=20)
    before = plans(mesh).counts.failed
    planned = await plan(mesh, timeout_s=1.0, sampling=sampling)
    # Without probing, no more than 64 KiB are under way.
    options = (("grpc.http2.bdp_probe", 0),)
    async with grpc.aio.insecure_channel(planned.address, options=options) as channel:
        stub: Any = direct_pb2_grpc.DirectServiceStub(channel)
        call = stub.Generate(direct_pb2.GenerateRequest(call=planned.call, ticket=planned.ticket))
        assert await call.read()
        await eventually(lambda: plans(mesh).counts.failed > before)
        async with asyncio.timeout(30):
            with pytest.raises(grpc.aio.AioRpcError, match="time that the router gave") as raised:
                await read_on(call)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def read_on(call: Any) -> None:
    while await call.read():
        pass


async def test_what_the_router_refuses_is_refused(mesh: Mesh) -> None:
    with pytest.raises(MeshError) as raised:
        await mesh.client.complete(PROMPT, max_tokens=0)
    assert [each.field for each in raised.value.violations] == ["sampling.max_tokens"]
    assert raised.value.ledger["preprocess"] > 0


async def test_tenants_with_limits_come_through_the_router(mesh: Mesh) -> None:
    keys = {"free": new_key(), "limited": new_key()}
    changes = {f"tenants.{name}.key_hashes": hash_key(key) for name, key in keys.items()}
    control = mesh.control.address
    generation = await configure(control, {**changes, "tenants.limited.max_concurrent": "1"})
    await eventually(lambda: mesh.router.mesh.snapshot.generation == generation)
    before = plans(mesh).counts.planned
    try:
        for name, key in keys.items():
            async with MeshClient(mesh.router.address, api_key=key) as client:
                for _ in range(3):
                    await client.complete(PROMPT, max_tokens=2)
            assert plans(mesh).counts.planned == before + 3, name
    finally:
        gone = {f"tenants.{name}": "null" for name in keys}
        generation = await configure(control, gone)
        await eventually(lambda: mesh.router.mesh.snapshot.generation == generation)


async def test_another_tenants_plan_is_not_resumed(mesh: Mesh) -> None:
    keys = {"one": new_key(), "other": new_key()}
    changes = {f"tenants.{name}.key_hashes": hash_key(key) for name, key in keys.items()}
    control = mesh.control.address
    generation = await configure(control, changes)
    await eventually(lambda: mesh.router.mesh.snapshot.generation == generation)
    try:
        async with open_channel(mesh.router.address) as channel:
            stub = stub_of(channel)
            request = inference_pb2.GenerateRequest(text=PROMPT)
            planned = await stub.Plan(
                inference_pb2.PlanRequest(request=request),
                metadata=(("authorization", f"Bearer {keys['one']}"),),
            )
            resumption = inference_pb2.Resumption(call=planned.call, ticket=planned.ticket)
            call = stub.Generate(
                inference_pb2.GenerateRequest(resumption=resumption),
                metadata=(("authorization", f"Bearer {keys['other']}"),),
            )
            with pytest.raises(grpc.aio.AioRpcError, match="another tenant's request") as raised:
                await call.read()
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    finally:
        generation = await configure(control, {f"tenants.{name}": "null" for name in keys})
        await eventually(lambda: mesh.router.mesh.snapshot.generation == generation)


async def test_a_plan_is_resumed_after_control_has_other_keys(mesh: Mesh) -> None:
    hub: Any = mesh.control._hub
    workers: Any = mesh.workers
    planned = await plan(mesh, sampling=common_pb2.SamplingParams(max_tokens=2))
    hub._store.secret = secrets.token_bytes(32)  # as when it is restarted
    hub.renew_ticket_keys(time.time())

    def is_told() -> bool:
        rings = [mesh.router.mesh.ticket_keys(), *(each._control.ticket_keys for each in workers)]
        return all(ring.current_id == hub.ticket_keys.current_id for ring in rings)

    await eventually(is_told)
    with pytest.raises(grpc.aio.AioRpcError, match="key that is not known"):
        await fetch(planned)
    resumption = inference_pb2.Resumption(call=planned.call, ticket=planned.ticket)
    async with open_channel(mesh.router.address) as channel:
        call = stub_of(channel).Generate(inference_pb2.GenerateRequest(resumption=resumption))
        assert [response async for response in call][-1].HasField("finished")


async def test_plans_are_off_where_the_configuration_says_so(mesh: Mesh) -> None:
    control = mesh.control.address
    await configure(control, {"router.direct": "false"})
    await eventually(lambda: not mesh.router.mesh.snapshot.config.router.direct)
    before = plans(mesh).counts.planned
    async with MeshClient(mesh.router.address) as client:
        assert (await client.complete(PROMPT, max_tokens=2)).token_ids
    with pytest.raises(grpc.aio.AioRpcError, match=r"router\.direct is off") as raised:
        await plan(mesh)
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await configure(control, {"router.direct": "true"})
    await eventually(lambda: mesh.router.mesh.snapshot.config.router.direct)
    assert plans(mesh).counts.planned == before


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
async def test_services_on_one_host_call_each_other_over_unix_sockets(mesh: Mesh) -> None:
    async with MeshClient(mesh.router.address, direct=False) as client:
        await client.complete("The rain is on the sea.", max_tokens=2)
    opened = mesh.router.mesh.channels._opened_to

    assert mesh.tokenizer.address in opened
    assert {worker.address for worker in mesh.workers} <= opened.keys()  # they are watched
