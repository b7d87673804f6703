"""What a hand-off is compared with: the same blocks out of an engine and into it again."""

from __future__ import annotations

import time

import numpy as np

from services.core.tokens import TokenArray
from worker.engines.contract import Bytes, Engine, Work

STEP_TOKENS = 32


class Reference:
    """Export and import of a prompt's blocks in this process, from slot to slot."""

    def __init__(self, engine: Engine, prompt: TokenArray) -> None:
        info = engine.info
        self._engine = engine
        self._num_tokens = len(prompt)
        engine.clear(0)
        for start in range(0, len(prompt), STEP_TOKENS):
            engine.evaluate([Work(0, start, prompt[start : start + STEP_TOKENS], False)])
        num_blocks = -(-len(prompt) // info.block_tokens)
        # Touched once, as a worker's memory is.
        memory = np.full((num_blocks, info.block_bytes), 1, np.uint8)
        last_bytes = (len(prompt) - (num_blocks - 1) * info.block_tokens) * info.token_bytes
        self._blocks: list[Bytes] = [*memory[:-1], memory[-1][:last_bytes]]

    def move(self) -> float:
        """Milliseconds, right after a step of the model, as a hand-off comes.

        A step takes the processor's caches, and what has not been used for a while is
        slow to come back: the same again at once can take a third of the time.
        """
        last = np.zeros(1, np.uint32)
        self._engine.evaluate([Work(0, self._num_tokens, last, False)])
        self._num_tokens += 1
        return self.move_again()

    def move_again(self) -> float:
        """Milliseconds, with all that it needs in the caches where `move` came before."""
        began_s = time.monotonic()
        self._engine.export_blocks(0, 0, self._blocks)
        self._engine.append_blocks(1, self._blocks)
        took_s = time.monotonic() - began_s
        self._engine.clear(1)
        return took_s * 1e3
