"""What flash attention does on this machine: python scripts/flash_attention.py

Prompt tokens and answer tokens a second of the embedded engine, alone in this process, for each
type of KV with flash attention and without; and whether logits stay the same in another batch.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np

from services.core.config import parse
from services.core.settings import WorkerSettings
from services.models.catalog import find_model
from services.runtime.startup import StartupError
from worker.engines.contract import Work
from worker.engines.llamacpp import binding, context
from worker.engines.llamacpp.batch import TokenBatch
from worker.engines.llamacpp.context import LlamaContext, Threads

SETTINGS: WorkerSettings = parse({"worker": {"num_slots": 2, "max_context_tokens": 4096}}).worker
# f16 and f32 are llama.cpp's, and none of ours: see docs/engines.md.
KV_TYPES = {"bf16": binding.TYPE_BF16, "q8_0": binding.TYPE_Q8_0, "f16": 1}
NUM_THREADS = 2
PROMPTS = (512, 2048)
NUM_DECODES, NUM_TURNS = 32, 3


class Model:
    def __init__(self, kv_type: str, *, flash: bool) -> None:
        context.KV_TYPES = KV_TYPES
        binding.FLASH_ATTENTION_ON = int(flash)
        settings = replace(SETTINGS, kv_type=kv_type)
        gguf_path = find_model("smollm2-135m-instruct").gguf_path
        self._context = LlamaContext(gguf_path, settings, Threads(NUM_THREADS))
        self._batch = TokenBatch(max_tokens=settings.max_batch_tokens, num_slots=2)

    def evaluate(self, works: list[Work]) -> bytes:
        self._batch.fill(works)
        num_outputs = sum(work.num_logits for work in works)
        return self._context.decode(self._batch.struct, num_outputs).tobytes()

    def prompt(self, ids: np.ndarray, *, chunk: int = 512) -> tuple[float, bytes]:
        """Seconds, and the logits at its end."""
        self._context.forget(0)
        began_s, logits = time.perf_counter(), b""
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            logits = self.evaluate([Work(0, start, part, int(start + chunk >= len(ids)))])
        return time.perf_counter() - began_s, logits

    def decode(self, start: int) -> float:
        began_s = time.perf_counter()
        for position in range(start, start + NUM_DECODES):
            self.evaluate([Work(0, position, np.array([position % 1000], np.uint32), 1)])
        return (time.perf_counter() - began_s) / NUM_DECODES

    def close(self) -> None:
        self._context.close()


def measure(kv_type: str, *, flash: bool) -> str:
    try:
        model = Model(kv_type, flash=flash)
    except StartupError as error:
        return f"refused: {str(error).partition(': ')[2] or error}"
    try:
        cells = []
        for length in PROMPTS:
            ids = np.random.default_rng(length).integers(100, 40_000, length).astype(np.uint32)
            prompt_s, decode_s = [], []
            for _ in range(NUM_TURNS):
                prompt_s.append(model.prompt(ids)[0])
                decode_s.append(model.decode(length))
            cells.append(
                f"{length}: {length / statistics.median(prompt_s):5.0f} tok/s,"
                f" then {1 / statistics.median(decode_s):5.1f} tok/s"
            )
        ids = ids[:300]
        same = model.prompt(ids, chunk=512)[1] == model.prompt(ids, chunk=37)[1]
        return "   ".join([*cells, f"other chunks: {'same' if same else 'different'} logits"])
    finally:
        model.close()


def main() -> None:
    for kv_type in KV_TYPES:
        for flash in (True, False):
            name = f"{kv_type}, flash attention {'on' if flash else 'off'}"
            print(f"{name:28} {measure(kv_type, flash=flash)}", flush=True)


if __name__ == "__main__":
    main()
