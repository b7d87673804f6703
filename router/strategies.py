"""How a worker is chosen among those that could take the request now.

A strategy keeps no state of its own that a change of configuration would lose: whose turn it
is and what is in flight, the workers carry; who has which blocks, the router's knowledge.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Protocol

from router.fleet import Worker
from router.knowledge import Knowledge
from router.kv_aware import KvAware
from router.prompt import Choice, Prompt
from services.core.keys import KEY_BYTES
from services.core.settings import MeshConfig
from services.core.tokens import BYTES_PER_TOKEN


class Strategy(Protocol):
    def choose(self, candidates: Sequence[Worker], prompt: Prompt, now_s: float) -> Choice:
        """One of `candidates`: at least one, all with room."""
        ...


class RoundRobin:
    """The one that was taken longest ago."""

    def choose(self, candidates: Sequence[Worker], prompt: Prompt, now_s: float) -> Choice:
        return Choice(min(candidates, key=_turn), len(candidates), "its turn")


class Random:
    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Worker], prompt: Prompt, now_s: float) -> Choice:
        return Choice(self._random.choice(candidates), len(candidates), "by chance")


class LeastOutstanding:
    """The fewest requests in flight; among equals, the one that was taken longest ago."""

    def choose(self, candidates: Sequence[Worker], prompt: Prompt, now_s: float) -> Choice:
        return Choice(min(candidates, key=outstanding), len(candidates), "least in flight")


class PrefixAware:
    """Requests that begin alike go to the same worker, so that it can reuse what it computed.

    Each beginning has its own order of the workers (rendezvous hashing): when one
    leaves, only its own requests move. The first in this order that has fewer than
    `concurrency_threshold` in flight takes the request; when none has, the least busy.
    """

    def __init__(
        self, *, prefix_length: int, prefix_length_bytes: int, concurrency_threshold: int
    ) -> None:
        self._prefix_length = prefix_length
        self._prefix_length_bytes = prefix_length_bytes
        self._concurrency_threshold = concurrency_threshold

    def choose(self, candidates: Sequence[Worker], prompt: Prompt, now_s: float) -> Choice:
        calm = [each for each in candidates if each.in_flight < self._concurrency_threshold]
        if not calm:
            least = min(candidates, key=outstanding)
            return Choice(least, len(candidates), "all are busy: least in flight")
        beginning = self.fingerprint(prompt)
        chosen = max(calm, key=lambda worker: affinity(worker, beginning))
        return Choice(chosen, len(candidates), "its beginning")

    def fingerprint(self, prompt: Prompt) -> bytes:
        """Equal for prompts that begin alike, of the same tenant and salt."""
        if self._prefix_length_bytes and prompt.text_head:
            return _digest(prompt.prefix_keys[:KEY_BYTES] + prompt.text_head)
        return fingerprint(prompt, self._prefix_length)


def make_strategy(config: MeshConfig, knowledge: Knowledge, *, seed: int | None = None) -> Strategy:
    settings = config.router
    match settings.routing_strategy:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(seed)
        case "least_outstanding":
            return LeastOutstanding()
        case "prefix_aware":
            return PrefixAware(
                prefix_length=settings.prefix_length,
                prefix_length_bytes=settings.prefix_length_bytes,
                concurrency_threshold=settings.concurrency_threshold,
            )
        case "kv_aware":
            return KvAware(
                knowledge,
                step_tokens=config.worker.max_batch_tokens,
                explain=bool(settings.record_decisions),
            )
    raise AssertionError(f"no strategy {settings.routing_strategy!r}")  # config admits no other


def fingerprint(prompt: Prompt, prefix_length: int) -> bytes:
    """Equal for prompts whose first `prefix_length` tokens agree, of the same tenant and salt."""
    num_keys = len(prompt.prefix_keys) // KEY_BYTES
    last = min(prefix_length // prompt.block_tokens, num_keys - 1)
    if last <= 0:  # shorter than a block: no key but the root's
        root = prompt.prefix_keys[:KEY_BYTES]
        return _digest(root + prompt.token_ids[: prefix_length * BYTES_PER_TOKEN])
    return prompt.prefix_keys[last * KEY_BYTES : (last + 1) * KEY_BYTES]


def affinity(worker: Worker, beginning: bytes) -> bytes:
    """Orders the workers for prompts of this beginning, greatest first."""
    return hashlib.blake2b(beginning + worker.identity, digest_size=8).digest()


def _turn(worker: Worker) -> int:
    return worker.turn


def outstanding(worker: Worker) -> tuple[int, int]:
    return worker.in_flight, worker.turn


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
