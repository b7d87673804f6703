"""A node's KV store: what its workers computed, for all of them, in the node's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.eviction import POLICIES
from kvstore.index import BlockIndex
from kvstore.tier2 import Record
from router.knowledge import AnnouncedStore
from services.core.kvblocks import ArenaLayout, Block
from services.core.settings import KvStoreSettings
from services.simulation.feeds import Hub
from worker.engines.contract import EngineInfo
from worker.estimates import ReadCost
from worker.messages import StoredBlock
from worker.pool import NewBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """One store for so many workers. Its capacity and eviction are those of [kvstore]."""

    workers_per_node: int
    # All readers of a node share it.
    gb_per_s: float = 5.0
    latency_s: float = 0.0005


class VirtualStore:
    """The index is the real one; bytes are read one after the other, at a rate.

    What a worker has stored is here at once: writing behind is not simulated.
    """

    def __init__(
        self, host: str, plan: StorePlan, settings: KvStoreSettings, info: EngineInfo
    ) -> None:
        self.host = host
        self.hub = Hub(f"store-{host}", "life 1")
        self.cost = ReadCost(plan.latency_s, info.block_bytes / (plan.gb_per_s * 1e9))
        self._block_tokens, self._block_bytes = info.block_tokens, info.block_bytes
        layout = ArenaLayout.for_blocks(info.block_bytes, settings.capacity_mb << 20)
        self._index = BlockIndex(layout.num_slots, POLICIES[settings.eviction_policy])
        self._loop = asyncio.get_running_loop()
        self._busy_until_s = 0.0
        self.num_loaded = 0

    @property
    def announced(self) -> AnnouncedStore:
        return AnnouncedStore(self.hub.holder_id, self.host)

    def put(self, blocks: Iterable[StoredBlock]) -> None:
        """In the order of their chains."""
        now_s = self._loop.time()
        for each in blocks:
            key = each.prefix_key
            if key in self._index:
                continue
            if self._index.reserve(key, each.previous_key, "", now_s) is not None:
                block = Block(
                    key, key, b"virtual", each.block_index, self._block_tokens, self._block_bytes
                )
                self._index.commit([Record(block, "", b"")])
        changes = self._index.take_changes()
        self.hub.publish(changes.stored, changes.evicted)

    def match(self, chain: Sequence[NewBlock]) -> int:
        """How many blocks are here, from the chain's start without a gap."""
        return self._index.match([block.storage_key for block in chain])

    def read(self, chain: Sequence[NewBlock], first: int) -> float:
        """Read chain[first:], which are here; returns when they are read."""
        self._index.touch(block.storage_key for block in chain)
        num_blocks = len(chain) - first
        self.num_loaded += num_blocks
        began_s = max(self._loop.time() + self.cost.latency_s, self._busy_until_s)
        self._busy_until_s = began_s + num_blocks * self.cost.block_s
        return self._busy_until_s

    def check_integrity(self) -> None:
        self._index.check_integrity()
