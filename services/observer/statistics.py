"""Small statistics: quantiles, and whether two samples differ by more than noise. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class MannWhitney(NamedTuple):
    """`superiority`: the chance that one of the second sample is larger than one of the first."""

    superiority: float
    # Two-sided, by the normal approximation with ties.
    p: float


def quantile(values: Sequence[float] | Floats, share: float) -> float:
    """NaN where there is none."""
    ordered = np.sort(np.asarray(values, np.float64))
    if not ordered.size:
        return math.nan
    return float(ordered[min(ordered.size - 1, int(share * ordered.size))])


def mean(values: Sequence[float] | Floats) -> float:
    """0 where there is none."""
    array = np.asarray(values, np.float64)
    return float(array.mean()) if array.size else 0.0


def mann_whitney(first: Sequence[float] | Floats, second: Sequence[float] | Floats) -> MannWhitney:
    """Without any idea of how the values are distributed. Neither may be empty."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    ranks, ties = _ranks(np.concatenate([a, b]))
    num_pairs = a.size * b.size
    wins = float(ranks[a.size :].sum()) - b.size * (b.size + 1) / 2
    total = a.size + b.size
    tied = float((ties**3 - ties).sum()) / (total * (total - 1)) if total > 1 else 0.0
    deviation = math.sqrt(max(0.0, num_pairs / 12 * (total + 1 - tied)))
    if deviation == 0:
        return MannWhitney(0.5, 1.0)
    distance = max(0.0, abs(wins - num_pairs / 2) - 0.5) / deviation
    return MannWhitney(wins / num_pairs, math.erfc(distance / math.sqrt(2)))


def rank_correlation(x: Sequence[float] | Floats, y: Sequence[float] | Floats) -> float:
    """Spearman's; 0 where one of them does not vary."""
    first, second = (_ranks(np.asarray(each, np.float64))[0] for each in (x, y))
    if first.size < 2 or not first.std() or not second.std():
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Floats) -> tuple[Floats, Floats]:
    """From 1; equal ones share the mean of theirs. And how many are equal, each."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middles = ends - (counts - 1) / 2
    return middles[inverse].astype(np.float64), counts.astype(np.float64)
