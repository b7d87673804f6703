"""What reading and computing blocks takes, learnt from how long each took lately.

Pure: times are in seconds, and are arguments.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

# One slow observation on a busy machine does not yet mean that everything has become slow.
MOST_GROWTH = 4.0


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
    """A moving estimate of a tier's cost: a line through what reads took lately.

    Their beginnings tell the latency, their ends the bandwidth. While all observations
    are of one size, a weak prior decides what of their time is latency.
    """

    # Of the weight of all earlier observations, at each new one. A read may be slow by
    # chance and never fast: one much faster than believed means that the belief was wrong.
    KEEP = 0.9
    KEEP_OF_WRONG = 0.5
    PRIOR_WEIGHT = 0.002
    PRIOR_LATENCY_S = 0.001

    def __init__(self) -> None:
        self.num_observed = 0
        self.observed_s = -math.inf
        self._hint: ReadCost | None = None
        self._sums = _Sums()

    @property
    def cost(self) -> ReadCost | None:
        """None: nothing is known."""
        return self._fit() if self.num_observed else self._hint

    def hint(self, cost: ReadCost) -> None:
        """What somebody else has measured; own reads count more."""
        self._hint = cost

    def observe(self, num_blocks: int, read_s: float, now_s: float) -> None:
        """Of a read, these blocks had come after this time. 0 blocks: the first is about to."""
        cost, keep = self.cost, self.KEEP
        if cost is not None:
            known_s = cost.latency_s + num_blocks * cost.block_s
            keep = self.KEEP_OF_WRONG if read_s < known_s / 2 else self.KEEP
            read_s = min(read_s, MOST_GROWTH * max(known_s, 1e-4))
        self._sums.add(num_blocks, read_s, weight=1 / max(1, num_blocks), keep=keep)
        self.num_observed += 1
        self.observed_s = now_s

    def observe_wait(self, waited_s: float, now_s: float) -> None:
        """Nothing has come in this time: a lesson only if something should have."""
        cost = self.cost
        if cost is None or waited_s > cost.of(1):
            self.observe(1, waited_s, now_s)

    def _fit(self) -> ReadCost:
        """Least squares; neither part is negative."""
        sums = self._sums
        weight = sums.weight + self.PRIOR_WEIGHT  # the prior: no blocks, PRIOR_LATENCY_S
        time = sums.y + self.PRIOR_WEIGHT * self.PRIOR_LATENCY_S
        spread = weight * sums.xx - sums.x**2
        block_s = (weight * sums.xy - sums.x * time) / spread if spread else 0.0
        latency_s = (time - block_s * sums.x) / weight
        if latency_s < 0:
            return ReadCost(0.0, sums.xy / sums.xx)
        if block_s < 0:
            return ReadCost(time / weight, 0.0)
        return ReadCost(latency_s, block_s)


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
        keep = 0.5 ** min(1.0, num_tokens / self.HALF_LIFE_TOKENS)
        self._sums.add(start + num_tokens / 2, token_s, weight=num_tokens, keep=keep)

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
    """Weighted sums over points (x, y), of which the latest count most."""

    def __init__(self) -> None:
        self.weight = self.x = self.xx = self.y = self.xy = 0.0

    def add(self, x: float, y: float, *, weight: float, keep: float) -> None:
        """`keep`: what all earlier points are worth from now on."""
        self.weight = keep * self.weight + weight
        self.x = keep * self.x + weight * x
        self.xx = keep * self.xx + weight * x * x
        self.y = keep * self.y + weight * y
        self.xy = keep * self.xy + weight * x * y
