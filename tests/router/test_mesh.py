from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from firsttoken.control.v1 import control_pb2
from router.admission import RequestClass
from router.mesh import Mesh
from router.prompt import Prompt
from services.core.config import Snapshot
from services.core.settings import MeshConfig
from services.runtime.channels import Channels
from services.runtime.reporter import Reporter

ADDRESS = "127.0.0.1:7001"


def make_worker(name: str, address: str = ADDRESS) -> control_pb2.Member:
    return control_pb2.Member(
        id=name,
        role=control_pb2.MEMBER_ROLE_WORKER,
        address=address,
        state=control_pb2.MEMBER_STATE_READY,
        model="small",
        worker=control_pb2.WorkerCapacity(num_slots=1, max_context_tokens=512),
    )


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with Channels() as channels:
        mesh = Mesh(Snapshot(1, MeshConfig()), channels, Reporter(service="router", member_id="r"))
        async with mesh.watching:
            yield mesh
        await mesh.close()


async def test_keeps_the_channel_of_a_worker_that_stays(mesh: Mesh) -> None:
    mesh.update_members([make_worker("a")])
    channel = mesh.channels.get(ADDRESS)
    mesh.update_members([make_worker("a"), make_worker("b", "127.0.0.1:7002")])

    assert mesh.channels.get(ADDRESS) is channel


async def test_a_successor_at_the_same_address_gets_a_fresh_channel(mesh: Mesh) -> None:
    mesh.update_members([make_worker("a")])
    channel = mesh.channels.get(ADDRESS)
    mesh.update_members([make_worker("b")])
    fresh = mesh.channels.get(ADDRESS)

    assert fresh is not channel
    mesh.update_members([make_worker("b"), make_worker("c", "127.0.0.1:7002")])
    assert mesh.channels.get(ADDRESS) is fresh


async def test_keeps_the_channel_of_a_worker_that_left_while_it_answers(mesh: Mesh) -> None:
    mesh.update_members([make_worker("a")])
    channel = mesh.channels.get(ADDRESS)
    with mesh.dispatcher.enter(RequestClass.INTERACTIVE) as place:
        grant = await mesh.dispatcher.wait_for_worker(place, Prompt(b"", bytes(32), 64))
        with grant.slot:
            mesh.update_members([])
            assert mesh.channels.get(ADDRESS) is channel
    mesh.update_members([])

    assert mesh.channels.get(ADDRESS) is not channel


async def test_bounds_requests_by_what_the_workers_can_hold(mesh: Mesh) -> None:
    assert mesh.bounds.max_context_tokens == MeshConfig().worker.max_context_tokens
    mesh.update_members([make_worker("a")])

    assert mesh.bounds.max_context_tokens == 512
    assert mesh.bounds.model == "small"
