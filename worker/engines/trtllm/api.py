"""The one place that imports TensorRT-LLM, which takes many seconds and needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorrt_llm import __version__ as VERSION
from tensorrt_llm.llmapi import (
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

if TYPE_CHECKING:
    from tensorrt_llm.executor import GenerationResult

__all__ = [
    "LLM",
    "VERSION",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "DraftTargetDecodingConfig",
    "EagleDecodingConfig",
    "GenerationResult",
    "KvCacheConfig",
    "MTPDecodingConfig",
    "NGramDecodingConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
]
