"""Routers that know all that lies in each worker's cache: what a real one is measured against.

Offline: one request after the other, no time passes, and a prompt's blocks are in its
worker's cache as soon as it is routed. A hit is a run of whole blocks from the start of
the prompt. Caches evict what was used longest ago, a chain's tail before its head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from services.core.block_cache import Cache
from services.core.workload import Arrival


class Routed(NamedTuple):
    """`uncached_tokens`: what each worker had to compute."""

    prompt_tokens: int
    cached_tokens: int
    uncached_tokens: tuple[int, ...]
    requests: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def most_work(self) -> float:
        """Of the busiest worker, in means."""
        return max(self.uncached_tokens) / self._mean

    @property
    def least_work(self) -> float:
        return min(self.uncached_tokens) / self._mean

    @property
    def _mean(self) -> float:
        return max(sum(self.uncached_tokens), 1) / len(self.uncached_tokens)


# Which worker: from the uncached tokens of the prompt at each, and those it had before.
Choose: TypeAlias = Callable[[int, Sequence[int], Sequence[int]], int]


def cost_aware(number: int, uncached: Sequence[int], so_far: Sequence[int]) -> int:
    """The least (uncached tokens + uncached tokens so far above the least loaded worker's)."""
    return min(range(len(uncached)), key=lambda worker: uncached[worker] + so_far[worker])


def round_robin(number: int, uncached: Sequence[int], so_far: Sequence[int]) -> int:
    return number % len(uncached)


def route(
    arrivals: Iterable[Arrival],
    *,
    block_tokens: int,
    num_workers: int,
    num_blocks: int | None = None,
    choose: Choose = cost_aware,
) -> Routed:
    """`num_blocks`: of each worker's cache; None: unlimited."""
    caches = [Cache(num_blocks) for _ in range(num_workers)]
    so_far, requests = [0] * num_workers, [0] * num_workers
    prompt_tokens = 0
    for number, arrival in enumerate(arrivals):
        uncached = [
            arrival.prompt_tokens - cache.match(arrival.chain) * block_tokens for cache in caches
        ]
        worker = choose(number, uncached, so_far)
        caches[worker].use(arrival.chain)
        so_far[worker] += uncached[worker]
        requests[worker] += 1
        prompt_tokens += arrival.prompt_tokens
    return Routed(prompt_tokens, prompt_tokens - sum(so_far), tuple(so_far), tuple(requests))
