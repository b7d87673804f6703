"""An engine whose time is simulated, and nothing else.

A call lasts as long as the timing model says. The KV is real bytes, written,
copied and read, and logits follow from what lies in memory: an answer depends on
its prompt through KV alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from services.core.settings import MeshConfig, SimulatedSettings
from services.models.vocabulary import Vocabulary
from worker.engines.contract import Bytes, EngineFailure, EngineInfo, Logits, Work
from worker.engines.simulated_kv import SequenceKV, Words, mix
from worker.engines.simulated_transport import SimulatedTransport, kind_here
from worker.engines.slots import Slots

# Ids beyond the first readable ones have probability 0, so that no step costs more than it
# simulates. Some vocabularies begin with a thousand control tokens.
LOGITS_WIDTH = 512
MIN_READABLE_IDS = 64
# Logits are in [0, this).
LOGITS_RANGE = 16.0
# <linux/prctl.h>
PR_SET_TIMERSLACK = 29


class _Begun(NamedTuple):
    end_s: float
    logits: Logits


class SimulatedEngine:
    """An Engine with the timing of [worker.simulated] and the vocabulary of a real model."""

    def __init__(self, config: MeshConfig, model: str, vocabulary: Vocabulary) -> None:
        timing = config.worker.simulated
        block_tokens = config.mesh.block_tokens
        _sharpen_timers()
        self.info = EngineInfo(
            name="simulated",
            model=model,
            fingerprint=_fingerprint(model, block_tokens, timing.kv_bytes_per_token),
            vocabulary_size=vocabulary.vocabulary_size,
            eos_token_ids=vocabulary.eos_token_ids,
            num_slots=config.worker.num_slots,
            # One request alone must fit.
            max_context_tokens=min(
                config.worker.max_context_tokens, timing.num_blocks * block_tokens
            ),
            block_tokens=block_tokens,
            block_bytes=block_tokens * timing.kv_bytes_per_token,
            num_blocks=timing.num_blocks,
            kv_in_pool=True,
            transport=kind_here() if timing.engine_transport else "",
        )
        self._timing = timing
        self._slots = Slots(self.info)
        self._kv = [self._new_kv() for _ in range(self.info.num_slots)]
        self._silent = _silent(vocabulary)
        # By the slot of its first work: steps that are in progress.
        self._begun: dict[int, _Begun] = {}
        self._closed = False
        self.transport: SimulatedTransport | None = None
        if timing.engine_transport:
            bytes_per_s = timing.transfer_gb_per_s * 1e9
            self.transport = SimulatedTransport(
                bytes_per_s=bytes_per_s, held=self._held, add=self._add
            )

    @property
    def stepper(self) -> SimulatedEngine:
        return self

    @property
    def overlap(self) -> bool:
        """As in Stepper."""
        return self._timing.decode_overlap

    def begin(self, batch: Sequence[Work]) -> float:
        """As in Stepper."""
        self._require_open()
        end_s = time.monotonic() + step_s(self._timing, batch)
        logits = self._compute(batch)
        end_s = max(end_s, time.monotonic())
        self._begun[batch[0].slot] = _Begun(end_s, logits)
        return end_s

    def evaluate(self, batch: Sequence[Work]) -> Logits:
        self._require_open()
        begun = self._begun.pop(batch[0].slot, None) if batch else None
        if begun is not None:
            _sleep_until(begun.end_s)
            return begun.logits
        with _lasting(step_s(self._timing, batch)):
            return self._compute(batch)

    def _compute(self, batch: Sequence[Work]) -> Logits:
        lengths = self._slots.lengths_after(batch)
        if len(lengths) < len(batch):
            raise EngineFailure("a slot is in the step twice")
        singles = [work for work in batch if len(work.tokens) == 1]
        if singles:
            tokens = np.concatenate([work.tokens for work in singles])
            positions = [work.position for work in singles]
            SequenceKV.append_each([self._kv[work.slot] for work in singles], positions, tokens)
        digests: list[int] = []
        for work in batch:
            kv, first = self._kv[work.slot], len(work.tokens) - max(work.num_logits - 1, 0)
            if len(work.tokens) > 1:
                kv.append(work.position, work.tokens[:first])
            if work.wants_logits:
                digests.append(kv.digest)
            for index in range(first, len(work.tokens)):
                kv.append(work.position + index, work.tokens[index : index + 1])
                digests.append(kv.digest)
        self._slots.update(lengths)
        logits = _logits(np.array(digests, np.uint64), width=len(self._silent))
        logits += self._silent
        return logits

    def export_blocks(self, slot: int, first: int, blocks: Sequence[Bytes]) -> None:
        self._require_open()
        self._slots.check_export(slot, first, blocks)
        with _lasting(self._transfer_s(blocks)):
            held = self._kv[slot].blocks[first : first + len(blocks)]
            for block, source in zip(blocks, held, strict=True):
                block[...] = source[: block.size]

    def append_blocks(self, slot: int, blocks: Sequence[Bytes]) -> None:
        self._require_open()
        length = self._slots.length_after_append(slot, blocks)
        with _lasting(self._transfer_s(blocks)):
            self._kv[slot].load(blocks)
        self._slots.update({slot: length})

    def truncate(self, slot: int, length: int) -> None:
        self._require_open()
        self._slots.require_length(slot, length)
        self._kv[slot].truncate(length, self._slots.length(slot))
        self._slots.update({slot: length})

    def clear(self, slot: int) -> None:
        self._require_open()
        self._slots.require(slot)
        self._kv[slot] = self._new_kv()
        self._slots.update({slot: 0})

    def close(self) -> None:
        self._closed = True
        if self.transport is not None:
            self.transport.close()
        self._kv.clear()

    def _held(self, slot: int) -> list[Bytes]:
        """The slot's blocks, the last as far as it is filled."""
        num_bytes = self._slots.length(slot) * self._timing.kv_bytes_per_token
        block_bytes = self.info.block_bytes
        return [
            block[: num_bytes - index * block_bytes]
            for index, block in enumerate(self._kv[slot].blocks)
        ]

    def _add(self, slot: int, first: int, blocks: Sequence[Bytes]) -> None:
        length = self._slots.length_after_append(slot, blocks)
        if first * self.info.block_tokens != self._slots.length(slot):
            raise EngineFailure(f"block {first} does not follow what slot {slot} holds")
        self._kv[slot].load(blocks)
        self._slots.update({slot: length})

    def _require_open(self) -> None:
        if self._closed:
            raise EngineFailure("the engine is closed")

    def _transfer_s(self, blocks: Sequence[Bytes]) -> float:
        num_bytes = sum(block.size for block in blocks)
        return num_bytes / (self._timing.transfer_gb_per_s * 1e9)

    def _new_kv(self) -> SequenceKV:
        return SequenceKV(
            block_tokens=self.info.block_tokens, token_bytes=self._timing.kv_bytes_per_token
        )


