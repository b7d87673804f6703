from __future__ import annotations

from router.admission import RequestClass
from router.mesh import Mesh
from router.operators import METRICS, read_metrics
from services.core.config import Snapshot
from services.core.metrics import Labels
from services.core.settings import MeshConfig
from services.core.tenants import ANYBODY
from services.runtime.channels import Channels
from services.runtime.reporter import Reporter

PLACES: Labels = (("what", "places"),)


def values(mesh: Mesh, name: str) -> dict[Labels, float]:
    return {each.labels: each.value for each in read_metrics(mesh) if each.name == name}


async def test_a_place_that_is_held_for_no_call_is_a_leak() -> None:
    async with Channels() as channels:
        reporter = Reporter(service="router", member_id="router-1")
        mesh = Mesh(Snapshot(1, MeshConfig()), channels, reporter)
        assert not any(values(mesh, "firsttoken.leak.held").values())
        with mesh.admit(ANYBODY), mesh.dispatcher.enter(RequestClass.BATCH):
            assert not any(values(mesh, "firsttoken.leak.held").values())
            assert values(mesh, "firsttoken.router.requests.preparing") == {(): 1}
        with mesh.dispatcher.enter(RequestClass.BATCH):
            assert values(mesh, "firsttoken.leak.held")[PLACES] == 1
        assert {each.name for each in read_metrics(mesh)} <= {metric.name for metric in METRICS}
        await mesh.close()


async def test_those_who_wait_are_told_apart_by_class() -> None:
    async with Channels() as channels:
        reporter = Reporter(service="router", member_id="router-1")
        mesh = Mesh(Snapshot(1, MeshConfig()), channels, reporter)
        waiting = values(mesh, "firsttoken.router.requests.waiting")
        assert waiting == {
            (("request_class", "interactive"),): 0,
            (("request_class", "batch"),): 0,
        }
        await mesh.close()
