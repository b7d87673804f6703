"""An engine whose time is simulated, and nothing else.

A call lasts as long as the timing model says. The KV is real bytes, written,
copied and read: the row of a token is a running hash of the sequence up to it,
and logits follow from the last row as it lies in memory. So an answer depends on
its prompt through KV alone: a block lost, mixed up or altered changes it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from services.core.config import MeshConfig, SimulatedSettings
from services.models.catalog import ModelFiles
from services.models.vocabulary import Vocabulary
from worker.engines.contract import Bytes, EngineFailure, EngineInfo, Logits, Work
from worker.engines.slots import Slots

# Ids beyond have probability 0, so that no step costs more than it simulates.
LOGITS_WIDTH = 512
# Logits are in [0, this).
LOGITS_RANGE = 16.0
# Of a row, the bytes that are read again; narrower rows hold fewer.
STATE_BYTES = 8

Words = npt.NDArray[np.uint64]


class SimulatedEngine:
    """An Engine with the timing of [worker.simulated] and the vocabulary of a real model.

    Raises ValueError for a vocabulary that is not supported.
    """

    def __init__(self, config: MeshConfig, files: ModelFiles, metadata: Mapping[str, Any]) -> None:
        vocabulary = Vocabulary.from_metadata(metadata)
        timing = config.worker.simulated
        block_tokens = config.mesh.block_tokens
        self.info = EngineInfo(
            name="simulated",
            model=files.name,
            fingerprint=_fingerprint(files.name, block_tokens, timing.kv_bytes_per_token),
            vocabulary_size=vocabulary.vocabulary_size,
            eos_token_ids=vocabulary.eos_token_ids,
            num_slots=config.worker.num_slots,
            max_context_tokens=config.worker.max_context_tokens,
            block_tokens=block_tokens,
            block_bytes=block_tokens * timing.kv_bytes_per_token,
            num_blocks=timing.num_blocks,
            kv_in_pool=True,
        )
        self._timing = timing
        self._slots = Slots(self.info)
        # Each slot's blocks; the last may be filled in part.
        self._kv: list[list[Bytes]] = [[] for _ in range(self.info.num_slots)]
        self._silent_ids = _silent_ids(vocabulary)
        self._closed = False

    def evaluate(self, batch: Sequence[Work]) -> Logits:
        self._require_open()
        lengths = self._slots.lengths_after(batch)
        with _lasting(step_s(self._timing, batch)):
            states = [self._append(work) for work in batch]
            self._slots.update(lengths)
            wanted = [state for state, work in zip(states, batch, strict=True) if work.wants_logits]
            logits = _logits(np.array(wanted, np.uint64))
            logits[:, self._silent_ids] = -np.inf
        return logits

    def export_blocks(self, slot: int, first: int, blocks: Sequence[Bytes]) -> None:
        self._require_open()
        self._slots.check_export(slot, first, blocks)
        with _lasting(self._transfer_s(len(blocks))):
            for block, held in zip(blocks, self._kv[slot][first:], strict=False):
                block[...] = held

    def import_blocks(self, slot: int, blocks: Sequence[Bytes]) -> None:
        self._require_open()
        length = self._slots.length_of(slot, blocks)
        with _lasting(self._transfer_s(len(blocks))):
            self._kv[slot] = [block.copy() for block in blocks]
        self._slots.update({slot: length})

    def clear(self, slot: int) -> None:
        self._require_open()
        self._slots.require(slot)
        self._kv[slot] = []
        self._slots.update({slot: 0})

    def close(self) -> None:
        self._closed = True
        self._kv.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineFailure("the engine is closed")

    def _transfer_s(self, num_blocks: int) -> float:
        return num_blocks * self.info.block_bytes / (self._timing.transfer_gb_per_s * 1e9)

    def _append(self, work: Work) -> int:
        """Write the rows of the tokens; gives the state after the last of them."""
        end = work.position + len(work.tokens)
        positions = np.arange(work.position, end, dtype=np.uint64)
        steps = _mix(work.tokens.astype(np.uint64) << np.uint64(32) | positions)
        steps[:1] += np.uint64(self._state(work.slot, work.position))
        rows = _rows(np.cumsum(steps), self._timing.kv_bytes_per_token)
        self._write(work.slot, work.position, rows)
        return self._state(work.slot, end)

    def _state(self, slot: int, length: int) -> int:
        """What the slot's KV says about its first `length` tokens."""
        if not length:
            return 0
        block, row = divmod(length - 1, self.info.block_tokens)
        token_bytes = self._timing.kv_bytes_per_token
        start = row * token_bytes
        held = self._kv[slot][block][start : start + min(token_bytes, STATE_BYTES)]
        return int.from_bytes(held.tobytes(), "little")

    def _write(self, slot: int, position: int, rows: Bytes) -> None:
        blocks = self._kv[slot]
        while len(rows):
            index, start = divmod(position, self.info.block_tokens)
            if index == len(blocks):
                blocks.append(np.empty(self.info.block_bytes, np.uint8))
            block = blocks[index].reshape(self.info.block_tokens, -1)[start:]
            count = min(len(rows), len(block))
            block[:count] = rows[:count]
            rows = rows[count:]
            position += count


def step_s(timing: SimulatedSettings, batch: Sequence[Work]) -> float:
    """How long a step lasts. A single token that wants logits is a decode, all else prompt."""
    num_decodes = sum(len(work.tokens) == 1 and work.wants_logits for work in batch)
    prompt_tokens = sum(len(work.tokens) for work in batch) - num_decodes
    decode_ms = timing.decode_step_ms + num_decodes * timing.decode_step_ms_per_seq
    return prompt_tokens / timing.prefill_tokens_per_s + (num_decodes > 0) * decode_ms / 1e3


@contextmanager
def _lasting(duration_s: float) -> Iterator[None]:
    """Make the block last so long; what it computes is part of that time."""
    end_s = time.monotonic() + duration_s
    yield
    time.sleep(max(0.0, end_s - time.monotonic()))


def _mix(words: Words) -> Words:
    """The finalizer of splitmix64: each bit of a result depends on all bits of its word."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _rows(states: Words, token_bytes: int) -> Bytes:
    """Each state, repeated over the bytes of its token."""
    repeats = -(-token_bytes // STATE_BYTES)
    words = np.repeat(states.astype("<u8"), repeats).reshape(len(states), repeats)
    return words.view(np.uint8)[:, :token_bytes]


def _logits(states: Words) -> Logits:
    words = _mix(np.add.outer(_mix(states), np.arange(LOGITS_WIDTH, dtype=np.uint64)))
    # The upper 24 bits: as many as float32 holds exactly.
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(LOGITS_RANGE / (1 << 24))


def _silent_ids(vocabulary: Vocabulary) -> npt.NDArray[np.intp]:
    """Ids never generated: control tokens, and what is no readable text by itself."""
    return np.array(
        [
            token_id
            for token_id, text in enumerate(vocabulary.token_bytes[:LOGITS_WIDTH])
            if token_id in vocabulary.special_token_ids or not _is_readable(text)
        ],
        np.intp,
    )


def _is_readable(text: bytes) -> bool:
    return text.isascii() and text.decode().isprintable()


def _fingerprint(*parts: Any) -> bytes:
    return hashlib.sha256(repr(("simulated", *parts)).encode()).digest()
