"""Greedy answers of the real model do not depend on what else the mesh is doing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.core import config as mesh_config
from tests.conftest import Mesh, MeshFactory

DATA = Path(__file__).parent.parent / "data"
MAX_TOKENS = 12
CONFIG = mesh_config.parse(
    {
        "mesh": {"block_tokens": 16},
        "worker": {
            "num_slots": 8,
            "max_context_tokens": 512,
            # 24 blocks of 16 tokens: a few prompts push the others out.
            "num_cache_blocks": 24,
            # Two threads that wait for each other crawl on a machine with anything else to do.
            "threads": 1,
        },
    }
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(mesh_of: MeshFactory) -> AsyncIterator[Mesh]:
    async with mesh_of(CONFIG, num_workers=1) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, str]]]:
    lines = (DATA / "mtbench_prompts.jsonl").read_text().splitlines()
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(mesh: Mesh, chats: list[list[dict[str, str]]]) -> list[tuple[int, ...]]:
    """One at a time, nothing reused: each has a salt of its own."""
    answers = [
        await mesh.client.complete(chat, max_tokens=MAX_TOKENS, cache_salt=f"alone {index}")
        for index, chat in enumerate(chats)
    ]
    assert len(chats) == 20
    assert all(answer.usage.cached_tokens == 0 for answer in answers)
    return [tuple(answer.token_ids) for answer in answers]


async def test_eight_at_once_answer_as_alone(
    mesh: Mesh, chats: list[list[dict[str, str]]], alone: list[tuple[int, ...]]
) -> None:
    eight = asyncio.Semaphore(8)

    async def ask(index: int) -> tuple[int, ...]:
        async with eight:
            answer = await mesh.client.complete(
                chats[index], max_tokens=MAX_TOKENS, cache_salt=f"together {index}"
            )
        return tuple(answer.token_ids)

    together = await asyncio.gather(*map(ask, range(len(chats))))

    assert list(together) == alone


async def test_reused_prefixes_answer_as_alone(
    mesh: Mesh, chats: list[list[dict[str, str]]], alone: list[tuple[int, ...]]
) -> None:
    cached_tokens = 0
    for chat, expected in zip(chats, alone, strict=True):
        await mesh.client.complete(chat, max_tokens=1)
        again = await mesh.client.complete(chat, max_tokens=MAX_TOKENS)
        cached_tokens += again.usage.cached_tokens

        assert tuple(again.token_ids) == expected
        assert again.usage.cached_tokens % 16 == 0
        assert (
            again.usage.cached_tokens + again.usage.evaluated_prompt_tokens
            == again.usage.prompt_tokens
        )

    assert cached_tokens > 0


async def test_evicted_prefixes_answer_as_alone(
    mesh: Mesh, chats: list[list[dict[str, str]]], alone: list[tuple[int, ...]]
) -> None:
    """The pool is far smaller than the prompts: what comes back has partly been evicted."""
    answers = [await mesh.client.complete(chat, max_tokens=MAX_TOKENS) for chat in chats]
    load = mesh.workers[0].load

    assert [tuple(answer.token_ids) for answer in answers] == alone
    assert load.num_blocks_cached == load.num_blocks_total == 24
