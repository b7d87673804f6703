"""The embedded engine: a GGUF model on the CPU, by llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from services.core.settings import MeshConfig
from services.models.catalog import ModelFiles
from services.models.vocabulary import Vocabulary
from services.runtime.startup import StartupError
from worker.engines.contract import Bytes, EngineFailure, EngineInfo, Logits, Work
from worker.engines.llamacpp import binding
from worker.engines.llamacpp.batch import TokenBatch
from worker.engines.llamacpp.context import LlamaContext, Threads
from worker.engines.llamacpp.fingerprint import fingerprint
from worker.engines.llamacpp.kvblob import BlobLayout
from worker.engines.slots import Slots


class LlamaCppEngine:
    """An Engine whose slots are llama.cpp's sequences, each with KV memory of its own.

    Construction loads the model. Raises StartupError when that cannot be, ValueError
    for a vocabulary that is not supported.
    """

    def __init__(
        self,
        config: MeshConfig,
        files: ModelFiles,
        metadata: Mapping[str, Any],
        *,
        threads: Threads,
    ) -> None:
        vocabulary = Vocabulary.from_metadata(metadata)
        worker = config.worker
        self._context = LlamaContext(files.gguf_path, worker, threads)
        self._batch = TokenBatch(max_tokens=worker.max_batch_tokens, num_slots=worker.num_slots)
        self._layout = self._learn_layout()
        # Written once here: the first touch of fresh memory costs more than a transfer.
        self._scratch = np.full(self._layout.blob_bytes(worker.max_context_tokens), 0, np.uint8)
        # Whose KV, as it is now, lies there: runs of blocks are cut from one reading.
        self._slot_in_scratch: int | None = None
        hyperparameters = [item for item in metadata.items() if not item[0].startswith("tokenizer")]
        self.info = EngineInfo(
            name="llamacpp",
            model=files.name,
            fingerprint=fingerprint(
                files.gguf_path,
                binding.VERSION,
                sorted(hyperparameters),
                self._layout.rotations,
                self._layout.runs,
                config.mesh.block_tokens,
            ),
            vocabulary_size=self._context.vocabulary_size,
            eos_token_ids=vocabulary.eos_token_ids,
            num_slots=worker.num_slots,
            max_context_tokens=worker.max_context_tokens,
            block_tokens=config.mesh.block_tokens,
            block_bytes=config.mesh.block_tokens * self._layout.token_bytes,
            num_blocks=worker.num_cache_blocks,
            kv_in_pool=False,
        )
        self.transport = None
        self.stepper = None
        self._slots = Slots(self.info)

    def evaluate(self, batch: Sequence[Work]) -> Logits:
        lengths = self._slots.lengths_after(batch)
        self._slot_in_scratch = None
        self._batch.fill(batch)
        num_outputs = sum(work.num_logits for work in batch)
        logits = self._context.decode(self._batch.struct, num_outputs)
        self._slots.update(lengths)
        return logits

    def export_blocks(self, slot: int, first: int, blocks: Sequence[Bytes]) -> None:
        self._slots.check_export(slot, first, blocks)
        if blocks:
            self._cut(slot, first * self.info.block_tokens, blocks)

    def append_blocks(self, slot: int, blocks: Sequence[Bytes]) -> None:
        length = self._slots.length_after_append(slot, blocks)
        if not blocks:
            return
        # All in one import, what is there included: each import replaces the whole sequence.
        held, blob = self._held(slot), self._blob_of(length)
        self._slot_in_scratch = None
        self._layout.merge([*held, *blocks], blob)
        self._context.write_state(slot, blob)
        self._slots.update({slot: length})

    def truncate(self, slot: int, length: int) -> None:
        self._slots.require_length(slot, length)
        self._slot_in_scratch = None
        self._context.forget(slot, from_position=length)
        self._slots.update({slot: length})

    def clear(self, slot: int) -> None:
        self._slots.require(slot)
        self._slot_in_scratch = None
        self._context.forget(slot)
        self._slots.update({slot: 0})

    def close(self) -> None:
        self._context.close()

    def _cut(self, slot: int, first_token: int, blocks: Sequence[Bytes]) -> None:
        blob = self._blob_of(self._slots.length(slot))
        if self._slot_in_scratch != slot:
            self._context.read_state(slot, blob)
            self._slot_in_scratch = slot
        try:
            self._layout.cut(blob, first_token, blocks)
        except ValueError as error:
            raise EngineFailure(f"the KV of slot {slot} has another form: {error}") from error

    def _held(self, slot: int) -> list[Bytes]:
        """What the slot holds, as one block of many tokens."""
        length = self._slots.length(slot)
        if not length:
            return []
        held = np.empty(length * self._layout.token_bytes, np.uint8)
        self._cut(slot, 0, [held])
        return [held]

    def _learn_layout(self) -> BlobLayout:
        """From the KV of one token, which warms the model up as well."""
        self._batch.fill([Work(0, 0, np.zeros(1, np.uint32), 0)])
        self._context.decode(self._batch.struct, 0)
        blob = np.empty(self._context.state_bytes(0), np.uint8)
        self._context.read_state(0, blob)
        self._context.forget(0)
        try:
            return BlobLayout.learn(blob)
        except ValueError as error:
            self.close()
            raise StartupError(f"the model's KV cannot be cut into blocks: {error}") from error

    def _blob_of(self, num_tokens: int) -> Bytes:
        return self._scratch[: self._layout.blob_bytes(num_tokens)]
