"""No request parses the configuration, or looks a setting up by its name."""

from __future__ import annotations

import ast
import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import pytest_asyncio

from firsttoken.client import MeshClient
from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from router.mesh import Mesh as RouterMesh
from services.core import config as mesh_config
from services.core import settings
from services.core.tenants import hash_key, new_key
from services.runtime.channels import open_channel
from tests.gateway.edges import Edge, chat_body, run_edge
from tests.runtime.waiting import eventually

KEY, FREE_KEY = new_key(), new_key()
CONFIG = mesh_config.parse(
    {
        "mesh": {"block_tokens": 16},
        "worker": {
            "engine": "simulated",
            "num_slots": 4,
            "simulated": {"prefill_tokens_per_s": 1e6, "decode_step_ms": 1.0},
        },
        "tenants": {
            "limited": {"key_hashes": hash_key(KEY), "requests_per_s": 1e6, "max_concurrent": 9},
            "free": {"key_hashes": hash_key(FREE_KEY)},
        },
    }
)
ROOT = Path(__file__).resolve().parent.parent.parent
SERVING = ("router", "worker", "kvstore", "services/gateway", "services/tokenizer")
CREDENTIALS = (("authorization", f"Bearer {KEY}"),)

on_the_mesh = pytest.mark.asyncio(loop_scope="module")


class Lookups:
    """Counts calls of what is in services/core/config.py, and of dataclasses with settings, in
    whatever thread and by whatever name they were imported."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._counts = False

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        self.seen.clear()
        self._counts = True
        try:
            yield self.seen
        finally:
            self._counts = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._counts or event != "call":
            return
        path = frame.f_code.co_filename
        if path == mesh_config.__file__ or (path == dataclasses.__file__ and _of_settings(frame)):
            self.seen[frame.f_code.co_name] += 1


def _of_settings(frame: FrameType) -> bool:
    values = frame.f_locals.values()
    return any(type(value).__module__ == settings.__name__ for value in values)


@pytest.fixture(scope="module")
def lookups() -> Iterator[Lookups]:
    found = Lookups()
    # Before the mesh has its threads.
    threading.setprofile(found.note)
    sys.setprofile(found.note)
    try:
        yield found
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(lookups: Lookups) -> AsyncIterator[Edge]:
    async with run_edge(CONFIG, with_kvstore=sys.platform == "linux") as found:
        router = found.mesh.router.mesh
        await eventually(lambda: all(router.plans.address_of(w.id) for w in found.mesh.workers))
        yield found


async def ask_in_every_way(edge: Edge) -> None:
    """Proxied, direct and over HTTP, streamed and whole; and one that is refused."""
    plans = edge.mesh.router.mesh.plans
    planned_before = plans.counts.planned
    async with MeshClient(edge.mesh.router.address, api_key=FREE_KEY) as client:
        await client.complete("The sea is wide. " * 20, max_tokens=3)
    assert plans.counts.planned > planned_before  # it was direct
    async with open_channel(edge.mesh.router.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            text="The sky is grey. " * 20, sampling=common_pb2.SamplingParams(max_tokens=3)
        )
        messages = [message async for message in stub.Generate(request, metadata=CREDENTIALS)]
        assert messages[-1].HasField("finished")
    for body in (chat_body(max_tokens=3), chat_body(max_tokens=3, stream=True)):
        response = await edge.http.post(
            "/v1/chat/completions", json=body, headers=dict(CREDENTIALS)
        )
        assert response.status_code == 200, response.text
    await edge.refused("/v1/chat/completions", chat_body(max_tokens=-1), **dict(CREDENTIALS))


@on_the_mesh
async def test_no_request_parses_or_flattens_the_configuration(
    edge: Edge, lookups: Lookups
) -> None:
    await ask_in_every_way(edge)  # what is done once has been done
    with lookups.counting() as seen:
        for _ in range(3):
            await ask_in_every_way(edge)

    assert not seen


@on_the_mesh
async def test_one_that_did_would_be_seen(
    edge: Edge, lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = RouterMesh.admit

    def look_up_and_admit(self: RouterMesh, tenant: Any) -> Any:
        assert mesh_config.flatten(self.snapshot.config)["router.max_queue"]
        return admit(self, tenant)

    monkeypatch.setattr(RouterMesh, "admit", look_up_and_admit)
    with lookups.counting() as seen:
        await ask_in_every_way(edge)

    assert seen["flatten"] >= 4


def test_what_serves_names_no_setting_by_a_string() -> None:
    keys = {key for key, _ in mesh_config.settings()}
    names = keys | {key.rpartition(".")[2] for key in keys}

    assert is_looked_up(ast.parse("settings['router.max_queue']"), keys, names)
    assert is_looked_up(ast.parse("getattr(settings, 'max_queue')"), keys, names)
    for folder in SERVING:
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert not is_looked_up(ast.parse(path.read_text()), keys, names), path


def is_looked_up(tree: ast.AST, keys: set[str], names: set[str]) -> bool:
    """A subscript or `get` by a dotted key, or `getattr` by a field's name."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=ast.Constant(value=str(text))) if text in keys:
                return True
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(text)), *_]):
                if text in keys:
                    return True
            case ast.Call(
                func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(text)), *_]
            ) if text in names:
                return True
    return False
