"""How well calls of unequal length are spread over unequal machines.

Real workers with simulated engines, each with a speed of its own; a step takes as long as its
sequences together, so that sharing a machine gains nothing. The optimum is of someone who
knew all lengths and speeds before: the best of all assignments, by the speeds that each
machine showed by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from firsttoken.client import MeshClient
from services.core.config import parse
from services.core.settings import MeshConfig

# Milliseconds a token.
TOKEN_MS = (4.0, 8.0, 16.0)
NUM_CALLS = 5
PROMPT_TOKENS = 64
ANSWER_TOKENS = (20, 240)


class Machine(NamedTuple):
    """As measured: seconds for a call of the shortest answer, and for each further token."""

    shortest_s: float
    token_s: float

    def call_s(self, length: int) -> float:
        return self.shortest_s + (length - ANSWER_TOKENS[0]) * self.token_s


def config_of(num_slots: int) -> MeshConfig:
    """`num_slots`: requests that a machine runs at once."""
    return parse({"worker": {"engine": "simulated", "num_slots": num_slots}})


def own_settings(token_ms: float) -> dict[str, float]:
    return {
        "worker.simulated.decode_step_ms": 0.0,
        "worker.simulated.decode_step_ms_per_seq": token_ms,
        # As on a CPU: a prompt's token takes about a tenth of an answer's.
        "worker.simulated.prefill_tokens_per_s": 1e4 / token_ms,
    }


def lengths_of(seed: int) -> list[int]:
    return [
        random.Random(seed + index * 7919).randint(*ANSWER_TOKENS) for index in range(NUM_CALLS)
    ]


def optimal_makespan_s(works: Sequence[Sequence[float]]) -> float:
    """Of calls, each with the seconds it takes at each machine. Tries all assignments."""
    num_machines = len(works[0])
    best_s = float("inf")
    for places in itertools.product(range(num_machines), repeat=len(works)):
        busy_s = [0.0] * num_machines
        for work, place in zip(works, places, strict=True):
            busy_s[place] += work[place]
        best_s = min(best_s, max(busy_s))
    return best_s


async def run_calls(client: MeshClient, lengths: Sequence[int], *, seed: int) -> float:
    """All at once; the seconds until the last has ended."""

    async def call(index: int, length: int) -> None:
        start = (seed * 1000 + index * 100) % 400 + 1
        prompt = [start + step % 50 for step in range(PROMPT_TOKENS)]
        async with client.generate(prompt, max_tokens=length, ignore_eos=True) as stream:
            async for _ in stream:
                pass

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for index, length in enumerate(lengths):
            group.create_task(call(index, length))
    return time.monotonic() - began_s


async def measure_machine(client: MeshClient) -> Machine:
    """Where there is one machine, and idle."""
    short_s, long_s = [await run_calls(client, [length], seed=800) for length in ANSWER_TOKENS]
    return Machine(short_s, (long_s - short_s) / (ANSWER_TOKENS[1] - ANSWER_TOKENS[0]))


def figures_of(
    machines: Sequence[Machine], rounds: Sequence[tuple[Sequence[int], float]]
) -> dict[str, Any]:
    """`rounds`: lengths, and what all calls together took."""
    rows = []
    for lengths, took_s in rounds:
        works = [[machine.call_s(length) for machine in machines] for length in lengths]
        optimal_s = optimal_makespan_s(works)
        alone_s = min(sum(column) for column in zip(*works, strict=True))
        rows.append(
            {
                "lengths": list(lengths),
                "makespan_s": took_s,
                "optimal_s": optimal_s,
                "of_optimum": optimal_s / took_s,
                "fastest_alone_s": alone_s,
                "against_fastest_alone": alone_s / took_s,
            }
        )
    shares = [row["of_optimum"] for row in rows]
    return {
        "token_ms": [machine.token_s * 1e3 for machine in machines],
        "mean_of_optimum": statistics.mean(shares),
        "worst_of_optimum": min(shares),
        "mean_against_fastest_alone": statistics.mean(r["against_fastest_alone"] for r in rows),
        "rounds": rows,
    }
