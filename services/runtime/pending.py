"""What waits to be told to the observer: bounded, the oldest goes first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from firsttoken.observer.v1 import observer_pb2
from services.runtime import hops

# Written as one. While they wait as objects, each collection of garbage has to look at them.
BATCH_HOPS = 32
MAX_BATCHES = 256
# In one message: sending it holds up the loop.
MOST_BATCHES = 8
# An observer keeps no more of them.
MAX_PROMPTS = 4096
# Of their keys and tokens.
MAX_PROMPT_BYTES = 4 << 20
MAX_EVICTED = 65_536


class Batch(NamedTuple):
    num_hops: int
    data: bytes


class Pending:
    def __init__(self) -> None:
        # Hops that could not be told, since the process's start.
        self.num_dropped = 0
        self._fresh: list[hops.Told] = []
        self._batches: deque[Batch] = deque()
        self._prompts: deque[observer_pb2.Prompt] = deque()
        self._prompt_bytes = 0
        self._evicted: deque[tuple[str, bytes]] = deque(maxlen=MAX_EVICTED)
        self._bubbles_s: dict[str, float] = {}

    @property
    def has_hops(self) -> bool:
        return bool(self._fresh or self._batches)

    @property
    def has_batches(self) -> bool:
        return bool(self._batches)

    def add_hop(self, told: hops.Told) -> None:
        self._fresh.append(told)
        if len(self._fresh) >= BATCH_HOPS:
            self._write_fresh()

    def move_hops(self, message: observer_pb2.ReportRequest) -> list[Batch]:
        """The oldest, into the message."""
        if self._fresh:
            self._write_fresh()
        taken = [self._batches.popleft() for _ in range(min(MOST_BATCHES, len(self._batches)))]
        message.hops_json.extend(batch.data for batch in taken)
        return taken

    def put_back(self, taken: Sequence[Batch]) -> None:
        """They were not told after all. They are older than what is here."""
        self._batches.extendleft(reversed(taken))
        self._drop_oldest()

    def add_bubble(self, stage: str, duration_s: float) -> None:
        self._bubbles_s[stage] = self._bubbles_s.get(stage, 0.0) + duration_s

    def add_evicted(self, holder_id: str, prefix_keys: Iterable[bytes]) -> None:
        self._evicted.extend((holder_id, key) for key in prefix_keys)

    def add_prompt(self, prompt: observer_pb2.Prompt) -> None:
        self._prompts.append(prompt)
        self._prompt_bytes += _num_bytes(prompt)
        while self._prompt_bytes > MAX_PROMPT_BYTES or len(self._prompts) > MAX_PROMPTS:
            self._prompt_bytes -= _num_bytes(self._prompts.popleft())

    def move_others(self, message: observer_pb2.ReportRequest) -> None:
        """All but hops, into the message."""
        message.prompts.extend(self._prompts)
        self._prompts.clear()
        self._prompt_bytes = 0
        for stage, duration_s in self._bubbles_s.items():
            message.bubbles.add(stage=stage, duration_s=duration_s)
        self._bubbles_s.clear()
        by_holder: dict[str, list[bytes]] = {}
        for holder_id, key in self._evicted:
            by_holder.setdefault(holder_id, []).append(key)
        self._evicted.clear()
        for holder_id, keys in by_holder.items():
            message.evictions.add(holder_id=holder_id, prefix_keys=b"".join(keys))

    def check_integrity(self) -> None:
        assert len(self._fresh) < BATCH_HOPS
        assert len(self._batches) <= MAX_BATCHES
        assert self._prompt_bytes == sum(map(_num_bytes, self._prompts))
        assert self._prompt_bytes <= MAX_PROMPT_BYTES
        assert len(self._prompts) <= MAX_PROMPTS

    def _write_fresh(self) -> None:
        fresh, self._fresh = self._fresh, []
        wall_offset_ns = time.time_ns() - time.monotonic_ns()
        try:
            self._batches.append(Batch(len(fresh), hops.encode(fresh, wall_offset_ns)))
        except TypeError:
            self._write_one_by_one(fresh, wall_offset_ns)
        self._drop_oldest()

    def _write_one_by_one(self, fresh: Iterable[hops.Told], wall_offset_ns: int) -> None:
        """Those that can be told."""
        for told in fresh:
            try:
                self._batches.append(Batch(1, hops.encode([told], wall_offset_ns)))
            except TypeError:
                self.num_dropped += 1

    def _drop_oldest(self) -> None:
        while len(self._batches) > MAX_BATCHES:
            self.num_dropped += self._batches.popleft().num_hops


def _num_bytes(prompt: observer_pb2.Prompt) -> int:
    return len(prompt.prefix_keys) + len(prompt.token_ids)
