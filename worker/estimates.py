"""What reading and computing blocks takes, learnt from how long each took lately.

Pure: times are in seconds, and are arguments.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

# One slow observation on a busy machine does not yet mean that everything has become slow.
MOST_GROWTH = 4.0
LEAST_READ_S = 0.001


class Tier(enum.Enum):
    """Where the KV store has a block: in node memory, or in Redis."""

    L1 = "L1"
    L2 = "L2"


class ReadCost(NamedTuple):
    """Reading n blocks takes latency_s + n * block_s."""

    latency_s: float
    block_s: float

    def of(self, num_blocks: int) -> float:
        return self.latency_s + num_blocks * self.block_s if num_blocks else 0.0


class ReadEstimate:
    """A moving estimate of a tier's cost."""

    # Of the difference to what was believed, how much is believed after a read.
    USUAL = 0.25
    # A read may be slow by chance, and never fast: one that takes less than half is believed
    # at once, one that takes more than twice as long mostly, if the one before it did too.
    SURPRISE = 2.0
    SLOW_AGAIN = 0.8
    FIRST_LATENCY_S = 0.001

    def __init__(self) -> None:
        self.num_reads = 0
        self.observed_s = -math.inf
        self._hint: ReadCost | None = None
        self._latency_s: float | None = None
        self._block_s = 0.0
        self._was_slow = False

    @property
    def cost(self) -> ReadCost | None:
        """None: nothing is known."""
        if not self.num_reads:
            return self._hint
        return ReadCost(self._known_latency_s, self._block_s)

    def hint(self, cost: ReadCost) -> None:
        """What somebody else has measured; own reads count more."""
        self._hint = cost

    def observe(
        self, num_blocks: int, read_s: float, now_s: float, *, latency_s: float | None = None
    ) -> None:
        """A read of at least one block. `latency_s`: until the first was there to be copied."""
        if latency_s is not None:
            self._observe_latency(latency_s)
        block_s = max(0.0, read_s - self._known_latency_s) / num_blocks
        if self.num_reads:
            block_s = self._weigh(num_blocks, block_s)
        self._block_s = block_s
        self.num_reads += 1
        self.observed_s = now_s

    def observe_wait(self, waited_s: float, now_s: float) -> None:
        """Nothing has come in this time: a lesson only if something should have."""
        cost = self.cost
        if cost is None or waited_s > cost.of(1):
            self.observe(1, waited_s, now_s)

    @property
    def _known_latency_s(self) -> float:
        if self._latency_s is not None:
            return self._latency_s
        return self._hint.latency_s if self._hint else self.FIRST_LATENCY_S

    def _observe_latency(self, latency_s: float) -> None:
        known_s = self._latency_s
        if known_s is None:
            self._latency_s = latency_s
        else:
            clipped_s = min(latency_s, MOST_GROWTH * known_s)
            self._latency_s = known_s + self.USUAL * (clipped_s - known_s)

    def _weigh(self, num_blocks: int, block_s: float) -> float:
        known_s = self._block_s
        # Less than this is noise.
        least_s = LEAST_READ_S / num_blocks
        is_slow = block_s > self.SURPRISE * max(known_s, least_s)
        share = self.USUAL
        if is_slow and self._was_slow:
            share = self.SLOW_AGAIN
        elif is_slow:
            block_s = min(block_s, MOST_GROWTH * max(known_s, least_s))
        elif block_s < known_s / self.SURPRISE:
            share = 1.0
        self._was_slow = is_slow
        return known_s + share * (block_s - known_s)


class ComputeEstimate:
    """A moving estimate of a prompt token's cost: a line through the latest prompts.

    A token attends to all before it, so the cost grows with its position. How much,
    only prompts of different lengths tell; until then it is taken not to grow.
    """

    # Earlier prompts count half after so many tokens.
    HALF_LIFE_TOKENS = 2048
    # Positions that differ by less than about this say nothing of the growth.
    ALIKE_TOKENS = 64

    def __init__(self) -> None:
        self._sums = _Sums()

    def observe(self, start: int, num_tokens: int, compute_s: float) -> None:
        """The tokens at positions start.. were computed, one chunk after the other."""
        token_s = compute_s / num_tokens
        known_s = self.of(start, num_tokens)
        if known_s is not None:
            token_s = min(token_s, MOST_GROWTH * known_s / num_tokens)
        self._sums.decay(0.5 ** min(1.0, num_tokens / self.HALF_LIFE_TOKENS))
        self._sums.add(start + num_tokens / 2, token_s, weight=num_tokens)

    def of(self, start: int, num_tokens: int) -> float | None:
        """Seconds for the tokens at positions start..; None: nothing is known."""
        sums = self._sums
        if not sums.weight:
            return None
        mean_x, mean_y = sums.x / sums.weight, sums.y / sums.weight
        covariance = sums.xy / sums.weight - mean_x * mean_y
        variance = sums.xx / sums.weight - mean_x**2
        growth_s = max(0.0, covariance / (variance + self.ALIKE_TOKENS**2))
        # A line through data far from it: no token is free.
        token_s = mean_y + growth_s * (start + num_tokens / 2 - mean_x)
        return num_tokens * max(token_s, mean_y / MOST_GROWTH)


class _Sums:
    """Weighted sums over points (x, y)."""

    def __init__(self) -> None:
        self.weight = self.x = self.xx = self.y = self.xy = 0.0

    def add(self, x: float, y: float, *, weight: float) -> None:
        self.weight += weight
        self.x += weight * x
        self.xx += weight * x * x
        self.y += weight * y
        self.xy += weight * x * y

    def decay(self, keep: float) -> None:
        """What all points so far are worth from now on."""
        self.weight *= keep
        self.x *= keep
        self.xx *= keep
        self.y *= keep
        self.xy *= keep
