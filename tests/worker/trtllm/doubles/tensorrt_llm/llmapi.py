"""The names of tensorrt_llm.llmapi that the adapter uses, of the double."""

from tests.worker.trtllm.double import (
    LLM,
    CacheTransceiverConfig,
    CapacitySchedulerPolicy,
    CudaGraphConfig,
    DisaggregatedParams,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    RequestError,
    RequestOutput,
    SamplingParams,
    SchedulerConfig,
)

__all__ = [
    "LLM",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "DraftTargetDecodingConfig",
    "EagleDecodingConfig",
    "KvCacheConfig",
    "MTPDecodingConfig",
    "NGramDecodingConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
]
