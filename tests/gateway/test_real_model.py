"""Answers of a real model, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from services.core.config import parse
from tests.gateway.edges import CHAT, Edge, chat_body, run_edge

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
SPELLED = [{"role": "user", "content": "Repeat exactly: naïve café 🙂 日本"}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[Edge]:
    # Two threads that wait for each other crawl on a machine with anything else to do.
    async with run_edge(parse({"worker": {"threads": 1}})) as edge:
        yield edge


async def test_it_says_what_the_mesh_says(edge: Edge) -> None:
    direct = await edge.mesh.client.complete(CAPITAL, max_tokens=16, temperature=0.0)
    answer = await edge.chat(messages=CAPITAL, max_tokens=16, temperature=0)

    [choice] = answer["choices"]
    assert choice["message"]["content"] == direct.text
    assert "Paris" in direct.text
    assert choice["finish_reason"] == direct.finish_reason
    assert answer["usage"]["prompt_tokens"] == direct.usage.prompt_tokens


@pytest.mark.parametrize("temperature", [0, 1])
async def test_characters_of_several_tokens_are_never_cut(edge: Edge, temperature: int) -> None:
    body: dict[str, Any] = chat_body(
        messages=SPELLED, max_tokens=40, temperature=temperature, seed=5, logprobs=True
    )
    whole = (await edge.chat(**body))["choices"][0]
    choices = [chunk["choices"][0] for chunk in await edge.chunks(CHAT, body)]

    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["message"]["content"]
    entries = whole["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled.decode(errors="replace") == text


async def test_the_same_seed_gives_the_same_answer(edge: Edge) -> None:
    async def ask(seed: int) -> list[str]:
        answer = await edge.chat(n=2, seed=seed, max_tokens=12, temperature=1.5)
        return [choice["message"]["content"] for choice in answer["choices"]]

    first = await ask(3)

    assert await ask(3) == first
    assert first[0] != first[1]
    assert (await ask(4))[0] == first[1]


async def test_a_chat_without_a_limit_ends_by_itself(edge: Edge) -> None:
    answer = await edge.chat(messages=CAPITAL, temperature=0)

    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_what_was_said_before_is_cached(edge: Edge) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me of the sea. " * 30}]
    first = await edge.chat(messages=messages, max_tokens=8, temperature=0)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    second = await edge.chat(messages=messages, max_tokens=8, temperature=0)

    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128


async def test_tools_are_refused_since_this_model_cannot_see_them(edge: Edge) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    error = await edge.refused(CHAT, chat_body(tools=[tool]))

    assert (error.status, error.param) == (400, "tools")
