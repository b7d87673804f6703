"""A whole mesh over TLS, and who does not get into it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from firsttoken.client import MeshClient, MeshError
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from firsttoken.router.v1 import router_pb2, router_pb2_grpc
from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.cli.local_ca import LocalCa, Pem
from services.control.node import ControlNode
from services.core import config as mesh_config
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel
from services.runtime.membership import ControlClient
from services.runtime.sharing import SharedMemory
from services.runtime.startup import StartupError
from services.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Tls
from tests.conftest import Mesh, MeshFactory
from tests.runtime.certificates import write
from tests.runtime.waiting import eventually
from worker import store_client
from worker.node import WorkerNode
from worker.store_client import Store

PROMPT = "The sea is wide and the sky above it is grey today. " * 8
TIMEOUT_S = 10.0


def config_of(router: dict[str, Any] | None = None, **worker: Any) -> MeshConfig:
    timing = {"prefill_tokens_per_s": 1e6, "decode_step_ms": 2.0, "kv_bytes_per_token": 256}
    engine = {"engine": "simulated", "num_slots": 4, "simulated": timing, **worker}
    return mesh_config.parse(
        {"mesh": {"block_tokens": 16}, "router": router or {}, "worker": engine}
    )


@pytest.fixture
def ca() -> LocalCa:
    return LocalCa.new()


@pytest.fixture
def tls(tmp_path: Path, ca: LocalCa) -> Tls:
    directory = write(tmp_path / "tls", ca.pem.certificate, ca.service())
    return Tls(directory, check_interval_s=0)


async def test_a_prompt_is_handed_off_over_tls(mesh_of: MeshFactory, tls: Tls) -> None:
    config = config_of(handoff_transport="grpc", handoff_min_tokens=1)
    async with mesh_of(config, num_prefill_workers=1, with_kvstore=True, tls=tls) as mesh:
        plans = mesh.router.mesh.plans
        await eventually(lambda: plans.address_of(mesh.workers[0].id))
        answer = await mesh.client.complete(PROMPT, max_tokens=8, ignore_eos=True)

    assert len(answer.token_ids) == 8
    assert plans.counts.answered == 1
    assert answer.kv_path.handed_off
    assert answer.kv_path.transport == "grpc"


async def test_blocks_come_out_of_the_store_over_tls(
    mesh_of: MeshFactory, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(name: str) -> SharedMemory:
        raise OSError("no such socket on this host")

    monkeypatch.setattr(store_client, "open_shared", refuse)
    config = config_of({"routing_strategy": "round_robin"}, kv_load="always")
    async with mesh_of(config, num_workers=2, with_kvstore=True, tls=tls) as mesh:
        first = await mesh.client.complete(PROMPT, max_tokens=2, ignore_eos=True)
        await eventually(lambda: sum(worker.tier.blocks_stored for worker in mesh.workers))
        await eventually(lambda: all(worker.tier.num_writing == 0 for worker in mesh.workers))
        second = await mesh.client.complete(PROMPT, max_tokens=2, ignore_eos=True)

    assert first.worker_id != second.worker_id
    assert second.token_ids == first.token_ids
    assert second.kv_path.loaded_blocks == (first.usage.prompt_tokens - 1) // 16


async def call_each(mesh: Mesh, open_to: Any) -> list[grpc.StatusCode]:
    """How the parts inside the mesh answer a channel that `open_to` makes."""
    assert mesh.kvstore is not None
    parts = (mesh.control, mesh.tokenizer, mesh.workers[0], mesh.kvstore)
    addresses = (*(each.address for each in parts), mesh.router.operator_address)
    channels = [open_to(address) for address in addresses]
    control, tokenizer, worker, kvstore, router = channels
    joins = [control_pb2_grpc.ControlServiceStub(control).Join() for _ in range(2)]
    await _try_to_join(joins[0])
    calls: list[Any] = [
        control_pb2_grpc.ControlServiceStub(control).GetConfig(
            control_pb2.GetConfigRequest(), timeout=TIMEOUT_S
        ),
        asyncio.wait_for(joins[1].read(), TIMEOUT_S),
        tokenizer_pb2_grpc.TokenizerServiceStub(tokenizer).Encode(
            tokenizer_pb2.EncodeRequest(text="hello"), timeout=TIMEOUT_S
        ),
        worker_pb2_grpc.WorkerServiceStub(worker)
        .Generate(worker_pb2.GenerateRequest(), timeout=TIMEOUT_S)
        .read(),
        worker_pb2_grpc.WorkerServiceStub(worker)
        .Watch(worker_pb2.WatchRequest(), timeout=TIMEOUT_S)
        .read(),
        kvstore_pb2_grpc.KvStoreServiceStub(kvstore).Evict(
            kvstore_pb2.EvictRequest(all=True), timeout=TIMEOUT_S
        ),
        router_pb2_grpc.RouterServiceStub(router).GetStats(
            router_pb2.GetStatsRequest(), timeout=TIMEOUT_S
        ),
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for join in joins:
        join.cancel()
    for channel in channels:
        await channel.close()
    codes = []
    for result in results:
        assert isinstance(result, grpc.aio.AioRpcError), result
        codes.append(result.code())
    return codes


async def _try_to_join(call: Any) -> None:
    """How it ends is asked of a call that writes nothing: where a write meets the end of its
    call, grpc.aio says INTERNAL, one time in a hundred."""
    member = control_pb2.Member(id="mallory", role=control_pb2.MEMBER_ROLE_WORKER)
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        async with asyncio.timeout(TIMEOUT_S):
            await call.write(control_pb2.JoinRequest(member=member))


async def test_only_services_reach_the_parts_inside(
    mesh_of: MeshFactory, tls: Tls, ca: LocalCa, tmp_path: Path
) -> None:
    def tenant(address: str) -> grpc.aio.Channel:
        directory = write(tmp_path / "tenant", ca.pem.certificate, ca.client("acme"))
        return open_channel(address, Tls(directory, service=False))

    def keyless(address: str) -> grpc.aio.Channel:
        directory = write(tmp_path / "keyless", ca.pem.certificate, Pem(b"", b""))
        (directory / CERTIFICATE_FILE).unlink()
        (directory / KEY_FILE).unlink()
        return open_channel(address, Tls(directory, service=False))

    async with mesh_of(config_of(), with_kvstore=True, tls=tls) as mesh:
        before = await mesh.client.complete("hi", max_tokens=2, ignore_eos=True)
        assert set(await call_each(mesh, tenant)) == {grpc.StatusCode.PERMISSION_DENIED}
        assert set(await call_each(mesh, keyless)) == {grpc.StatusCode.UNAVAILABLE}
        assert set(await call_each(mesh, open_channel)) == {grpc.StatusCode.UNAVAILABLE}
        after = await mesh.client.complete("hi", max_tokens=2, ignore_eos=True)
        # The worker and the KV store tell the router what they hold.
        await eventually(lambda: mesh.router.mesh.watching.num_live == 2)

        assert after.token_ids == before.token_ids
        assert not [each for each in mesh.router.mesh.roster.workers if each.id == "mallory"]
        async with MeshClient(mesh.router.address) as client:
            with pytest.raises(MeshError) as caught:
                await client.complete("hi", max_tokens=2)
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_all_certificates_change_under_an_answer(
    mesh_of: MeshFactory, tls: Tls, ca: LocalCa, tmp_path: Path
) -> None:
    old = Tls(write(tmp_path / "old", ca.pem.certificate, ca.service()))
    async with (
        mesh_of(config_of(), with_kvstore=True, tls=tls) as mesh,
        mesh.client.generate("On", max_tokens=400, ignore_eos=True) as stream,
    ):
        await anext(stream)
        successor = LocalCa.new()
        write(tls.directory, successor.pem.certificate, successor.service())
        async with MeshClient(mesh.router.address, ca_file=tls.directory / CA_FILE) as client:
            answer = await client.complete("hi", max_tokens=2, ignore_eos=True)
        async with WorkerNode(control=mesh.control.address, tls=tls):
            await eventually(lambda: len(mesh.router.mesh.roster.workers) == 2)
        codes = await call_each(mesh, lambda address: open_channel(address, old))
        async for _ in stream:
            pass

    assert len(answer.token_ids) == 2
    assert len(stream.answer.token_ids) == 400
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}


async def test_a_store_is_connected_to_anew_with_other_files(tls: Tls, ca: LocalCa) -> None:
    store = Store(control_pb2.Member(id="one", address="127.0.0.1:1"), None, tls)
    assert not store.is_outdated
    write(tls.directory, ca.pem.certificate, ca.service())

    assert store.is_outdated
    await store.close()


@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_process_is_told_why_it_cannot_join(
    mesh_of: MeshFactory, tls: Tls, encrypted: bool
) -> None:
    member = control_pb2.Member(id="one", role=control_pb2.MEMBER_ROLE_ROUTER)
    async with ControlNode(tls=tls if encrypted else None) as control:
        with pytest.raises(StartupError) as caught:
            async with ControlClient(
                control.address, member, tls=None if encrypted else tls, start_timeout_s=0.3
            ):
                pass

    said = "speaks TLS: use --tls-dir" if encrypted else "does not speak TLS"
    assert said in str(caught.value)
