"""The real model: answers go on elsewhere, bit for bit, when their worker is killed."""

from __future__ import annotations

import random

import pytest

from firsttoken.client import Options
from services.core import config as mesh_config
from tests.router.meshes import run_mesh
from tests.router.victims import PARTS, Asked, read, run_victims, said

CONFIG = mesh_config.parse(
    {
        "mesh": {"block_tokens": 16},
        "router": {"routing_strategy": "round_robin", "max_migrations": 16},
        "worker": {
            "num_slots": 4,
            "max_context_tokens": 256,
            "num_cache_blocks": 64,
            "threads": 1,
        },
    }
)
GREEDY: Options = {"max_tokens": 32, "ignore_eos": True}
SEEDED: Options = {**GREEDY, "temperature": 0.9, "top_p": 0.95, "seed": 11}
PENALIZED: Options = {**SEEDED, "repetition_penalty": 1.2, "logprobs": 2}
# Goes on with emoji: characters of several tokens each.
MULTIBYTE = "Emoji: 🎉🦆🚀🎉🦆🚀🎉🦆🚀 Emoji: 🎉🦆"
CHAT = [{"role": "user", "content": "Tell me a story of a fox and a lighthouse."}]
ASKED: list[Asked] = [(MULTIBYTE, GREEDY), (CHAT, GREEDY), (CHAT, SEEDED), (CHAT, PENALIZED)]

SUM = [{"role": "user", "content": "What is 2 + 2? Answer with one short sentence."}]
WHOLE: Options = {"max_tokens": 100}


@pytest.mark.parametrize("part", PARTS)
async def test_answers_equal_the_undisturbed_ones(part: str) -> None:
    rng = random.Random(part)
    num_migrations = 0
    async with run_mesh(CONFIG) as mesh, run_victims(mesh) as victims:
        undisturbed = [await mesh.client.complete(prompt, **options) for prompt, options in ASKED]
        for _ in range(2):
            answers = await victims.disturb(ASKED, part, rng=rng, after=rng.randrange(1, 30))
            assert list(map(said, answers)) == list(map(said, undisturbed))
            num_migrations += sum(answer.migrations for answer in answers)

    assert num_migrations >= 2
    assert not undisturbed[0].text.isascii()


async def test_an_answer_ends_where_it_would_have_ended() -> None:
    """By the model's own end of sequence, and by a stop string that is broken in two."""
    num_migrations = 0
    async with run_mesh(CONFIG) as mesh, run_victims(mesh) as victims:
        whole = await mesh.client.complete(SUM, **WHOLE)
        assert whole.finish_reason == "stop"
        endings: list[Options] = [WHOLE, {**WHOLE, "stop": [whole.text[-12:-2]]}]
        for options in endings:
            undisturbed = await mesh.client.complete(SUM, **options)
            await victims.ready()
            async with mesh.client.generate(SUM, **options) as stream:
                await read(stream, len(undisturbed.token_ids) - 3)
                if mesh.at_work():
                    victims.kill_at_work("core")
                async for _ in stream:
                    pass
            assert said(stream.answer) == said(undisturbed)
            num_migrations += stream.answer.migrations
    assert num_migrations >= 1
