"""Philox4x32-10: random numbers that are a function of a key and a counter.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. With no
state to carry, a request goes on the same in another batch or on another worker.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]  # of 32 bits each, room for products

NUM_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)


def philox4x32(counter: Words, key: Words) -> Words:
    """Counters of shape (4, n) and keys of shape (2, n) to n blocks of four words, (4, n)."""
    even, odd = counter[0::2], counter[1::2]
    for _ in range(NUM_ROUNDS):
        products = even * _MULTIPLIERS
        even = (products >> _SHIFT)[::-1] ^ odd ^ key
        odd = (products & _MASK)[::-1]
        key = (key + _KEY_STEPS) & _MASK
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(seeds: Words, positions: Words) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair of a 64-bit seed and a 64-bit position."""
    zeros = np.zeros_like(positions)
    counter = np.stack([positions & _MASK, positions >> _SHIFT, zeros, zeros])
    high, low, _, _ = philox4x32(counter, np.stack([seeds & _MASK, seeds >> _SHIFT]))
    # 53 bits: as many as a float64 holds exactly.
    bits: Words = (high << _SHIFT | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
