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
from services.core.settings import KvStoreSettings

# The blocks of one prompt, from its start: equal numbers are equal blocks.
Chain: TypeAlias = Sequence[int]

SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the distinct blocks
SESSION_INTERVAL_S = 60.0
BELADY = "belady"
# As workers write them.
BATCH_BLOCKS = 16
# Blocks of 64 tokens that count as one, in traces whose prompts have thousands.
BLOCKS_PER_UNIT = 64


class Rates(NamedTuple):
    """Hit rates with memory for `num_slots` blocks: by policy, and by Belady's rule.

    A hit is a block found, in a run from the start of its prompt; the rate is of all
    blocks asked for.
    """

    size: float
    num_slots: int
    hit_rates: dict[str, float]


def measure_traces(files: Iterable[Path]) -> dict[str, Any]:
    """Of files that `read_trace` reads."""
    return {
        "benchmark": "kv_eviction",
        "policy": KvStoreSettings().eviction_policy,
        "traces": [_measure_trace(path) for path in files],
    }


def measure(
    chains: Sequence[Chain],
    *,
    sizes: Sequence[float] = SIZES,
    policies: Sequence[str] = tuple(POLICIES),
) -> list[Rates]:
    num_distinct = len({block for chain in chains for block in chain})
    rows = []
    for size in sizes:
        num_slots = max(1, round(size * num_distinct))
        rates = {policy: replay(chains, num_slots, POLICIES[policy]) for policy in policies}
        rates[BELADY] = replay_belady(chains, num_slots)
        rows.append(Rates(size, num_slots, rates))
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


def read_trace(path: Path) -> list[Chain]:
    """JSON Lines, gzipped or not, of one of two kinds.

    Requests with `hash_ids`: github.com/kvcache-ai/Mooncake. Sessions of coding agents
    with `requests` and their `blocks`: github.com/callanjfox/kv-cache-tester.

    Raises ValueError for any other.
    """
    rows = list(_read_lines(path))
    if rows and "hash_ids" in rows[0]:
        return [row["hash_ids"] for row in rows]
    if rows and "requests" in rows[0]:
        return _agents(rows)
    raise ValueError(f"{path}: is no trace of a known kind")


def _agents(sessions: Sequence[dict[str, Any]]) -> list[Chain]:
    """A new session each minute. What does not fill a unit is left out."""
    calls: list[tuple[float, list[int]]] = []
    numbers: dict[tuple[int, ...], int] = {}
    for number, session in enumerate(sessions):
        for request in session["requests"]:
            blocks = [b for first, last in request["blocks"] for b in range(first, last + 1)]
            starts = blocks[::BLOCKS_PER_UNIT]
            ends = blocks[BLOCKS_PER_UNIT - 1 :: BLOCKS_PER_UNIT]
            units = zip(starts, ends, strict=False)
            chain = [numbers.setdefault((number, *unit), len(numbers)) for unit in units]
            calls.append((number * SESSION_INTERVAL_S + request["t"], chain))
    calls.sort(key=lambda call: call[0])
    return [chain for _, chain in calls if chain]


def _measure_trace(path: Path) -> dict[str, Any]:
    chains = read_trace(path)
    num_distinct = len({block for chain in chains for block in chain})
    return {
        "trace": path.name,
        "requests": len(chains),
        "blocks": sum(map(len, chains)),
        "distinct_blocks": num_distinct,
        "unlimited": replay_belady(chains, num_distinct),
        "sizes": [row._asdict() for row in measure(chains)],
    }


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
        if len(written) >= min(BATCH_BLOCKS, max(1, index.num_slots // 4)):
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
