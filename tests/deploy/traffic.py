"""Requests of every kind to a mesh, so that there is something to see on every panel."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import suppress
from typing import Literal, TypeAlias

from firsttoken.client import MeshClient, MeshError

RequestClass: TypeAlias = Literal["interactive", "batch"]

SHARED = "You answer questions about ships. " * 24


async def send(router: str, *, seconds: float, at_once: int = 12) -> int:
    """How many were answered. Prompts begin alike, some far too long; some callers leave."""
    until_s = asyncio.get_running_loop().time() + seconds
    numbers = itertools.count()
    async with MeshClient(router) as client:
        answered = await asyncio.gather(
            *(_one_after_the_other(client, numbers, until_s) for _ in range(at_once))
        )
    return sum(answered)


async def _one_after_the_other(
    client: MeshClient, numbers: itertools.count[int], until_s: float
) -> int:
    answered = 0
    while asyncio.get_running_loop().time() < until_s:
        number = next(numbers)
        chance = random.Random(number)
        prompt = f"{SHARED}Question {number % 40}. " + "And then? " * chance.randrange(40)
        request_class: RequestClass = "batch" if number % 5 == 0 else "interactive"
        timeout_s = 0.02 if number % 17 == 0 else 30.0
        if number % 23 == 0:
            prompt = "too long " * 4000
        with suppress(MeshError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                async for _ in client.generate(
                    prompt,
                    max_tokens=chance.randrange(1, 24),
                    request_class=request_class,
                    ignore_eos=True,
                ):
                    pass
            answered += 1
    return answered
