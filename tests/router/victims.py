"""Workers to kill under their answers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

from firsttoken.client import Answer, GenerationStream, Options, Piece, Prompt
from tests.router.meshes import Mesh, Served, collect, run_process, run_workers

# What of a worker is killed: all of it, or the process of its engine alone.
PARTS = ("front", "core")
PATIENCE_S = 120.0

Asked: TypeAlias = tuple[Prompt, Options]


class Victims:
    """Two workers as processes; a front that was killed has a successor.

    `options`: of each worker, on its command line.
    """

    def __init__(self, mesh: Mesh, stack: AsyncExitStack, *options: str) -> None:
        self._mesh = mesh
        self._options = options
        self._stack = stack
        self.workers: dict[str, Served] = {}

    async def add(self) -> None:
        worker = await self._stack.enter_async_context(
            run_process("worker", self._mesh.control, *self._options)
        )
        self.workers[worker.address] = worker

    def kill_at_work(self, part: str) -> None:
        [address] = self._mesh.at_work()
        self.kill(address, part)

    def kill(self, address: str, part: str) -> None:
        os.kill(self.workers[address].pid_of(part), signal.SIGKILL)
        if part == "front":
            del self.workers[address]

    async def ready(self) -> None:
        while len(self.workers) < 2:
            await self.add()
        await self._mesh.ready(len(self.workers))

    async def disturb(
        self, asked: Sequence[Asked], part: str, *, rng: random.Random, after: int
    ) -> list[Answer]:
        """Answers told at once, under which a worker dies once the first has `after` tokens."""
        await self.ready()
        pieces: list[list[Piece]] = [[] for _ in asked]
        telling = [
            asyncio.create_task(finish(self._mesh.client.generate(prompt, **options), told))
            for (prompt, options), told in zip(asked, pieces, strict=True)
        ]
        async with asyncio.timeout(PATIENCE_S):
            while num_tokens(pieces[0]) < after and not telling[0].done():
                await asyncio.sleep(0.002)
        if at_work := self._mesh.at_work():
            self.kill(rng.choice(at_work), part)
        return await asyncio.gather(*telling)


@asynccontextmanager
async def run_victims(mesh: Mesh, *options: str) -> AsyncIterator[Victims]:
    async with AsyncExitStack() as stack, run_workers(mesh, 2, *options) as workers:
        victims = Victims(mesh, stack, *options)
        victims.workers.update(workers)
        yield victims


async def read(stream: GenerationStream, count: int) -> list[Piece]:
    """The pieces up to this token, or up to the end."""
    pieces: list[Piece] = []
    async for piece in stream:
        pieces.append(piece)
        if num_tokens(pieces) >= count:
            break
    return pieces


async def finish(stream: GenerationStream, pieces: list[Piece]) -> Answer:
    await collect(stream, pieces)
    return stream.answer


def num_tokens(pieces: list[Piece]) -> int:
    return sum(len(piece.token_ids) for piece in pieces)


def said(answer: Answer) -> tuple[Any, ...]:
    """All of an answer that its client can tell."""
    return (
        answer.text,
        answer.token_ids,
        answer.logprobs,
        answer.finish_reason,
        answer.stop_string,
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
