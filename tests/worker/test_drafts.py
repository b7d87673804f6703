"""Answers are the same with drafts and without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from firsttoken.client import Answer, Options
from firsttoken.worker.v1 import worker_pb2
from services.core import config
from services.observer.model import Request
from tests.conftest import Mesh, MeshFactory
from tests.router.meshes import configure
from tests.runtime.waiting import eventually

REPEAT = "Repeat this text exactly:\n" + "The tide comes in at dawn and goes out at dusk. " * 6
ASKED: tuple[Options, ...] = (
    {"max_tokens": 60},
    {"max_tokens": 40, "ignore_eos": True, "logprobs": 2},
    {"max_tokens": 40, "temperature": 0.7, "seed": 3, "top_p": 0.9},
    {"max_tokens": 40, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"max_tokens": 60, "stop": ["out at"]},
    {"max_tokens": 1},
    {"max_tokens": 2},
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(mesh_of: MeshFactory) -> AsyncIterator[Mesh]:
    engine = {"num_slots": 8, "max_context_tokens": 1024}
    made: Any = config.parse({"worker": engine, "mesh": {"block_tokens": 16}})
    async with mesh_of(made, with_observer=True) as running:
        yield running


async def set_drafts(mesh: Mesh, max_tokens: int) -> None:
    generation = await configure(mesh.control.address, {"worker.max_draft_tokens": str(max_tokens)})
    node: Any = mesh.workers[0]
    await eventually(lambda: node._control.snapshot.generation == generation)


def said(answer: Answer) -> tuple[Any, ...]:
    return answer.text, answer.token_ids, answer.finish_reason, answer.logprobs


async def ask(mesh: Mesh, options: Options) -> tuple[Any, ...]:
    return said(await mesh.client.complete([{"role": "user", "content": REPEAT}], **options))


def counts(mesh: Mesh) -> dict[str, worker_pb2.Drafts]:
    front: Any = mesh.workers[0]
    drafts: dict[str, worker_pb2.Drafts] = front._front.hub.load.drafts
    return drafts


def told(mesh: Mesh) -> Sequence[Request]:
    """To the observer."""
    assert mesh.observer is not None
    return mesh.observer.books.window().requests


async def test_drafts_change_no_answer(mesh: Mesh) -> None:
    """One by one, and all at once."""
    await set_drafts(mesh, 0)
    without = [await ask(mesh, options) for options in ASKED]
    await set_drafts(mesh, 5)
    one_by_one = [await ask(mesh, options) for options in ASKED]
    at_once = await asyncio.gather(*(ask(mesh, options) for options in ASKED))

    assert one_by_one == without
    assert at_once == without
    assert sum(each.num_accepted for each in counts(mesh).values()) > 0
    await eventually(lambda: any(each.accepted_tokens for each in told(mesh)))
    assert all(each.drafted_tokens >= each.accepted_tokens for each in told(mesh))


async def test_a_cancelled_answer_leaves_nothing(mesh: Mesh) -> None:
    await set_drafts(mesh, 5)
    for num_chunks in (1, 2, 5):
        asked = [{"role": "user", "content": REPEAT}]
        async with mesh.client.generate(asked, max_tokens=500, ignore_eos=True) as stream:
            for _ in range(num_chunks):
                await anext(stream)
    await eventually(lambda: mesh.workers[0].is_idle)
