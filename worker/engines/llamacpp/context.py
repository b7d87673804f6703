"""A llama.cpp model with one context: pointers inside, Python values outside."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from services.core.settings import WorkerSettings
from services.runtime.startup import StartupError
from worker.engines.contract import Bytes, EngineFailure, Logits
from worker.engines.llamacpp import binding

# With flash attention and a stream of cells for each sequence, these KV types give
# bitwise equal results whatever else is in the batch. For f16 and f32 the CPU picks
# among kernels by the shape of the batch, and results differ.
KV_TYPES = {"bf16": binding.TYPE_BF16, "q8_0": binding.TYPE_Q8_0}

# llama.cpp rounds each sequence's share of the context up to a multiple of this.
CONTEXT_MULTIPLE = 256
# Most tokens of one pass through the model; llama.cpp splits a larger step.
MAX_PASS_TOKENS = 512

DECODE_FAILURES = {1: "the KV cache is full", 2: "it was aborted", -1: "the batch is invalid"}


class Threads(NamedTuple):
    """What a step may take of the machine."""

    num_threads: int
    # Threads that have done their part of a step sleep at once instead of spinning.
    passive_wait: bool = False


class LlamaContext:
    """The KV of `num_slots` sequences, and the model that computes it.

    Construction loads the model and raises StartupError when that cannot be. The
    caller checks sequence ids: llama.cpp ends the process at one out of range.
    """

    def __init__(self, gguf_path: Path, settings: WorkerSettings, threads: Threads) -> None:
        self._llama = binding.load_library(passive_wait=threads.passive_wait)
        with ExitStack() as opened:
            model = self._load_model(gguf_path, opened)
            self._check_context(model, settings)
            self._context = self._open_context(model, settings, threads.num_threads, opened)
            vocabulary = self._llama.llama_model_get_vocab(model)
            self.vocabulary_size: int = self._llama.llama_vocab_n_tokens(vocabulary)
            self._opened = opened.pop_all()

    def decode(self, batch: binding.Batch, num_outputs: int) -> Logits:
        """Shape (num_outputs, vocabulary_size), a view that lasts until the next call."""
        code = self._llama.llama_decode(self._pointer, batch)
        if code:
            reason = DECODE_FAILURES.get(code, "it failed inside")
            raise EngineFailure(f"llama.cpp did not evaluate the step: {reason} (code {code})")
        if not num_outputs:
            return np.empty((0, self.vocabulary_size), np.float32)
        logits = self._llama.llama_get_logits(self._pointer)
        return np.ctypeslib.as_array(logits, (num_outputs, self.vocabulary_size))

    def state_bytes(self, sequence: int) -> int:
        size: int = self._llama.llama_state_seq_get_size_ext(self._pointer, sequence, 0)
        return size

    def read_state(self, sequence: int, blob: Bytes) -> None:
        """Fill `blob`, of state_bytes, with the sequence's KV."""
        read = self._llama.llama_state_seq_get_data_ext(
            self._pointer, blob.ctypes.data, blob.size, sequence, 0
        )
        if read != blob.size:
            raise EngineFailure(f"llama.cpp gave {read} of {blob.size} bytes of KV")

    def write_state(self, sequence: int, blob: Bytes) -> None:
        """Replace the sequence by what `blob` holds."""
        written = self._llama.llama_state_seq_set_data_ext(
            self._pointer, blob.ctypes.data, blob.size, sequence, 0
        )
        if written != blob.size:
            raise EngineFailure(f"llama.cpp took {written} of {blob.size} bytes of KV")

    def forget(self, sequence: int, *, from_position: int = 0) -> None:
        memory = self._llama.llama_get_memory(self._pointer)
        if not self._llama.llama_memory_seq_rm(memory, sequence, from_position, -1):
            raise EngineFailure(f"llama.cpp did not cut sequence {sequence} to {from_position}")

    def close(self) -> None:
        self._context = None
        self._opened.close()

    @property
    def _pointer(self) -> int:
        # llama.cpp would follow a freed pointer.
        if self._context is None:
            raise EngineFailure("the engine is closed")
        return self._context

    def _load_model(self, gguf_path: Path, opened: ExitStack) -> Any:
        params = self._llama.llama_model_default_params()
        params.n_gpu_layers = 0
        with binding.collect_errors(self._llama) as errors:
            model = self._llama.llama_model_load_from_file(str(gguf_path).encode(), params)
        if not model:
            raise StartupError(f"llama.cpp cannot load {gguf_path}: {' '.join(errors[:1])}")
        opened.callback(self._llama.llama_model_free, model)
        return model

    def _check_context(self, model: Any, settings: WorkerSettings) -> None:
        trained = self._llama.llama_model_n_ctx_train(model)
        if settings.max_context_tokens > trained:
            raise StartupError(
                f"worker.max_context_tokens is {settings.max_context_tokens}, but the model was"
                f" trained for {trained}"
            )

    def _open_context(
        self, model: Any, settings: WorkerSettings, num_threads: int, opened: ExitStack
    ) -> int | None:
        multiples = -(-settings.max_context_tokens // CONTEXT_MULTIPLE)
        params = self._llama.llama_context_default_params()
        params.n_seq_max = settings.num_slots
        params.n_ctx = settings.num_slots * multiples * CONTEXT_MULTIPLE
        params.n_batch = settings.max_batch_tokens
        params.n_ubatch = min(settings.max_batch_tokens, MAX_PASS_TOKENS)
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type = binding.FLASH_ATTENTION_ON
        params.type_k = params.type_v = KV_TYPES[settings.kv_type]
        params.kv_unified = False
        with binding.collect_errors(self._llama) as errors:
            context: int | None = self._llama.llama_init_from_model(model, params)
        if not context:
            raise StartupError(
                f"llama.cpp cannot make a context of {params.n_ctx} tokens"
                f" (worker.num_slots x worker.max_context_tokens): {' '.join(errors[:1])}"
            )
        opened.callback(self._llama.llama_free, context)
        return context
