"""A delay injected at each point of the path grows its own segment, and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from firsttoken.client import Answer
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.core import config as mesh_config
from services.runtime.channels import open_channel
from tests.conftest import Mesh, MeshFactory

# Long beside what a busy machine adds by chance, so that the assertions can be strict.
DELAY_MS = 400.0
CHANCE_MS = 200.0
CONFIG = mesh_config.parse({"worker": {"engine": "simulated"}})

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(mesh_of: MeshFactory) -> AsyncIterator[Mesh]:
    async with mesh_of(CONFIG, num_workers=1) as mesh:
        yield mesh


async def configure(mesh: Mesh, changes: dict[str, float]) -> None:
    """Returns when every member has applied them."""
    async with open_channel(mesh.control.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        texts = {key: str(value) for key, value in changes.items()}
        response = await stub.SetConfig(control_pb2.SetConfigRequest(changes=texts))
        generation = response.configuration.generation
        while True:
            listed = await stub.ListMembers(control_pb2.ListMembersRequest())
            if all(member.generation == generation for member in listed.members):
                return


async def ask(mesh: Mesh) -> Answer:
    return await mesh.client.complete("The quick brown fox", max_tokens=4)


@pytest.mark.parametrize(
    ("point", "segment"),
    [
        ("router_queue", "queue"),
        ("tokenizer_encode", "preprocess"),
        ("router_route", "route"),
        ("worker_prefill_queue", "prefill_queue"),
        ("worker_kv_load", "kv_load"),
        ("worker_prefill", "prefill"),
        ("router_to_tokenizer", "transfer"),
        ("router_to_worker", "transfer"),
        ("router_unowned", "residual"),
        ("worker_unowned", "residual"),
    ],
)
async def test_a_delay_grows_exactly_its_segment(mesh: Mesh, point: str, segment: str) -> None:
    await ask(mesh)
    before = await ask(mesh)
    await configure(mesh, {f"debug.delay_ms.{point}": DELAY_MS})
    try:
        after = await ask(mesh)
    finally:
        await configure(mesh, {f"debug.delay_ms.{point}": 0.0})

    def parts(answer: Answer) -> dict[str, float]:
        return {**answer.ledger, "residual": answer.residual_ms}

    growth = {name: parts(after)[name] - parts(before)[name] for name in parts(before)}
    grown = {name for name, value in growth.items() if value > CHANCE_MS}

    assert grown == {segment}
    assert growth[segment] >= DELAY_MS * 0.95
    assert sum(parts(after).values()) == pytest.approx(after.ttft_ms)
