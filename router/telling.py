"""What a router tells the observer of prompts: blocks that it has not told lately."""

from __future__ import annotations

from collections.abc import Iterable

from firsttoken.observer.v1 import observer_pb2
from router.prompt import Prompt
from services.core.keys import KEY_BYTES
from services.core.tokens import BYTES_PER_TOKEN

# Of blocks that were told, in each of two generations.
MAX_KEYS = 32_768
# An observer may have forgotten a block that was told so long ago.
GENERATION_S = 300.0
# Of one prompt. What is longer is told in part.
MAX_TOKENS = 32_768


class Telling:
    """Remembers which blocks the observer knows. Times are in seconds, and are arguments."""

    def __init__(self, *, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._recent: set[bytes] = set()
        self._older: set[bytes] = set()
        self._begun_s = 0.0
        self._observers: frozenset[str] = frozenset()

    def update_observers(self, ids: Iterable[str]) -> None:
        """One that is new knows nothing."""
        observers = frozenset(ids)
        if observers != self._observers:
            self._observers = observers
            self._recent, self._older = set(), set()

    def message(
        self,
        prompt: Prompt,
        *,
        trace_id: str,
        span_id: str,
        tenant: str,
        now_s: float,
    ) -> observer_pb2.Prompt:
        if now_s - self._begun_s > GENERATION_S or len(self._recent) >= self._max_keys:
            self._older, self._recent = self._recent, set()
            self._begun_s = now_s
        keys = prompt.prefix_keys
        first_block = self._first_untold(keys)
        start = first_block * prompt.block_tokens * BYTES_PER_TOKEN
        packed = prompt.token_ids[start : start + MAX_TOKENS * BYTES_PER_TOKEN]
        num_told = len(packed) // BYTES_PER_TOKEN // prompt.block_tokens
        if num_told:
            begin = (first_block + 1) * KEY_BYTES
            starts = range(begin, begin + num_told * KEY_BYTES, KEY_BYTES)
            self._recent.update([keys[at : at + KEY_BYTES] for at in starts])
        return observer_pb2.Prompt(
            trace_id=bytes.fromhex(trace_id),
            span_id=bytes.fromhex(span_id),
            prefix_keys=keys,
            first_token=first_block * prompt.block_tokens,
            token_ids=packed,
            tenant=tenant,
            block_tokens=prompt.block_tokens,
        )

    def check_integrity(self) -> None:
        most = MAX_TOKENS // 8 + self._max_keys  # of blocks of 8 tokens, the smallest
        assert len(self._recent) <= most
        assert len(self._older) <= most

    def _first_untold(self, keys: bytes) -> int:
        """A block is told with those before it, or after them."""
        recent, older = self._recent, self._older
        low, high = 0, len(keys) // KEY_BYTES - 1
        while low < high:
            middle = (low + high + 1) // 2
            key = keys[middle * KEY_BYTES : (middle + 1) * KEY_BYTES]
            if key in recent or key in older:
                low = middle
            else:
                high = middle - 1
        return low
