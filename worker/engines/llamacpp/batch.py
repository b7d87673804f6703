"""A llama_batch over numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker.engines.contract import EngineFailure, Work
from worker.engines.llamacpp.binding import Batch


class TokenBatch:
    """Room for the tokens of one step; `struct` is what llama_decode takes."""

    def __init__(self, *, max_tokens: int, num_slots: int) -> None:
        self._tokens = np.empty(max_tokens, np.int32)
        self._positions = np.empty(max_tokens, np.int32)
        self._slot_counts = np.ones(max_tokens, np.int32)
        self._slot_pointers = np.empty(max_tokens, np.uintp)
        self._wanted = np.empty(max_tokens, np.int8)
        # Each token points to the list of its sequences, which is one slot here.
        self._slots = np.arange(num_slots, dtype=np.int32)
        self._pointer_of = self._slots.ctypes.data + self._slots.itemsize * np.arange(num_slots)
        self.struct = Batch(
            token=self._tokens.ctypes.data,
            pos=self._positions.ctypes.data,
            n_seq_id=self._slot_counts.ctypes.data,
            seq_id=self._slot_pointers.ctypes.data,
            logits=self._wanted.ctypes.data,
        )

    def fill(self, works: Sequence[Work]) -> None:
        num_tokens = sum(len(work.tokens) for work in works)
        if num_tokens > self._tokens.size:
            raise EngineFailure(f"{num_tokens} tokens in a step of {self._tokens.size} at most")
        start = 0
        for work in works:
            end = start + len(work.tokens)
            self._tokens[start:end] = work.tokens
            self._positions[start:end] = np.arange(work.position, work.position + end - start)
            self._slot_pointers[start:end] = self._pointer_of[work.slot]
            self._wanted[start:end] = 0
            self._wanted[end - work.num_logits : end] = 1
            start = end
        self.struct.n_tokens = num_tokens
