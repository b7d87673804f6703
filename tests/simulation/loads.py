"""Small workloads, and the meshes that they are sent through."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Sequence
from typing import Any

from services.core import config as mesh_config
from services.core.settings import MeshConfig
from services.core.workload import Arrival
from services.simulation.router import Outcome

BLOCK_TOKENS = 64


def configure(
    *, strategy: str = "kv_aware", worker: dict[str, Any] | None = None, **router: Any
) -> MeshConfig:
    """Workers of 20,000 prompt tokens a second, 10 ms a decode step and 384 blocks of 64 tokens."""
    timing = {
        "prefill_tokens_per_s": 20_000,
        "decode_step_ms": 10,
        "decode_step_ms_per_seq": 0,
        "num_blocks": 384,
        "transfer_gb_per_s": 1e6,
    }
    defaults = {"num_slots": 16, "max_context_tokens": 8192, "simulated": timing}
    return mesh_config.parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "router": {"routing_strategy": strategy, **router},
            "worker": {"engine": "simulated", **defaults, **(worker or {})},
        }
    )


def chain(name: str, num_blocks: int) -> tuple[bytes, ...]:
    """Keys of equal beginnings are equal for equal names."""
    return tuple(hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(num_blocks))


def shared_prefixes(
    *,
    num_requests: int,
    rate: float,
    seed: int = 0,
    num_prefixes: int = 16,
    prefix_tokens: int = 1024,
    suffix_tokens: int = 128,
    output_tokens: int = 32,
    **arrival: Any,
) -> list[Arrival]:
    """Poisson arrivals; the n-th prefix is asked for in proportion to 1/n."""
    chance = random.Random(seed)
    chains = [chain(f"p{index}", prefix_tokens // BLOCK_TOKENS) for index in range(num_prefixes)]
    weights = [1 / (1 + index) for index in range(num_prefixes)]
    at_s = 0.0
    arrivals = []
    for _ in range(num_requests):
        at_s += chance.expovariate(rate)
        (prefix,) = chance.choices(chains, weights)
        arrivals.append(
            Arrival(at_s, prefix, prefix_tokens + suffix_tokens, output_tokens, **arrival)
        )
    return arrivals


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    prompt_tokens = sum(outcome.arrival.prompt_tokens for outcome in outcomes)
    return sum(outcome.cached_tokens for outcome in outcomes) / prompt_tokens


def median_ttft_s(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(outcome.ttft_s for outcome in outcomes)


def errors(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.error for outcome in outcomes if outcome.error]
