"""From the mesh's settings to what LLM() is built with.

What does not go together is refused before (services.core.tensorrt): LLM() takes minutes to
say so, and raises ValueError for a keyword that it does not know.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from services.core.settings import MeshConfig, WorkerSettings
from services.core.tensorrt import TensorRtSettings, batch_size
from worker.engines.trtllm import api
from worker.roles import Role

Backend: TypeAlias = Literal["UCX", "NIXL", "MOONCAKE", "MPI"]
Speculation: TypeAlias = (
    api.DraftTargetDecodingConfig
    | api.EagleDecodingConfig
    | api.MTPDecodingConfig
    | api.NGramDecodingConfig
)

_BACKENDS: dict[str, Backend] = {
    "ucx": "UCX",
    "nixl": "NIXL",
    "mooncake": "MOONCAKE",
    "mpi": "MPI",
}


def build_llm(config: MeshConfig, weights: str, *, role: Role) -> api.LLM:
    """Blocks for minutes: the autotuner runs, graphs are captured. Never on an event loop."""
    worker, engine = config.worker, config.worker.tensorrt_llm
    return api.LLM(
        weights,
        # Texts are encoded and decoded elsewhere, once.
        skip_tokenizer_init=True,
        tensor_parallel_size=engine.tensor_parallel_size,
        kv_cache_config=kv_cache_config(engine),
        enable_chunked_prefill=engine.chunked_prefill,
        scheduler_config=api.SchedulerConfig(
            capacity_scheduler_policy=api.CapacitySchedulerPolicy[engine.capacity_policy.upper()]
        ),
        cache_transceiver_config=transceiver_config(worker),
        speculative_config=speculation_config(engine),
        max_batch_size=batch_size(worker),
        max_seq_len=worker.max_context_tokens,
        max_num_tokens=engine.max_num_tokens,
        cuda_graph_config=graph_config(worker),
        # Of a worker that others fetch KV from.
        disable_overlap_scheduler=engine.transport != "none" and role is not Role.DECODE,
        # Spans are built of these: an endpoint of its own would call set_tracer_provider for
        # this whole process.
        return_perf_metrics=True,
        otlp_traces_endpoint=None,
        # get_stats_async has nothing without.
        enable_iter_perf_stats=True,
        stream_interval=1,
    )


def kv_cache_config(engine: TensorRtSettings) -> api.KvCacheConfig:
    return api.KvCacheConfig(
        enable_block_reuse=engine.block_reuse,
        max_tokens=engine.kv_tokens or None,
        free_gpu_memory_fraction=engine.kv_memory_share,
        host_cache_size=engine.host_cache_mb << 20 or None,
        event_buffer_max_size=engine.event_buffer,
        dtype=engine.kv_dtype,
        tokens_per_block=engine.tokens_per_block,
    )


def transceiver_config(worker: WorkerSettings) -> api.CacheTransceiverConfig | None:
    engine = worker.tensorrt_llm
    if engine.transport == "none":
        return None
    return api.CacheTransceiverConfig(
        backend=_BACKENDS[engine.transport],
        max_tokens_in_buffer=engine.transfer_buffer_tokens or worker.max_context_tokens,
        # None, the default, would hold KV that nobody fetches until the engine ends.
        kv_transfer_timeout_ms=engine.transfer_timeout_ms,
    )


def graph_config(worker: WorkerSettings) -> api.CudaGraphConfig | None:
    if not worker.tensorrt_llm.cuda_graphs:
        return None
    # Padded to the next size captured: a batch of any size then has a graph.
    return api.CudaGraphConfig(max_batch_size=batch_size(worker), enable_padding=True)


def speculation_config(engine: TensorRtSettings) -> Speculation | None:
    match engine.speculation:
        case "ngram":
            return api.NGramDecodingConfig(max_draft_len=engine.speculation_tokens)
        case "draft":
            return api.DraftTargetDecodingConfig(
                max_draft_len=engine.speculation_tokens,
                speculative_model=engine.speculation_model,
            )
        case "eagle":
            return api.EagleDecodingConfig(
                max_draft_len=engine.speculation_tokens,
                speculative_model=engine.speculation_model,
            )
        case "mtp":
            return api.MTPDecodingConfig(num_nextn_predict_layers=engine.speculation_tokens)
        case _:
            return None
