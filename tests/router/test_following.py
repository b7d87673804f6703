"""A router in a real mesh knows what its workers and the KV store hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from firsttoken.client import MeshClient
from firsttoken.router.v1 import router_pb2, router_pb2_grpc
from router.node import RouterNode
from services.core import config
from services.runtime.channels import open_channel
from tests.conftest import Mesh, MeshFactory
from tests.router.meshes import configure, idle
from tests.router.test_decisions import kinds, read
from tests.runtime.waiting import eventually

TOPICS = ("moss", "fern", "reed", "sedge", "ivy", "oak")


def settings(*, tokens_per_s: float = 10_000, **router: Any) -> Any:
    engine = {
        "engine": "simulated",
        "simulated": {"prefill_tokens_per_s": tokens_per_s, "decode_step_ms": 0.1},
    }
    return config.parse({"router": router, "worker": engine, "mesh": {"block_tokens": 16}})


async def follows(router: RouterNode, num_holders: int) -> None:
    await eventually(lambda: router.mesh.watching.num_live == num_holders, "feeds to be live")


async def ask(client: MeshClient, topic: str, end: str = "") -> Any:
    return await client.complete(f"{f'All about {topic}. ' * 30}{end}", max_tokens=2)


async def test_a_router_that_restarts_hits_with_its_first_request(mesh_of: MeshFactory) -> None:
    async with mesh_of(settings(), num_workers=2) as mesh:
        await follows(mesh.router, 2)
        for topic in TOPICS:
            await ask(mesh.client, topic)
        async with (
            RouterNode(control=mesh.control.address) as router,
            MeshClient(router.address) as client,
        ):
            await follows(router, 2)
            later = (*TOPICS[::2], *TOPICS[1::2])  # not in turn
            answers = [await ask(client, topic, "And what else?") for topic in later]
            await idle(router)
    assert len({answer.worker_id for answer in answers}) == 2
    for answer in answers:
        assert answer.routing.strategy == "kv_aware"
        assert answer.routing.candidates == 2
        assert answer.routing.predicted_cached_tokens == answer.usage.cached_tokens > 64


async def test_a_worker_that_was_cold_at_first_gets_its_share(mesh_of: MeshFactory) -> None:
    """What a first prompt was expected to take, before anything was measured, is forgotten: within
    60 requests, unless a busy machine measures it as slow once more. Five such rounds take less
    time than a worker went unasked for when nothing was forgotten."""
    rounds: list[Counter[str]] = []
    async with mesh_of(settings(tokens_per_s=20_000), num_workers=2) as mesh:
        await follows(mesh.router, 2)
        while len(rounds) < 5 and not any(_is_shared(shares) for shares in rounds):
            prompts = [f"{number} of {len(rounds)}" for number in range(60)]
            answers = [await ask(mesh.client, prompt) for prompt in prompts]
            rounds.append(Counter(answer.worker_id for answer in answers))
    assert _is_shared(rounds[-1]), rounds


def _is_shared(shares: Counter[str]) -> bool:
    return len(shares) == 2 and min(shares.values()) >= 10


async def test_it_follows_nobody_while_nobody_asks(mesh_of: MeshFactory) -> None:
    async with mesh_of(settings(routing_strategy="round_robin"), with_kvstore=True) as mesh:
        answer = await ask(mesh.client, "moss")
        assert mesh.router.mesh.watching.num_followed == 0
        assert answer.routing.predicted_cached_tokens is None
        await configure(mesh.control.address, {"router.routing_strategy": '"kv_aware"'})
        await follows(mesh.router, 2)  # the worker and the store
        answer = await ask(mesh.client, "moss")
        assert answer.routing.predicted_cached_tokens == answer.usage.cached_tokens > 64
        await configure(mesh.control.address, {"router.routing_strategy": '"random"'})
        await eventually(lambda: mesh.router.mesh.watching.num_followed == 0)
        assert (await ask(mesh.client, "moss")).usage.cached_tokens > 64


async def test_operators_ask_how_routing_goes_and_callers_cannot(mesh_of: MeshFactory) -> None:
    async with mesh_of(settings()) as mesh:
        await follows(mesh.router, 1)
        first, second = await ask(mesh.client, "oak"), await ask(mesh.client, "oak")
        stats = await get_stats(mesh, mesh.router.operator_address)
        with pytest.raises(Exception, match="UNIMPLEMENTED"):
            await get_stats(mesh, mesh.router.address)
    assert first.usage.cached_tokens == 0
    assert stats.num_decisions == 2
    assert stats.cached_tokens == stats.predicted_tokens == second.usage.cached_tokens > 0
    assert stats.num_live_feeds == stats.num_feeds == 1
    assert stats.num_index_blocks > 0
    assert stats.num_snapshots >= 1


async def get_stats(mesh: Mesh, address: str) -> router_pb2.GetStatsResponse:
    async with open_channel(address, None) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return await stub.GetStats(router_pb2.GetStatsRequest(), timeout=10)


async def test_decisions_are_recorded_while_the_configuration_says_so(
    mesh_of: MeshFactory, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    async with mesh_of(settings(), num_workers=2) as mesh:
        await follows(mesh.router, 2)
        await configure(mesh.control.address, {"router.record_decisions": f'"{path}"'})
        await eventually(lambda: mesh.router.mesh.recorder.active)
        for _ in range(3):  # by then both workers have it, if need be
            last = await ask(mesh.client, "fern")
        with pytest.raises(Exception, match="model"):
            await mesh.client.complete("fern", model="another")
        await configure(mesh.control.address, {"router.record_decisions": '""'})
        await eventually(lambda: path.exists() and '"end"' in path.read_text())
    lines = read(path)
    decisions = [line for line in lines if line["kind"] == "decision"]
    assert kinds(path)[:2] == ["header", "workers"]
    assert len(lines[1]["workers"]) == 2
    assert [line["error"] for line in decisions] == ["", "", "", "INVALID_ARGUMENT"]
    assert decisions[2]["predicted_tokens"] == last.usage.cached_tokens > 0
    assert decisions[2]["cached_tokens"] == last.usage.cached_tokens
    assert decisions[2]["chosen"] == last.worker_id
    assert decisions[0]["chain"] == decisions[2]["chain"] != ""
    assert {each[0] for each in decisions[2]["candidates"]} == {
        each["id"] for each in lines[1]["workers"]
    }
    assert "fern" not in path.read_text()
