"""What waits to be told to the observer: bounded, the oldest goes first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from firsttoken.observer.v1 import observer_pb2
from services.runtime.hops import Told

MAX_HOPS = 8192
MAX_PROMPT_BYTES = 4 << 20
MAX_EVICTED = 65_536


class Pending:
    def __init__(self) -> None:
        # Hops that could not be told, since the process's start.
        self.num_dropped = 0
        self._hops: deque[Told] = deque()
        self._prompts: deque[observer_pb2.Prompt] = deque()
        self._prompt_bytes = 0
        self._evicted: deque[tuple[str, bytes]] = deque(maxlen=MAX_EVICTED)
        self._bubbles_s: dict[str, float] = {}

    @property
    def has_hops(self) -> bool:
        return bool(self._hops)

    def add_hop(self, told: Told) -> None:
        if len(self._hops) >= MAX_HOPS:
            self._hops.popleft()
            self.num_dropped += 1
        self._hops.append(told)

    def take_hops(self, most: int) -> list[Told]:
        """The oldest."""
        return [self._hops.popleft() for _ in range(min(most, len(self._hops)))]

    def put_back(self, taken: Sequence[Told]) -> None:
        """They were not told after all. They are older than what is here."""
        room = max(0, MAX_HOPS - len(self._hops))
        kept = taken[max(0, len(taken) - room) :]
        self.num_dropped += len(taken) - len(kept)
        self._hops.extendleft(reversed(kept))

    def add_bubble(self, stage: str, duration_s: float) -> None:
        self._bubbles_s[stage] = self._bubbles_s.get(stage, 0.0) + duration_s

    def add_evicted(self, holder_id: str, prefix_keys: Iterable[bytes]) -> None:
        self._evicted.extend((holder_id, key) for key in prefix_keys)

    def add_prompt(self, prompt: observer_pb2.Prompt) -> None:
        self._prompts.append(prompt)
        self._prompt_bytes += len(prompt.token_ids)
        while self._prompt_bytes > MAX_PROMPT_BYTES:
            self._prompt_bytes -= len(self._prompts.popleft().token_ids)

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
        assert len(self._hops) <= MAX_HOPS
        assert self._prompt_bytes == sum(len(prompt.token_ids) for prompt in self._prompts)
        assert self._prompt_bytes <= MAX_PROMPT_BYTES
