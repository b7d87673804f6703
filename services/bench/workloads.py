"""Made loads, and what can be done with any: cut it, or bring it to another rate."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from services.core.tokens import BYTES_PER_TOKEN
from services.core.workload import Arrival, Workload

# Ids of made prompts are below this: in every vocabulary, and none of the first, which
# are control tokens in many.
MADE_IDS = range(1_000, 30_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Prompts that begin with one of some prefixes, the first of which are asked for most."""

    num_requests: int = 2_000
    # Poisson.
    rate_per_s: float = 38.8
    num_prefixes: int = 64
    prefix_tokens: int = 4_000
    # Weight of the n-th prefix: 1 / n**zipf.
    zipf: float = 1.0
    suffix_tokens: int = 128
    output_tokens: int = 32
    block_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Short prompts that share nothing, their lengths even between two bounds."""

    num_requests: int = 2_000
    rate_per_s: float = 38.8
    low_tokens: int = 50
    high_tokens: int = 300
    output_tokens: int = 32
    block_tokens: int = 64
    seed: int = 0


class _Arrivals:
    """Made anew, and equal, at each iteration."""

    def __init__(self, load: SharedPrefix | Chats) -> None:
        self._load = load

    def __iter__(self) -> Iterator[Arrival]:
        load = self._load
        chance = random.Random(load.seed)
        at_s = 0.0
        make = _shared(load) if isinstance(load, SharedPrefix) else _chat(load)
        for number in range(load.num_requests):
            yield make(number, at_s, chance)
            at_s += chance.expovariate(load.rate_per_s)


class _Changed:
    def __init__(self, workload: Workload, num_requests: int, factor: float) -> None:
        self._workload = workload
        self._num_requests = num_requests
        self._factor = factor

    def __iter__(self) -> Iterator[Arrival]:
        for arrival in itertools.islice(self._workload.arrivals, self._num_requests):
            yield arrival._replace(at_s=arrival.at_s * self._factor)


def make(load: SharedPrefix | Chats) -> Workload:
    return Workload(
        name="shared-prefix" if isinstance(load, SharedPrefix) else "chats",
        block_tokens=load.block_tokens,
        num_requests=load.num_requests,
        arrivals=_Arrivals(load),
    )


def change(
    workload: Workload, *, num_requests: int | None = None, rate_per_s: float | None = None
) -> Workload:
    """The first requests alone, and time stretched so that so many come in a second."""
    most = workload.num_requests
    num_requests = most if num_requests is None else min(num_requests, most)
    factor = 1.0
    if rate_per_s is not None:
        now_per_s = rate_of(replace(workload, num_requests=num_requests))
        factor = now_per_s / rate_per_s if math.isfinite(now_per_s) else 1.0
    return Workload(
        name=workload.name,
        block_tokens=workload.block_tokens,
        num_requests=num_requests,
        arrivals=_Changed(workload, num_requests, factor),
    )


def rate_of(workload: Workload) -> float:
    """Requests a second, on average; infinite when all come at once."""
    times = [each.at_s for each in itertools.islice(workload.arrivals, workload.num_requests)]
    span_s = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / span_s if span_s else math.inf


def token_ids(arrival: Arrival, number: int, block_tokens: int) -> list[int]:
    """Ids of a prompt that shares with others what its chain says, and nothing more.

    `number`: of the request in its workload.
    """
    num_bytes = block_tokens * BYTES_PER_TOKEN
    material = [hashlib.shake_128(key).digest(num_bytes) for key in arrival.chain]
    rest = arrival.prompt_tokens - len(arrival.chain) * block_tokens
    own = hashlib.shake_128(f"request {number}".encode()).digest(rest * BYTES_PER_TOKEN)
    values = np.frombuffer(b"".join([*material, own]), "<u4")
    ids: list[int] = (values % len(MADE_IDS) + MADE_IDS.start).tolist()
    return ids


def _shared(load: SharedPrefix) -> Callable[[int, float, random.Random], Arrival]:
    ranks = range(1, load.num_prefixes + 1)
    totals = list(itertools.accumulate(rank**-load.zipf for rank in ranks))
    num_shared = load.prefix_tokens // load.block_tokens
    prompt_tokens = load.prefix_tokens + load.suffix_tokens
    num_own = prompt_tokens // load.block_tokens - num_shared
    chains = [_keys(f"{load.seed}/prefix {rank}", num_shared) for rank in ranks]

    def make_one(number: int, at_s: float, chance: random.Random) -> Arrival:
        chain = chance.choices(chains, cum_weights=totals)[0]
        chain += _keys(f"{load.seed}/request {number}", num_own)
        return Arrival(at_s, chain, prompt_tokens, load.output_tokens)

    return make_one


def _chat(load: Chats) -> Callable[[int, float, random.Random], Arrival]:
    def make_one(number: int, at_s: float, chance: random.Random) -> Arrival:
        prompt_tokens = chance.randint(load.low_tokens, load.high_tokens)
        chain = _keys(f"{load.seed}/chat {number}", prompt_tokens // load.block_tokens)
        return Arrival(at_s, chain, prompt_tokens, load.output_tokens)

    return make_one


def _keys(name: str, num_blocks: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{name}/{block}".encode()).digest() for block in range(num_blocks))
