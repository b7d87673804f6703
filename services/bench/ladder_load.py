"""The requests that climb the ladder: the same, at the same times, on each rung. Pure."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from services.core.workload import Arrival

# Of what the baseline can do at most.
LOAD_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Chats that begin with one of some prefixes, and requests that can wait (batch).

    Those are documents of `batch_tokens` that share nothing, `batch_burst` at once; without
    `batch_tokens`, they are like the chats.
    """

    block_tokens: int = 64
    num_prefixes: int
    prefix_tokens: int
    # Weight of the n-th prefix: 1 / n**zipf.
    zipf: float
    suffix_tokens: int
    output_tokens: int
    batch_share: float
    batch_tokens: int | None = None
    batch_burst: int = 1

    def arrivals(self, *, num_requests: int, seconds: float, seed: int = 0) -> list[Arrival]:
        """Poisson, given how many come in all; documents spread over the whole time."""
        chance = random.Random(seed)
        num_batch = round(num_requests * self.batch_share)
        chats = [self._chat(chance, seconds) for _ in range(num_requests - num_batch)]
        if self.batch_tokens is None:
            batch = [self._chat(chance, seconds) for _ in range(num_batch)]
        else:
            batch = self._documents(chance, seconds, num_batch, self.batch_tokens)
        chats += [each._replace(request_class="batch") for each in batch]
        return sorted(chats, key=lambda arrival: arrival.at_s)

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def each_prefix(self, times: int) -> list[Arrival]:
        """So many requests for each in a row, all at once."""
        return [
            self._make(0.0, rank) for rank in range(1, self.num_prefixes + 1) for _ in range(times)
        ]

    def _documents(
        self, chance: random.Random, seconds: float, number: int, prompt_tokens: int
    ) -> list[Arrival]:
        """Each burst somewhere in its own part of the time."""
        num_bursts = -(-number // self.batch_burst)
        times_s = [seconds * (each + chance.random()) / num_bursts for each in range(num_bursts)]
        return [
            Arrival(times_s[each // self.batch_burst], (), prompt_tokens, self.output_tokens)
            for each in range(number)
        ]

    def _chat(self, chance: random.Random, seconds: float) -> Arrival:
        ranks = range(1, self.num_prefixes + 1)
        [rank] = chance.choices(ranks, [each**-self.zipf for each in ranks])
        return self._make(chance.uniform(0.0, seconds), rank)

    def _make(self, at_s: float, rank: int) -> Arrival:
        chain = tuple(_keys(rank, self.prefix_tokens // self.block_tokens))
        return Arrival(at_s, chain, self.prefix_tokens + self.suffix_tokens, self.output_tokens)


def _keys(rank: int, num_blocks: int) -> Iterator[bytes]:
    for block in range(num_blocks):
        yield hashlib.sha256(f"ladder/{rank}/{block}".encode()).digest()