def step_s(timing: SimulatedSettings, batch: Sequence[Work]) -> float:
    """How long a step lasts. A token that goes on with an answer is a decode; all else, the
    tokens of drafts behind it too, takes the time of prompt tokens.
    """
    num_decodes = sum(len(work.tokens) == work.num_logits for work in batch)
    prompt_tokens = sum(len(work.tokens) for work in batch) - num_decodes
    decode_ms = timing.decode_step_ms + num_decodes * timing.decode_step_ms_per_seq
    return prompt_tokens / timing.prefill_tokens_per_s + (num_decodes > 0) * decode_ms / 1e3


@contextmanager
def _lasting(duration_s: float) -> Iterator[None]:
    """Make the block last so long; what it computes is part of that time."""
    end_s = time.monotonic() + duration_s
    yield
    _sleep_until(end_s)


def _sharpen_timers() -> None:
    """Linux lets this thread's timers be 50 us late; a GPU says itself that it is done."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1))


def _sleep_until(end_s: float) -> None:
    wait_s = end_s - time.monotonic()
    if wait_s > 0:  # to sleep for no time takes some
        time.sleep(wait_s)


def _logits(digests: Words, *, width: int) -> Logits:
    words = mix(np.add.outer(mix(digests), np.arange(width, dtype=np.uint64)))
    # The upper 24 bits: as many as float32 holds exactly.
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(LOGITS_RANGE / (1 << 24))


def _silent(vocabulary: Vocabulary) -> Logits:
    """What is added to the logits of all ids that have one, so that some are never generated.

    Those are control tokens, and what is no readable text by itself.
    """
    silent: list[bool] = []
    for token_id, text in enumerate(vocabulary.token_bytes):
        whole = len(silent) % LOGITS_WIDTH == 0
        if whole and len(silent) - sum(silent) >= MIN_READABLE_IDS:
            break
        silent.append(token_id in vocabulary.special_token_ids or not _is_readable(text))
    return np.where(np.array(silent), -np.inf, 0.0).astype(np.float32)


def _is_readable(text: bytes) -> bool:
    return bool(text) and text.isascii() and text.decode().isprintable()


def _fingerprint(*parts: Any) -> bytes:
    return hashlib.sha256(repr(("simulated", *parts)).encode()).digest()
