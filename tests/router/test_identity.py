"""Who calls the router, as an attacker tries it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from firsttoken.client import Answer, MeshClient, MeshError
from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from router.node import RouterNode
from services.control.node import ControlNode
from services.core.config import flatten, nest, parse
from services.core.settings import MeshConfig
from services.core.tenants import hash_key
from services.runtime.channels import open_channel
from tests.conftest import Mesh, MeshFactory
from tests.router.meshes import configure, idle, simulated
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

Generate: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"

ACME, BEE = "ft-acme", "ft-bee"
METHOD = "/firsttoken.router.v1.InferenceService/Generate"
# Longer than a block of 64 tokens.
TEXT = "The sea is wide and the sky above it is grey. " * 30


def config(**router: Any) -> MeshConfig:
    tenants = {
        "acme": {"key_hashes": hash_key(ACME)},
        "bee": {"key_hashes": hash_key(BEE), "max_class": "batch"},
    }
    timed = simulated(router=router, timing={"decode_step_ms": 2.0})
    return parse({**nest(flatten(timed)), "tenants": tenants})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(mesh_of: MeshFactory) -> AsyncIterator[Mesh]:
    async with mesh_of(config(request_timeout_s=0.3)) as mesh:
        yield mesh


async def ask(mesh: Mesh, key: str | None, text: str = "Once", **options: Any) -> Answer:
    async with MeshClient(mesh.router.address, api_key=key) as client:
        return await client.complete(text, max_tokens=2, ignore_eos=True, **options)


def generate_at(channel: grpc.aio.Channel) -> Generate:
    """Takes and gives bytes as they are."""
    method: Generate = channel.unary_stream(METHOD)
    return method


async def refusal(mesh: Mesh, *metadata: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    async with open_channel(mesh.router.address) as channel:
        request = inference_pb2.GenerateRequest(text="Once").SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generate_at(channel)(request, metadata=metadata):
                pass
    return caught.value


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer ft-nobody"),),
        (("authorization", "Bearer"),),
        (("authorization", f"Basic {ACME}"),),
        (("authorization", ACME),),
        (("x-api-key", ""),),
        (("x-api-key", hash_key(ACME)),),
        (("x-api-key", "x" * 4000),),
        (("x-api-key", " !~`'\"\\"),),
        (("x-api-key-bin", ACME.encode()),),
        (("firsttoken-tenant", "acme"),),
        (("authorization", f"Bearer {ACME}"), ("x-api-key", "ft-nobody")),
        (("x-api-key", ACME), ("x-api-key", "ft-nobody")),
    ],
    ids=str,
)
async def test_nobody_gets_in_without_a_key(
    mesh: Mesh, metadata: tuple[tuple[str, str | bytes], ...]
) -> None:
    assert (await refusal(mesh, *metadata)).code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "metadata",
    [
        (("x-api-key", ACME), ("firsttoken-tenant", "bee")),
        (("x-api-key", ACME), ("firsttoken-tenant", "acme"), ("firsttoken-tenant", "bee")),
        (("x-api-key", ACME), ("authorization", f"Bearer {BEE}")),
    ],
    ids=str,
)
async def test_nobody_is_two_tenants(
    mesh: Mesh, metadata: tuple[tuple[str, str | bytes], ...]
) -> None:
    assert (await refusal(mesh, *metadata)).code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
async def test_a_key_is_taken_however_its_scheme_is_spelled(mesh: Mesh, scheme: str) -> None:
    async with open_channel(mesh.router.address) as channel:
        request = inference_pb2.GenerateRequest(text="Once").SerializeToString()
        metadata = (("authorization", scheme + ACME), ("firsttoken-tenant", "acme"))
        call = generate_at(channel)(request, metadata=metadata)
        assert [message async for message in call]


async def test_too_much_metadata_is_refused(mesh: Mesh) -> None:
    error = await refusal(mesh, ("x-api-key", ACME), ("junk", "x" * 100_000))

    assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)
    assert await ask(mesh, ACME)


async def test_a_caller_is_known_before_its_message_is_read(mesh: Mesh) -> None:
    async with open_channel(mesh.router.address) as channel:
        call = generate_at(channel)(b"\xff" * 1000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_message_that_never_comes_is_not_waited_for(mesh: Mesh) -> None:
    async with open_channel(mesh.router.address) as channel:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        call = method(metadata=(("x-api-key", ACME),))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "router.request_timeout_s" in (caught.value.details() or "")
    assert mesh.router.mesh.limits.num_running == 0


async def test_one_tenant_s_text_is_no_hit_for_another(mesh: Mesh) -> None:
    salt = "the same"
    assert (await ask(mesh, ACME, TEXT, cache_salt=salt)).usage.cached_tokens == 0

    own = await ask(mesh, ACME, TEXT, cache_salt=salt)
    other = await ask(mesh, BEE, TEXT, cache_salt=salt)

    assert own.usage.cached_tokens > 0
    assert other.usage.cached_tokens == 0


async def test_another_salt_of_the_tenant_s_own_empties_its_cache(mesh: Mesh) -> None:
    text = f"Salted. {TEXT}"
    await ask(mesh, ACME, text)
    assert (await ask(mesh, ACME, text)).usage.cached_tokens > 0

    await configure(mesh.control.address, {"tenants.acme.salt": '"new"'})
    await eventually(lambda: mesh.router.mesh.snapshot.config.tenants["acme"].salt == "new")

    assert (await ask(mesh, ACME, text)).usage.cached_tokens == 0


async def test_a_class_above_the_tenant_s_is_refused_and_none_is_its_own(mesh: Mesh) -> None:
    async with open_channel(mesh.router.address) as channel:
        request = inference_pb2.GenerateRequest(
            text="Once", request_class=common_pb2.REQUEST_CLASS_INTERACTIVE
        )
        metadata = (("x-api-key", BEE),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate_at(channel)(request.SerializeToString(), metadata=metadata).read()

    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "tenants.bee.max_class" in (caught.value.details() or "")
    assert await ask(mesh, BEE, request_class="batch")
    assert await ask(mesh, BEE)


async def test_a_key_is_changed_without_a_pause_and_a_removed_tenant_is_out(mesh: Mesh) -> None:
    control, limits = mesh.control.address, mesh.router.mesh
    both = f'"{hash_key("ft-old")} {hash_key("ft-new")}"'
    await configure(control, {"tenants.cat.key_hashes": both})
    await eventually(lambda: limits.tenants.by_key("ft-new") is not None)
    assert await ask(mesh, "ft-old")
    assert await ask(mesh, "ft-new")

    await configure(control, {"tenants.cat.key_hashes": f'"{hash_key("ft-new")}"'})
    await eventually(lambda: limits.tenants.by_key("ft-old") is None)
    with pytest.raises(MeshError, match="no tenant has this API key"):
        await ask(mesh, "ft-old")
    assert await ask(mesh, "ft-new")

    await configure(control, {"tenants.cat": "null"})
    await eventually(lambda: limits.tenants.by_key("ft-new") is None)
    with pytest.raises(MeshError) as caught:
        await ask(mesh, "ft-new")
    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED


async def test_limits_hold_under_a_crowd_that_leaves_at_random(mesh: Mesh) -> None:
    most, chance = 5, random.Random(7)
    changes = {"tenants.crowd.key_hashes": f'"{hash_key("ft-crowd")}"'}
    changes["tenants.crowd.max_concurrent"] = str(most)
    await configure(mesh.control.address, changes)
    await eventually(lambda: "crowd" in mesh.router.mesh.snapshot.config.tenants)
    limits, seen = mesh.router.mesh.limits, []

    async def call(client: MeshClient) -> str | MeshError:
        try:
            async with client.generate("On", max_tokens=30, ignore_eos=True) as stream:
                async for _ in stream:
                    seen.append(limits.running("crowd"))
                    if chance.random() < 0.1:
                        return "left"
        except MeshError as error:
            return error
        return "answered"

    async with MeshClient(mesh.router.address, api_key="ft-crowd") as client:
        ends = await asyncio.gather(*(call(client) for _ in range(60)))

    refused = [end for end in ends if isinstance(end, MeshError)]
    assert {(each.code, each.reason) for each in refused} == {
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CONCURRENT")
    }
    assert all(each.retry_delay_s for each in refused)
    assert "left" in ends
    assert max(seen) <= most
    await eventually(lambda: limits.num_running == 0)
    await idle(mesh.router)


async def test_health_is_open_and_reflection_is_shut(mesh: Mesh) -> None:
    async with open_channel(mesh.router.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())

    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert await reflection_at(mesh.router.address) is grpc.StatusCode.UNIMPLEMENTED


async def test_no_log_holds_a_key(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await ask(mesh, ACME)
        await refusal(mesh, ("x-api-key", "ft-nobody-at-all"))

    assert ACME not in caplog.text
    assert "ft-nobody-at-all" not in caplog.text


async def test_a_call_without_a_deadline_has_one(mesh_of: MeshFactory) -> None:
    async with mesh_of(config(max_deadline_s=1.0)) as mesh:
        async with MeshClient(mesh.router.address, api_key=ACME) as client:
            with pytest.raises(MeshError, match=r"router\.max_deadline_s") as caught:
                await client.complete("On and on", max_tokens=2000, ignore_eos=True)
        await idle(mesh.router)

    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def reflection_at(address: str) -> grpc.StatusCode:
    """How a stranger's question for the list of services ends."""
    async with open_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        try:
            answers = [answer async for answer in call]
        except grpc.aio.AioRpcError as error:
            return error.code()
    [answer] = answers
    names = {each.name for each in answer.list_services_response.service}
    assert METHOD.split("/")[1] in names
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        ("auto", grpc.StatusCode.OK),
        ("always", grpc.StatusCode.OK),
        ("never", grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_without_tenants_reflection_is_on_unless_asked_off(
    wanted: str, code: grpc.StatusCode
) -> None:
    async with (
        ControlNode(config=simulated(router={"reflection": wanted})) as control,
        RouterNode(control=control.address) as router,
    ):
        assert await reflection_at(router.address) is code


async def test_reflection_that_is_asked_for_still_wants_a_key() -> None:
    async with (
        ControlNode(config=config(reflection="always")) as control,
        RouterNode(control=control.address) as router,
    ):
        assert await reflection_at(router.address) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_rate_is_kept_over_the_wire_and_says_when_to_come_back(mesh: Mesh) -> None:
    changes = {
        "tenants.slow.key_hashes": f'"{hash_key("ft-slow")}"',
        "tenants.slow.requests_per_s": "0.01",
        "tenants.slow.burst_requests": "2",
    }
    await configure(mesh.control.address, changes)
    await eventually(lambda: "slow" in mesh.router.mesh.snapshot.config.tenants)
    for _ in range(2):
        await ask(mesh, "ft-slow")
    with pytest.raises(MeshError) as caught:
        await ask(mesh, "ft-slow")

    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.reason == "RATE_LIMITED"
    assert caught.value.retry_delay_s is not None
    assert 0 < caught.value.retry_delay_s <= 100
    assert await ask(mesh, ACME)
