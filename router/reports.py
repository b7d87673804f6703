"""What holders of KV blocks tell: a worker of its pool, a KV store of its node's memory.

Pure. Stored and evicted blocks are numbered without a gap; a snapshot carries the number
of the last event before it, and so does a report of load.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias


class Tier(enum.Enum):
    # In the worker's own pool: an import away from its engine.
    WORKER = "worker"
    # In the memory of its node.
    NODE = "node"


class LoadEvent(NamedTuple):
    """What a worker is doing."""

    num_running: int = 0
    num_waiting: int = 0
    # Of all requests there, not yet computed.
    queued_prompt_tokens: int = 0
    # Measured; 0: not yet.
    prefill_tokens_per_s: float = 0.0
    num_blocks_reserved: int = 0
    # 0: the engine's own KV is not in blocks.
    num_blocks_total: int = 0
    # Since its start: while these do not grow, its speed is not measured anew.
    prompt_tokens_evaluated: int = 0


class SnapshotEvent(NamedTuple):
    """All that it holds now: it replaces what was known, unless it `continues` a large one."""

    prefix_keys: tuple[bytes, ...]
    load: LoadEvent | None = None
    continues: bool = False


class StoredEvent(NamedTuple):
    prefix_keys: tuple[bytes, ...]


class EvictedEvent(NamedTuple):
    prefix_keys: tuple[bytes, ...]


Event: TypeAlias = SnapshotEvent | StoredEvent | EvictedEvent | LoadEvent


class Report(NamedTuple):
    sequence: int
    # Of the holder: after a restart it holds nothing, and counts anew.
    incarnation: str
    event: Event
