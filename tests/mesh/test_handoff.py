"""The real model: a prompt computed by one worker and answered by another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from firsttoken.client import Answer
from services.core import config as mesh_config
from services.core.settings import MeshConfig
from tests.conftest import Mesh, MeshFactory

DATA = Path(__file__).parent.parent / "data"
MAX_TOKENS = 8
WORKER = {
    "num_slots": 8,
    "max_context_tokens": 512,
    "num_cache_blocks": 64,
    "threads": 1,
    "handoff_min_tokens": 1,
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


def config_of(transport: str) -> MeshConfig:
    return mesh_config.parse(
        {"mesh": {"block_tokens": 16}, "worker": {**WORKER, "handoff_transport": transport}}
    )


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, str]]]:
    lines = (DATA / "mtbench_prompts.jsonl").read_text().splitlines()
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undivided(
    mesh_of: MeshFactory, chats: list[list[dict[str, str]]]
) -> list[tuple[int, ...]]:
    """The answers of one worker that does everything."""
    async with mesh_of(config_of("auto")) as mesh:
        answers = await asyncio.gather(*(ask(mesh, chat, "undivided") for chat in chats))
    return [answer.token_ids for answer in answers]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shared_memory", "grpc"])
async def mesh(mesh_of: MeshFactory, request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    async with mesh_of(config_of(request.param), num_prefill_workers=1) as mesh:
        yield mesh


async def ask(mesh: Mesh, chat: list[dict[str, str]], salt: str) -> Answer:
    return await mesh.client.complete(chat, max_tokens=MAX_TOKENS, cache_salt=salt)


async def test_handed_off_alone_answers_as_undivided(
    mesh: Mesh, chats: list[list[dict[str, str]]], undivided: list[tuple[int, ...]]
) -> None:
    decode, prefill = mesh.workers
    answers = [await ask(mesh, chat, "alone") for chat in chats]

    assert [answer.token_ids for answer in answers] == undivided
    assert decode.load.prompt_tokens_evaluated == 0
    assert prefill.load.prompt_tokens_evaluated == sum(
        answer.usage.evaluated_prompt_tokens for answer in answers
    )


async def test_handed_off_eight_at_once_answers_as_undivided(
    mesh: Mesh, chats: list[list[dict[str, str]]], undivided: list[tuple[int, ...]]
) -> None:
    decode, _ = mesh.workers
    before = decode.load.prompt_tokens_evaluated
    eight = asyncio.Semaphore(8)

    async def ask_in_turn(chat: list[dict[str, str]]) -> tuple[int, ...]:
        async with eight:
            return (await ask(mesh, chat, "together")).token_ids

    assert await asyncio.gather(*map(ask_in_turn, chats)) == undivided
    assert decode.load.prompt_tokens_evaluated == before
