"""What this core says of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.engines.trtllm.health import KvUse
from worker.messages import CoreLoad, FirstTokenTimes


class Statistics:
    """Counted since the core's start, and what the engine says of its steps."""

    def __init__(self) -> None:
        self.kv = KvUse()
        self.prefill_tokens_per_s = 0.0
        self.num_steps = 0
        self._longest_step_ms = 0.0
        self._busy_s = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._decode_tokens = 0

    def add_step(self, stats: Mapping[str, Any]) -> None:
        """As get_stats_async gives it."""
        self.num_steps += 1
        latency_ms = float(stats.get("iterLatencyMS") or 0.0)
        self._busy_s += latency_ms / 1e3
        self._longest_step_ms = max(latency_ms, self._longest_step_ms * 0.99)
        kv = stats.get("kvCacheStats") or {}
        self.kv = KvUse(int(kv.get("usedNumBlocks") or 0), int(kv.get("maxNumBlocks") or 0))

    def add_first(self, first: FirstTokenTimes) -> None:
        self._prompt_tokens += first.evaluated_prompt_tokens
        self._cached_tokens += first.cached_tokens
        if first.computing_s > 0 and first.evaluated_prompt_tokens:
            rate = first.evaluated_prompt_tokens / first.computing_s
            # What shared its steps with others looks slower: prefer what was fast.
            weight = 0.3 if rate > self.prefill_tokens_per_s else 0.05
            self.prefill_tokens_per_s += weight * (rate - self.prefill_tokens_per_s)

    def add_tokens(self, count: int) -> None:
        self._decode_tokens += count

    def load(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_cached: int,
        num_reserved: int,
        num_blocks: int,
        queued_tokens: int,
    ) -> CoreLoad:
        return CoreLoad(
            num_running=num_running,
            num_waiting=num_waiting,
            num_blocks_cached=num_cached,
            num_blocks_reserved=min(num_reserved, num_blocks),
            num_blocks_total=num_blocks,
            num_outbox_blocks=0,
            prompt_tokens_evaluated=self._prompt_tokens,
            decode_tokens_evaluated=self._decode_tokens,
            prompt_tokens_cached=self._cached_tokens,
            num_steps=self.num_steps,
            engine_busy_s=self._busy_s,
            longest_step_ms=self._longest_step_ms,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            queued_prompt_tokens=queued_tokens,
            bubble_s={},
            drafts={},
        )
