"""The KV of the simulated engine: real bytes that stand for the tokens before them.

The row of a token is a running hash of the sequence up to it. A digest over all
rows, as they lie in memory, says what the sequence holds: a row that is lost,
altered or of another prefix changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.core.tokens import TokenArray
from worker.engines.contract import Bytes

Words: TypeAlias = npt.NDArray[np.uint64]

# A row repeats its hash; this much of it is read. Narrower rows hold less.
HASH_BYTES = 8
_WORD = (1 << 64) - 1


class SequenceKV:
    """Blocks of `block_tokens` rows of `token_bytes`; the last may be filled in part."""

    def __init__(self, *, block_tokens: int, token_bytes: int) -> None:
        self.blocks: list[Bytes] = []
        self.digest = 0
        self._block_tokens = block_tokens
        self._token_bytes = token_bytes
        self._last_hash = 0

    def append(self, position: int, tokens: TokenArray) -> None:
        positions = np.arange(position, position + len(tokens), dtype=np.uint64)
        steps = mix(tokens.astype(np.uint64) << np.uint64(32) | positions)
        steps[:1] += np.uint64(self._last_hash)
        rows = self._rows(np.cumsum(steps))
        while len(rows):
            block, start = divmod(position, self._block_tokens)
            if block == len(self.blocks):
                self.blocks.append(np.empty(self._block_tokens * self._token_bytes, np.uint8))
            free = self._table(block)[start:]
            written, rows = rows[: len(free)], rows[len(free) :]
            free[: len(written)] = written
            self._take_in(free[: len(written)])
            position += len(written)

    @staticmethod
    def append_each(
        sequences: Sequence[SequenceKV], positions: Sequence[int], tokens: TokenArray
    ) -> None:
        """A token to each, all of one engine and none of them twice."""
        steps = mix(tokens.astype(np.uint64) << np.uint64(32) | np.array(positions, np.uint64))
        last_hashes = np.array([each._last_hash for each in sequences], np.uint64)
        rows = sequences[0]._rows(steps + last_hashes)
        written = np.zeros((len(rows), HASH_BYTES), np.uint8)
        for sequence, position, row, back in zip(sequences, positions, rows, written, strict=True):
            place = sequence._row(position)
            place[:] = row
            back[: len(row)] = place[:HASH_BYTES]
        hashes = written.view("<u8")[:, 0]
        mixed = mix(hashes).tolist()
        for sequence, last_hash, word in zip(sequences, hashes.tolist(), mixed, strict=True):
            sequence.digest = (sequence.digest + word) & _WORD
            sequence._last_hash = last_hash

    def load(self, blocks: Sequence[Bytes]) -> None:
        """Add copies of `blocks`, the last of which may be whole rows only."""
        for block in blocks:
            copy = np.empty(self._block_tokens * self._token_bytes, np.uint8)
            copy[: block.size] = block
            self.blocks.append(copy)
            self._take_in(self._table(-1)[: block.size // self._token_bytes])

    def truncate(self, length: int, old_length: int) -> None:
        """Forget the rows from `length` on, of the `old_length` that there are."""
        for position in range(length, old_length):
            self.digest = (self.digest - int(mix(self._hashes(position))[0])) & _WORD
        del self.blocks[-(-length // self._block_tokens) :]
        self._last_hash = int(self._hashes(length - 1)[0]) if length else 0

    def _hashes(self, position: int) -> Words:
        """What a row says, as it lies in memory."""
        word = np.zeros(HASH_BYTES, np.uint8)
        row = self._row(position)[:HASH_BYTES]
        word[: len(row)] = row
        return word.view("<u8")

    def _row(self, position: int) -> Bytes:
        """Where the next token's goes."""
        block, row = divmod(position, self._block_tokens)
        if block == len(self.blocks):
            self.blocks.append(np.empty(self._block_tokens * self._token_bytes, np.uint8))
        return self.blocks[block][row * self._token_bytes : (row + 1) * self._token_bytes]

    def _table(self, block: int) -> Bytes:
        return self.blocks[block].reshape(self._block_tokens, self._token_bytes)

    def _rows(self, hashes: Words) -> Bytes:
        repeats = -(-self._token_bytes // HASH_BYTES)
        words = np.repeat(hashes.astype("<u8"), repeats).reshape(len(hashes), repeats)
        return words.view(np.uint8)[:, : self._token_bytes]

    def _take_in(self, rows: Bytes) -> None:
        """Go on from rows that lie in memory, not from what was meant to be there."""
        words = np.zeros((len(rows), HASH_BYTES), np.uint8)
        words[:, : self._token_bytes] = rows[:, :HASH_BYTES]
        hashes = words.view("<u8")[:, 0]
        self.digest = (self.digest + int(mix(hashes).sum())) & _WORD
        self._last_hash = int(hashes[-1])


def mix(words: Words) -> Words:
    """The finalizer of splitmix64: each bit of a result depends on all bits of its word."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    # In place: a step of many sequences has many of them.
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
