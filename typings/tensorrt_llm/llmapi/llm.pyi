# Ours: a stub of TensorRT-LLM 1.2.1, of what the adapter touches. See typings/README.md.
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Union

from ..bindings.executor import KvCacheRetentionConfig
from ..disaggregated_params import DisaggregatedParams
from ..executor.request import LoRARequest, PromptAdapterRequest
from ..executor.result import GenerationResult, IterationResult
from ..sampling_params import SamplingParams
from ..scheduling_params import SchedulingParams
from .llm_args import (
    CacheTransceiverConfig,
    CudaGraphConfig,
    KvCacheConfig,
    KvCacheConnectorConfig,
    SchedulerConfig,
    TorchCompileConfig,
    TorchLlmArgs,
    _SpecConfig,
)

class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    query_token_ids: list[int]

class TextPrompt(TypedDict, total=False):
    prompt: str

PromptInputs = Union[str, list[int], TextPrompt, TokensPrompt]

class RequestOutput(GenerationResult):
    @property
    def prompt(self) -> str | None: ...

class LLM:
    args: TorchLlmArgs
    # Real signature is (model, tokenizer, tokenizer_mode, skip_tokenizer_init, trust_remote_code, tensor_parallel_size,
    # dtype, revision, tokenizer_revision, **kwargs); unknown kwargs raise ValueError at run time, so they are spelled out here.
    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = ...,
        tokenizer_mode: Literal["auto", "slow"] = ...,
        skip_tokenizer_init: bool = ...,
        trust_remote_code: bool = ...,
        tensor_parallel_size: int = ...,
        dtype: str = ...,
        revision: str | None = ...,
        tokenizer_revision: str | None = ...,
        *,
        backend: str | None = ...,
        pipeline_parallel_size: int = ...,
        enable_attention_dp: bool = ...,
        kv_cache_config: KvCacheConfig = ...,
        enable_chunked_prefill: bool = ...,
        scheduler_config: SchedulerConfig = ...,
        cache_transceiver_config: CacheTransceiverConfig | None = ...,
        speculative_config: _SpecConfig | None = ...,
        max_batch_size: int | None = ...,
        max_input_len: int | None = ...,
        max_seq_len: int | None = ...,
        max_beam_width: int | None = ...,
        max_num_tokens: int | None = ...,
        iter_stats_max_iterations: int | None = ...,
        request_stats_max_iterations: int | None = ...,
        return_perf_metrics: bool = ...,
        otlp_traces_endpoint: str | None = ...,
        orchestrator_type: Literal["rpc", "ray"] | None = ...,
        env_overrides: dict[str, str] | None = ...,
        num_postprocess_workers: int = ...,
        cuda_graph_config: CudaGraphConfig | None = ...,
        disable_overlap_scheduler: bool = ...,
        enable_iter_perf_stats: bool = ...,
        enable_iter_req_stats: bool = ...,
        print_iter_log: bool = ...,
        perf_metrics_max_requests: int = ...,
        enable_autotuner: bool = ...,
        torch_compile_config: TorchCompileConfig | None = ...,
        stream_interval: int = ...,
        kv_connector_config: KvCacheConnectorConfig | None = ...,
        attn_backend: str = ...,
        load_format: Any = ...,
        garbage_collection_gen0_threshold: int = ...,
    ) -> None: ...
    # 1.2.1 VERIFIED: no `priority`, no `conversation_params`.
    def generate_async(
        self,
        inputs: PromptInputs,
        sampling_params: SamplingParams | None = ...,
        lora_request: LoRARequest | None = ...,
        prompt_adapter_request: PromptAdapterRequest | None = ...,
        streaming: bool = ...,
        kv_cache_retention_config: KvCacheRetentionConfig | None = ...,
        disaggregated_params: DisaggregatedParams | None = ...,
        trace_headers: Mapping[str, str] | None = ...,
        _postproc_params: Any = ...,
        scheduling_params: SchedulingParams | None = ...,
        cache_salt: str | None = ...,
    ) -> RequestOutput: ...
    def get_stats(self, timeout: float | None = ...) -> list[dict[str, Any]]: ...
    def get_stats_async(self, timeout: float | None = ...) -> IterationResult: ...
    def get_kv_cache_events(self, timeout: float | None = ...) -> list[dict[str, Any]]: ...
    def get_kv_cache_events_async(self, timeout: float | None = ...) -> IterationResult: ...
    def shutdown(self) -> None: ...
    @property
    def llm_id(self) -> str: ...
    def __enter__(self) -> LLM: ...
    def __exit__(self, a: Any, b: Any, c: Any) -> Literal[False]: ...
