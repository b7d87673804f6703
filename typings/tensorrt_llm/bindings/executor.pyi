# Ours: a stub of TensorRT-LLM 1.2.1, of what the adapter touches. See typings/README.md.
from datetime import timedelta

class KvCacheRetentionConfig:
    class TokenRangeRetentionConfig:
        def __init__(
            self,
            token_start: int,
            token_end: int | None = ...,
            priority: int = ...,
            duration_ms: timedelta | None = ...,
        ) -> None: ...

    def __init__(
        self,
        token_range_retention_configs: list[KvCacheRetentionConfig.TokenRangeRetentionConfig],
        decode_retention_priority: int = ...,
        decode_duration_ms: timedelta | None = ...,
    ) -> None: ...

class TimingMetrics:  # every *_time is datetime.timedelta on the C++ steady clock (CLOCK_MONOTONIC), 0 when unset
    arrival_time: timedelta
    first_scheduled_time: timedelta
    first_token_time: timedelta
    last_token_time: timedelta
    kv_cache_transfer_start: timedelta
    kv_cache_transfer_end: timedelta
    kv_cache_size: int

class KvCacheMetrics:
    num_total_allocated_blocks: int
    num_new_allocated_blocks: int
    num_reused_blocks: int
    num_missed_blocks: int
    kv_cache_hit_rate: float

class SpeculativeDecodingMetrics:
    acceptance_rate: float
    total_accepted_draft_tokens: int
    total_draft_tokens: int

class RequestPerfMetrics:
    timing_metrics: TimingMetrics
    kv_cache_metrics: KvCacheMetrics
    speculative_decoding: SpeculativeDecodingMetrics
    first_iter: int | None
    last_iter: int | None
    iter: int | None
