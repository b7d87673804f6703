"""Settings of the TensorRT-LLM engine, and what of them goes together. Pure.

The reasons in them are those of TensorRT-LLM 1.2.1 and of what its users report; the numbers
after # are issues and pull requests of NVIDIA/TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.core.errors import Violation
from services.core.rules import setting

if TYPE_CHECKING:
    from services.core.settings import WorkerSettings

CAPACITY_POLICIES = ("guaranteed_no_evict", "static_batch", "max_utilization")
TRANSPORTS = ("none", "nixl", "ucx", "mooncake", "mpi")
SPECULATION = ("none", "ngram", "draft", "eagle", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtSettings:
    """What the engine is built with."""

    weights: str = setting(
        "",
        "Folder or Hugging Face name of the weights; empty: the folder that mesh.model names. A"
        " checkpoint quantized to FP8 is taken as such.",
        at_start=True,
    )
    tensor_parallel_size: int = setting(
        1, "GPUs that share each layer.", low=1, high=64, at_start=True
    )
    max_num_tokens: int = setting(
        8192,
        "Most tokens in one engine step. Without chunked_prefill no prompt may be longer.",
        low=16,
        high=1 << 20,
        at_start=True,
    )
    max_batch_size: int = setting(
        0,
        "Requests the engine has room for; above worker.num_slots, since one that is full may"
        " hang (#9628). 0: an eighth more than worker.num_slots, and one.",
        low=0,
        high=1024,
        at_start=True,
    )
    chunked_prefill: bool = setting(
        True, "Prompts are computed in parts of max_num_tokens at most.", at_start=True
    )
    cuda_graphs: bool = setting(
        True, "Decode steps are captured as CUDA graphs, for every batch size.", at_start=True
    )
    kv_dtype: str = setting(
        "auto",
        "Type of KV values: auto is the model's own, fp8 halves it.",
        choices=("auto", "fp8"),
        at_start=True,
    )
    kv_memory_share: float = setting(
        0.9,
        "Share of the GPU memory left beside the weights that KV takes.",
        low=0.01,
        high=0.99,
        at_start=True,
    )
    kv_tokens: int = setting(
        0,
        "Most tokens whose KV is kept, below what kv_memory_share allows; 0: no bound of its own.",
        low=0,
        high=1 << 30,
        at_start=True,
    )
    tokens_per_block: int = setting(
        32, "Tokens in a block of the engine's own KV cache.", low=8, high=512, at_start=True
    )
    block_reuse: bool = setting(True, "KV of earlier prompts is used again.", at_start=True)
    host_cache_mb: int = setting(
        0,
        "Host memory for KV that leaves the GPU, in MiB. Off, since wrong answers are reported of"
        " large ones (#8813): compare answers before it is used.",
        low=0,
        high=1 << 24,
        at_start=True,
    )
    event_buffer: int = setting(
        16384,
        "KV cache events that the engine keeps until they are read; with 0, or without"
        " block_reuse, routers only predict what is cached.",
        low=0,
        high=1 << 24,
        at_start=True,
    )
    capacity_policy: str = setting(
        "guaranteed_no_evict",
        "Which requests run together. max_utilization evicts and computes again: 40.6 % less"
        " throughput is reported of it (#16827).",
        choices=CAPACITY_POLICIES,
        at_start=True,
    )
    speculation: str = setting(
        "none",
        "Speculative decoding: ngram out of the prompt, draft and eagle by a model of their own,"
        " mtp by heads of the model.",
        choices=SPECULATION,
        at_start=True,
    )
    speculation_tokens: int = setting(
        4, "Tokens drafted at a time, at most.", low=1, high=64, at_start=True
    )
    speculation_model: str = setting(
        "", "Folder or Hugging Face name of the drafting model, of draft and eagle.", at_start=True
    )
    transport: str = setting(
        "none",
        "How KV moves between engines for a hand-off. none: this worker takes part in none.",
        choices=TRANSPORTS,
        at_start=True,
    )
    transfer_buffer_tokens: int = setting(
        0,
        "Tokens that the buffer of a transfer has room for; 0: worker.max_context_tokens.",
        low=0,
        high=1 << 24,
        at_start=True,
    )
    transfer_timeout_ms: int = setting(
        120_000,
        "The engine gives up a transfer after this time. Without, KV that nobody fetches is held"
        " until the engine ends; a short one has crashed it (#14565).",
        low=10_000,
        high=3_600_000,
        at_start=True,
    )
    max_handoffs: int = setting(
        0,
        "Prompts computed for other workers whose KV has not been fetched, at most; 0:"
        " worker.num_slots.",
        low=0,
        high=1024,
        at_start=True,
    )
    probe_interval_s: float = setting(
        15.0,
        "The engine is asked for a token when it has said nothing for so long.",
        low=0.1,
        high=3600,
        at_start=True,
    )
    stall_timeout_s: float = setting(
        60.0,
        "An engine that has work, or was asked for a token, and says nothing for so long is ended,"
        " and a new one started.",
        low=1,
        high=3600,
        at_start=True,
    )


def batch_size(worker: WorkerSettings) -> int:
    return worker.tensorrt_llm.max_batch_size or worker.num_slots + worker.num_slots // 8 + 1


def max_prompt_tokens(worker: WorkerSettings) -> int:
    """What the engine takes; a longer prompt would raise in it, or hang it (#4441)."""
    engine, room = worker.tensorrt_llm, worker.max_context_tokens - 1
    return room if engine.chunked_prefill else min(room, engine.max_num_tokens)


def check_tensorrt(worker: WorkerSettings, *, block_tokens: int) -> Iterator[Violation]:
    """Rules of several settings, where this engine is used."""
    engine = worker.tensorrt_llm

    def broken(name: str, rule: str) -> Violation:
        return Violation(f"worker.tensorrt_llm.{name}", rule)

    if block_tokens % engine.tokens_per_block:
        yield broken(
            "tokens_per_block",
            f"must divide mesh.block_tokens, {block_tokens}: a block of the mesh is whole blocks"
            f" of the engine; got {engine.tokens_per_block}",
        )
    if batch_size(worker) <= worker.num_slots:
        yield broken(
            "max_batch_size",
            f"must be above worker.num_slots, {worker.num_slots}: a full engine may hang;"
            f" got {engine.max_batch_size}",
        )
    if engine.max_num_tokens < batch_size(worker):  # a step decodes a token of every request
        yield broken(
            "max_num_tokens",
            f"must be at least max_batch_size, {batch_size(worker)}; got {engine.max_num_tokens}",
        )
    if engine.kv_tokens and engine.kv_tokens < worker.max_context_tokens:
        yield broken(
            "kv_tokens",
            f"must be 0 or at least worker.max_context_tokens, {worker.max_context_tokens}: one"
            f" request alone must fit; got {engine.kv_tokens}",
        )
    if engine.event_buffer and not engine.block_reuse:
        yield broken(
            "event_buffer",
            f"must be 0 without block_reuse: there are no events then; got {engine.event_buffer}",
        )
    if engine.host_cache_mb and not engine.block_reuse:
        yield broken(
            "host_cache_mb",
            f"must be 0 without block_reuse: nothing comes out of it; got {engine.host_cache_mb}",
        )
    if engine.speculation in ("draft", "eagle") and not engine.speculation_model:
        yield broken("speculation_model", f"must name a model for {engine.speculation}")
    if engine.transport != "none":
        yield from _check_transfers(worker)


def _check_transfers(worker: WorkerSettings) -> Iterator[Violation]:
    engine = worker.tensorrt_llm
    if 0 < engine.transfer_buffer_tokens < worker.max_context_tokens:
        yield Violation(
            "worker.tensorrt_llm.transfer_buffer_tokens",
            f"must be 0 or at least worker.max_context_tokens, {worker.max_context_tokens}: the"
            f" longest prompt must fit; got {engine.transfer_buffer_tokens}",
        )
    if engine.transfer_timeout_ms <= worker.handoff_timeout_ms:
        yield Violation(
            "worker.tensorrt_llm.transfer_timeout_ms",
            f"must be above worker.handoff_timeout_ms, {worker.handoff_timeout_ms:g}: the mesh"
            f" gives a hand-off up first; got {engine.transfer_timeout_ms}",
        )
