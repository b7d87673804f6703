"""Hit rate of the KV store's node memory by its size and eviction policy, on a trace.

The bookkeeping that runs in the store runs here, block for block. Between the
baseline (LRU) and the ideal: Belady's rule, which knows the future, and a memory that
never forgets.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from kvstore.eviction import POLICIES, EvictionPolicy
from kvstore.index import BlockIndex
from kvstore.tier2 import Record
from services.core.kvblocks import Block

# The blocks of one prompt, from its start: equal numbers are equal blocks.
Chain: TypeAlias = Sequence[int]

SIZES = (0.01, 0.05, 0.1, 0.2, 0.5)  # of the distinct blocks
SESSION_INTERVAL_S = 60.0
BELADY, UNLIMITED = "belady", "unlimited"


class Row(NamedTuple):
    """`hit_rate`: blocks found, in a run from the start of their prompt, of all asked for."""

    trace: str
    policy: str
    size: float
    num_slots: int
    hit_rate: float


def measure(
    name: str,
    chains: Sequence[Chain],
    *,
    sizes: Sequence[float] = SIZES,
    policies: Sequence[str] = tuple(POLICIES),
) -> list[Row]:
    """A row for each size and policy, for Belady's rule, and for unlimited memory."""
    num_distinct = len({block for chain in chains for block in chain})
    rows = []
    for size in sizes:
        num_slots = max(1, round(size * num_distinct))
        for policy in policies:
            rate = replay(chains, num_slots, POLICIES[policy])
            rows.append(Row(name, policy, size, num_slots, rate))
        rows.append(Row(name, BELADY, size, num_slots, replay_belady(chains, num_slots)))
    rows.append(Row(name, UNLIMITED, 1.0, num_distinct, replay_belady(chains, num_distinct)))
    return rows


def replay(
    chains: Iterable[Chain], num_slots: int, new_policy: Callable[[int], EvictionPolicy]
) -> float:
    """The hit rate of a store that is asked for each chain, and then given what it lacked."""
    index = BlockIndex(num_slots, new_policy)
    num_hits = num_asked = 0
    for chain in chains:
        keys = [block.to_bytes(32, "little") for block in chain]
        length = index.match(keys)
        num_hits += length
        num_asked += len(keys)
        index.touch(keys[:length])
        _store(index, keys)
        index.take_changes()
    return num_hits / num_asked


def replay_belady(chains: Sequence[Chain], num_slots: int) -> float:
    """The same, when the block whose next use is farthest goes, its chain's tail first."""
    next_uses = _next_uses(chains)
    resident: dict[int, tuple[float, int]] = {}
    # The farthest first; entries that `resident` no longer agrees with are stale.
    farthest: list[tuple[float, int, int]] = []
    num_hits = num_asked = 0
    for chain, uses in zip(chains, next_uses, strict=True):
        num_hits += next((i for i, block in enumerate(chain) if block not in resident), len(chain))
        num_asked += len(chain)
        for depth, (block, use) in enumerate(zip(chain, uses, strict=True)):
            resident[block] = (-use, -depth)
            heapq.heappush(farthest, (-use, -depth, block))
        while len(resident) > num_slots:
            use, depth, block = heapq.heappop(farthest)
            if resident.get(block) == (use, depth):
                del resident[block]
    return num_hits / num_asked


def read_mooncake(path: Path) -> list[Chain]:
    """`hash_ids` of each request: github.com/kvcache-ai/Mooncake, FAST25-release/traces."""
    return [row["hash_ids"] for row in _read_lines(path)]


def read_agents(path: Path, *, blocks_per_unit: int = 16) -> list[Chain]:
    """Sessions of coding agents, a new one each minute: github.com/callanjfox/kv-cache-tester.

    `blocks_per_unit` blocks count as one, and what does not fill one is left out: the
    chains are long, a few thousand blocks.
    """
    calls: list[tuple[float, list[int]]] = []
    numbers: dict[tuple[int, int, int], int] = {}
    for number, session in enumerate(_read_lines(path)):
        for request in session["requests"]:
            blocks = [b for first, last in request["blocks"] for b in range(first, last + 1)]
            units = zip(
                blocks[::blocks_per_unit],
                blocks[blocks_per_unit - 1 :: blocks_per_unit],
                strict=False,
            )
            chain = [numbers.setdefault((number, *unit), len(numbers)) for unit in units]
            calls.append((number * SESSION_INTERVAL_S + request["t"], chain))
    calls.sort(key=lambda call: call[0])
    return [chain for _, chain in calls if chain]


def _store(index: BlockIndex, keys: list[bytes]) -> None:
    written = []
    spare = frozenset(keys)
    for depth, key in enumerate(keys):
        if key in index:
            continue
        parent = keys[depth - 1] if depth else b""
        if index.reserve(key, parent, "", 0.0, spare) is None:
            break  # no room but at the cost of its own head
        written.append(Record(Block(key, key, b"", depth, 0, 0), "", b""))
        if len(written) >= 16:
            index.commit(written)
            written = []
    index.commit(written)


def _next_uses(chains: Sequence[Chain]) -> list[list[float]]:
    """For each block of each chain, the number of the next chain that has it."""
    seen: dict[int, float] = {}
    uses: list[list[float]] = []
    for number in range(len(chains) - 1, -1, -1):
        uses.append([seen.get(block, math.inf) for block in chains[number]])
        seen.update(dict.fromkeys(chains[number], number))
    uses.reverse()
    return uses


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            yield json.loads(line)
