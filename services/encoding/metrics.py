"""What a tokenizer counts, for the observer. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from services.core.metrics import Metric, Sample

_PROMPTS = Metric("firsttoken.tokenizer.prompts", "{prompt}", "Prompts encoded.", True)
_FAILED = Metric("firsttoken.tokenizer.failed", "{prompt}", "Prompts that were not encoded.", True)
_TOKENS = Metric("firsttoken.tokenizer.tokens", "{token}", "Tokens of the prompts encoded.", True)
_RUNNING = Metric(
    "firsttoken.tokenizer.running",
    "{prompt}",
    "Prompts being encoded, or waiting for a thread.",
    False,
)
_HIT = Metric(
    "firsttoken.tokenizer.cache.hit",
    "{token}",
    "Tokens of texts seen before, which were not encoded again.",
    True,
)
_MISS = Metric("firsttoken.tokenizer.cache.miss", "{token}", "Tokens of texts encoded.", True)
_BYTES = Metric(
    "firsttoken.tokenizer.cache.size", "By", "Memory for ids of texts seen before.", False
)
METRICS = (_PROMPTS, _FAILED, _TOKENS, _RUNNING, _HIT, _MISS, _BYTES)


class CacheCounts(NamedTuple):
    """Tokens found and not found since the start; bytes held now."""

    hit_tokens: int = 0
    miss_tokens: int = 0
    num_bytes: int = 0


class Counts:
    def __init__(self) -> None:
        self.num_prompts = 0
        self.num_failed = 0
        self.num_tokens = 0
        self.num_running = 0

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """While one prompt is encoded."""
        self.num_running += 1
        try:
            yield
        except BaseException:
            self.num_failed += 1
            raise
        finally:
            self.num_running -= 1

    def encoded(self, num_tokens: int) -> None:
        self.num_prompts += 1
        self.num_tokens += num_tokens

    def read(self, cache: CacheCounts) -> Iterator[Sample]:
        yield Sample(_PROMPTS.name, self.num_prompts)
        yield Sample(_FAILED.name, self.num_failed)
        yield Sample(_TOKENS.name, self.num_tokens)
        yield Sample(_RUNNING.name, self.num_running)
        yield Sample(_HIT.name, cache.hit_tokens)
        yield Sample(_MISS.name, cache.miss_tokens)
        yield Sample(_BYTES.name, cache.num_bytes)
