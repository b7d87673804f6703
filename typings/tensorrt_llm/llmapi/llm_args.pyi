# Ours: a stub of TensorRT-LLM 1.2.1, of what the adapter touches. See typings/README.md.
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

class StrictBaseModel:  # pydantic, extra="forbid"
    def model_dump(self, **kw: Any) -> dict[str, Any]: ...

class CapacitySchedulerPolicy(StrEnum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"

class ContextChunkingPolicy(StrEnum):
    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"

class DynamicBatchConfig(StrictBaseModel):
    def __init__(
        self,
        *,
        enable_batch_size_tuning: bool = ...,
        enable_max_num_tokens_tuning: bool = ...,
        dynamic_batch_moving_average_window: int = ...,
    ) -> None: ...

class SchedulerConfig(StrictBaseModel):  # waiting_queue_policy: 1.3+ only
    def __init__(
        self,
        *,
        capacity_scheduler_policy: CapacitySchedulerPolicy = ...,
        context_chunking_policy: ContextChunkingPolicy | None = ...,
        dynamic_batch_config: DynamicBatchConfig | None = ...,
    ) -> None: ...

class CudaGraphConfig(StrictBaseModel):
    def __init__(
        self,
        *,
        batch_sizes: list[int] | None = ...,
        max_batch_size: int = ...,
        enable_padding: bool = ...,
    ) -> None: ...

class TorchCompileConfig(StrictBaseModel):
    def __init__(
        self,
        *,
        enable_fullgraph: bool = ...,
        enable_inductor: bool = ...,
        enable_piecewise_cuda_graph: bool = ...,
        capture_num_tokens: list[int] | None = ...,
        enable_userbuffers: bool = ...,
        max_num_streams: int = ...,
    ) -> None: ...

class KvCacheConfig(StrictBaseModel):  # 1.2.1 VERIFIED, field for field
    enable_block_reuse: bool
    tokens_per_block: int
    event_buffer_max_size: int
    def __init__(
        self,
        *,
        enable_block_reuse: bool = ...,
        max_tokens: int | None = ...,
        max_attention_window: list[int] | None = ...,
        sink_token_length: int | None = ...,
        free_gpu_memory_fraction: float | None = ...,
        host_cache_size: int | None = ...,
        onboard_blocks: bool = ...,
        cross_kv_cache_fraction: float | None = ...,
        secondary_offload_min_priority: int | None = ...,
        event_buffer_max_size: int = ...,
        attention_dp_events_gather_period_ms: int = ...,
        enable_partial_reuse: bool = ...,
        copy_on_partial_reuse: bool = ...,
        use_uvm: bool = ...,
        max_gpu_total_bytes: int = ...,
        dtype: str = ...,
        mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = ...,
        tokens_per_block: int = ...,
    ) -> None: ...

class CacheTransceiverConfig(
    StrictBaseModel
):  # 1.2.1 VERIFIED; transceiver_runtime, kv_transfer_poll_interval_ms are 1.3+
    def __init__(
        self,
        *,
        backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = ...,
        max_tokens_in_buffer: int | None = ...,
        kv_transfer_timeout_ms: int | None = ...,
        kv_transfer_sender_future_timeout_ms: int | None = ...,
    ) -> None: ...

class KvCacheConnectorConfig(StrictBaseModel):  # `connector=` preset ("lmcache" ...) is 1.3+
    def __init__(
        self, *, connector_module: str, connector_scheduler_class: str, connector_worker_class: str
    ) -> None: ...

class _SpecConfig(StrictBaseModel): ...

class DraftTargetDecodingConfig(_SpecConfig):
    def __init__(
        self,
        *,
        max_draft_len: int | None = ...,
        speculative_model: str | Path | None = ...,
        max_concurrency: int | None = ...,
        draft_len_schedule: dict[int, int] | None = ...,
        acceptance_window: int | None = ...,
        acceptance_length_threshold: float | None = ...,
        allow_advanced_sampling: bool = ...,
        **kw: Any,
    ) -> None: ...

class EagleDecodingConfig(_SpecConfig):
    def __init__(
        self,
        *,
        max_draft_len: int | None = ...,
        speculative_model: str | Path | None = ...,
        eagle3_one_model: bool | None = ...,
        max_concurrency: int | None = ...,
        draft_len_schedule: dict[int, int] | None = ...,
        acceptance_window: int | None = ...,
        acceptance_length_threshold: float | None = ...,
        **kw: Any,
    ) -> None: ...

class MTPDecodingConfig(_SpecConfig):
    def __init__(
        self, *, num_nextn_predict_layers: int = ..., max_concurrency: int | None = ..., **kw: Any
    ) -> None: ...

class NGramDecodingConfig(_SpecConfig):
    def __init__(
        self,
        *,
        max_draft_len: int | None = ...,
        max_matching_ngram_size: int = ...,
        is_keep_all: bool = ...,
        is_use_oldest: bool = ...,
        is_public_pool: bool = ...,
        **kw: Any,
    ) -> None: ...

class TorchLlmArgs(StrictBaseModel):
    backend: str | None
    kv_cache_config: KvCacheConfig
    max_batch_size: int | None
    max_num_tokens: int | None
    max_seq_len: int | None
    enable_attention_dp: bool
    tensor_parallel_size: int
    return_perf_metrics: bool
