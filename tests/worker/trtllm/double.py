"""A double of TensorRT-LLM: the shapes and the traps of its API, and nothing of its work.

Each behaviour says where it is known from: TensorRT-LLM 1.2.1's text, or issues and pull
requests (#N) of NVIDIA/TensorRT-LLM. It computes nothing: a token is a digest of all before it.
KV "moves" by files, so that two processes can play prefill and decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

VERSION = "double of TensorRT-LLM 1.2.1"
STEP_S = 0.001
MAX_BLOCKS = 512
# A token that ends answers of prompts that end with ENDING.
ENDING = 77


# Weights that do not load.
UNREADABLE = "unreadable"


class RequestError(RuntimeError):
    """TensorRT-LLM 1.2.1, tensorrt_llm.executor.utils."""


class Config:
    """Keyword arguments, kept."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


class KvCacheConfig(Config): ...


class CacheTransceiverConfig(Config): ...


class CudaGraphConfig(Config): ...


class SchedulerConfig(Config): ...


class DraftTargetDecodingConfig(Config): ...


class EagleDecodingConfig(Config): ...


class MTPDecodingConfig(Config): ...


class NGramDecodingConfig(Config): ...


class CapacitySchedulerPolicy(enum.StrEnum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    return_perf_metrics: bool = False
    ignore_eos: bool = False
    detokenize: bool = True


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """TensorRT-LLM 1.2.1: exactly these fields."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None


@dataclass(slots=True)
class TimingMetrics:
    arrival_time: timedelta = timedelta()
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()
    kv_cache_size: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    timing_metrics: TimingMetrics


@dataclass(slots=True)
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None


class RequestOutput:
    """TensorRT-LLM 1.2.1: the iterator gives the SAME object each step, and `token_ids` is all
    so far."""

    def __init__(self, llm: LLM, request_id: int, prompt: list[int]) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = 0
        self.transferring = False
        self._llm = llm
        self._aborted = False
        self._error: Exception | None = None
        # One for each step that has not been seen.
        self._steps: asyncio.Queue[None] = asyncio.Queue()

    def aborted(self) -> bool:
        return self._aborted

    def abort(self) -> None:
        self._aborted = True
        # #12314, #13713: an abort during a transfer wedges the executor.
        if self.transferring:
            self._llm.wedged = True

    def step(self) -> None:
        self._steps.put_nowait(None)

    def fail(self, error: Exception) -> None:
        self._error = error
        self.step()

    def end(self, reason: str, *, stop_reason: int | str | None = None) -> None:
        self.outputs[0].finish_reason = reason
        self.outputs[0].stop_reason = stop_reason
        self.finished = True
        self.step()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished and self._steps.empty():
            raise StopAsyncIteration
        await self._steps.get()
        if self._error is not None:
            raise self._error
        return self

    async def aresult(self) -> RequestOutput:
        async for _ in self:
            pass
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()


class IterationResult:
    """TensorRT-LLM 1.2.1: times out into StopAsyncIteration; who wants more asks again."""

    def __init__(self, source: deque[dict[str, Any]], timeout: float | None) -> None:
        self._source = source
        self._end_s = time.monotonic() + (2.0 if timeout is None else timeout)

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while not self._source:
            if time.monotonic() >= self._end_s:
                raise StopAsyncIteration
            await asyncio.sleep(0.005)
        return self._source.popleft()


# TensorRT-LLM 1.2.1, LLM.__init__: unknown keywords raise ValueError.
KEYWORDS = {
    "skip_tokenizer_init",
    "tensor_parallel_size",
    "kv_cache_config",
    "enable_chunked_prefill",
    "scheduler_config",
    "cache_transceiver_config",
    "speculative_config",
    "max_batch_size",
    "max_seq_len",
    "max_num_tokens",
    "cuda_graph_config",
    "disable_overlap_scheduler",
    "return_perf_metrics",
    "otlp_traces_endpoint",
    "enable_iter_perf_stats",
    "stream_interval",
}


class LLM:
    def __init__(self, model: str, **keywords: Any) -> None:
        unknown = keywords.keys() - KEYWORDS
        if unknown:
            raise ValueError(f"unknown keywords: {sorted(unknown)}")
        # TensorRT-LLM 1.2.1: it blocks (autotuner, graph capture): not on an event loop.
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise AssertionError("LLM() was built on an event loop")
        if model == UNREADABLE:
            raise RuntimeError("CUDA out of memory")
        self.model = model
        self.keywords = keywords
        self.wedged = False
        self.dead = False
        # What callers passed, as it is now.
        self.sampling: list[SamplingParams] = []
        self.asked: list[dict[str, Any]] = []
        self.events: deque[dict[str, Any]] = deque()
        self.stats: deque[dict[str, Any]] = deque()
        self.used_blocks = 0
        self._ids = itertools.count(1)
        self._event_ids = itertools.count(0)
        self._stored: set[tuple[str | None, tuple[int, ...]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
        disaggregated_params: DisaggregatedParams | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        if self.dead:
            raise RuntimeError("the executor is gone")
        # TensorRT-LLM 1.2.1: call it inside a running loop.
        asyncio.get_running_loop()
        assert sampling_params is not None
        params = sampling_params
        chunked = self.keywords.get("enable_chunked_prefill")
        # TensorRT-LLM 1.2.1: without chunked prefill a prompt above max_num_tokens raises.
        if not chunked and len(inputs) > self.keywords["max_num_tokens"]:
            raise ValueError(f"a prompt of {len(inputs)} tokens is above max_num_tokens")
        # TensorRT-LLM 1.2.1: without a tokenizer there is no end but end_id, and no `stop`.
        if params.end_id is None or params.stop:
            raise ValueError("set end_id, and no stop strings, with skip_tokenizer_init")
        self.sampling.append(params)
        kind = disaggregated_params.request_type if disaggregated_params else None
        self.asked.append({"salt": cache_salt, "kind": kind, "ids": list(inputs)})
        # TensorRT-LLM 1.2.1: context_only sets max_tokens on the CALLER's SamplingParams.
        if kind == "context_only":
            params.max_tokens = 1
        output = RequestOutput(self, next(self._ids), list(inputs))
        work = self._run(output, params, disaggregated_params, cache_salt)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return output

    def get_stats_async(self, timeout: float | None = None) -> IterationResult:
        # TensorRT-LLM 1.2.1: needs enable_iter_perf_stats.
        assert self.keywords["enable_iter_perf_stats"]
        return IterationResult(self.stats, timeout)

    def get_kv_cache_events_async(self, timeout: float | None = None) -> IterationResult:
        config = self.keywords["kv_cache_config"]
        # TensorRT-LLM 1.2.1: needs a buffer and block reuse.
        assert config.event_buffer_max_size
        assert config.enable_block_reuse
        return IterationResult(self.events, timeout)

    def shutdown(self) -> None:
        self.dead = True

    async def _run(
        self,
        output: RequestOutput,
        params: SamplingParams,
        handed: DisaggregatedParams | None,
        salt: str | None,
    ) -> None:
        arrived = timedelta(seconds=time.monotonic())
        num_blocks = -(-len(output.prompt_token_ids) // self._tokens_per_block)
        self.used_blocks += num_blocks
        try:
            if handed is not None and handed.request_type == "context_only":
                await self._prefill(output, params, arrived, salt)
            else:
                await self._decode(output, params, handed, arrived, salt)
        except RequestError as error:
            output.fail(error)
        finally:
            self.used_blocks -= num_blocks
            self._add_stats()

    async def _prefill(
        self, output: RequestOutput, params: SamplingParams, arrived: timedelta, salt: str | None
    ) -> None:
        assert self.keywords["cache_transceiver_config"] is not None
        await self._step()
        if output.aborted():
            output.end("cancelled")
            return
        token = next_token(output.prompt_token_ids, params)
        self._store(output.prompt_token_ids, salt)
        kv = Path(tempfile.mkdtemp(prefix="firsttoken-double-")) / "kv"
        kv.write_text(json.dumps(output.prompt_token_ids))
        completion = output.outputs[0]
        completion.token_ids = [token]
        completion.request_perf_metrics = _metrics(arrived)
        completion.disaggregated_params = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[token],
            ctx_request_id=output.request_id,
            opaque_state=str(kv).encode(),
        )
        output.end("not_finished")
        # Its KV stays until it is fetched, or for kv_transfer_timeout_ms; without one, for ever.
        config = self.keywords["cache_transceiver_config"]
        end_s = time.monotonic() + (config.kv_transfer_timeout_ms or 1e9) / 1e3
        while kv.exists() and time.monotonic() < end_s:
            await asyncio.sleep(0.01)

    async def _decode(
        self,
        output: RequestOutput,
        params: SamplingParams,
        handed: DisaggregatedParams | None,
        arrived: timedelta,
        salt: str | None,
    ) -> None:
        ids = list(output.prompt_token_ids)
        completion = output.outputs[0]
        if handed is not None:
            await self._fetch(output, handed)
            # TensorRT-LLM 1.2.1: the decode engine says the first token again, and counts it.
            completion.token_ids = list(handed.first_gen_tokens or ())
            output.step()
        else:
            await self._step()
            self._store(ids, salt)
        stops = {*(params.stop_token_ids or ())}
        if not params.ignore_eos:
            stops.add(params.end_id or 0)
        while len(completion.token_ids) < params.max_tokens:
            await self._step()
            if output.aborted():
                output.end("cancelled")
                return
            token = next_token(ids + completion.token_ids, params)
            # The same list grows: who kept it sees it change.
            completion.token_ids.append(token)
            if params.logprobs is not None:
                completion.logprobs = [{each: -0.5} for each in completion.token_ids]
            if token in stops:
                output.step()
                await self._step()
                # TensorRT-LLM 1.2.1: a matched stop id is cut at the end: it gets shorter.
                completion.token_ids.pop()
                completion.request_perf_metrics = _metrics(arrived)
                output.end("stop", stop_reason=None if token == params.end_id else token)
                return
            if len(completion.token_ids) < params.max_tokens:
                output.step()
        completion.request_perf_metrics = _metrics(arrived)
        output.end("length")

    async def _fetch(self, output: RequestOutput, handed: DisaggregatedParams) -> None:
        kv = Path((handed.opaque_state or b"").decode())
        output.transferring = True
        await asyncio.sleep(0.02)
        while not kv.exists():  # of a context worker that is gone: it waits for ever
            await self._step()
        assert json.loads(kv.read_text()) == output.prompt_token_ids
        kv.unlink()
        kv.parent.rmdir()
        output.transferring = False

    async def _step(self) -> None:
        await asyncio.sleep(STEP_S)
        while self.wedged or os.environ.get("DOUBLE_WEDGED"):
            await asyncio.sleep(0.05)
        self._add_stats()

    def _add_stats(self) -> None:
        kv = {"usedNumBlocks": self.used_blocks, "maxNumBlocks": MAX_BLOCKS}
        self.stats.append({"iterLatencyMS": STEP_S * 1e3, "kvCacheStats": kv})

    @property
    def _tokens_per_block(self) -> int:
        value: int = self.keywords["kv_cache_config"].tokens_per_block
        return value

    def _store(self, ids: list[int], salt: str | None) -> None:
        """Events of TensorRT-LLM 1.2.1: tokens, hashes of its own, and no salt."""
        if not self.keywords["kv_cache_config"].event_buffer_max_size:
            return
        size, parent = self._tokens_per_block, None
        blocks = []
        for end in range(size, len(ids) + 1, size):
            path = (salt, tuple(ids[:end]))
            block_hash = hash(path)
            if path in self._stored:
                parent = block_hash
                continue
            self._stored.add(path)
            blocks.append(stored_block(block_hash, ids[end - size : end]))
        if blocks:
            data = {"type": "stored", "parent_hash": parent, "blocks": blocks}
            event = {"event_id": next(self._event_ids), "data": data, "window_size": 2048}
            self.events.append(event)


def stored_block(block_hash: int, ids: list[int]) -> dict[str, Any]:
    tokens = [{"token_id": each, "token_extra_id": 0} for each in ids]
    return {"block_hash": block_hash, "tokens": tokens, "cache_level": 0, "priority": 35}


def next_token(ids: list[int], params: SamplingParams) -> int:
    if ids[-1] == ENDING:
        stops = params.stop_token_ids or [params.end_id or 0]
        return stops[0]
    digest = hashlib.sha256(repr((ids, params.seed)).encode()).digest()
    return 100 + int.from_bytes(digest[:4], "little") % 900


def _metrics(arrived: timedelta) -> RequestPerfMetrics:
    now = timedelta(seconds=time.monotonic())
    return RequestPerfMetrics(TimingMetrics(arrived, arrived, now, now))
