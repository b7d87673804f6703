"""What a KV store says of itself in numbers, for the observer."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.memory_tier import MemoryTier
from kvstore.store import KvStore
from kvstore.tier2 import Tier2, Tier2Stats
from services.core.metrics import LEAK, Labels, Metric, Sample

_HITS = Metric("firsttoken.kvstore.hits", "{block}", "Blocks asked for that a tier had.", True)
_MISSES = Metric(
    "firsttoken.kvstore.misses", "{block}", "Blocks asked for that a tier had not.", True
)
_READ = Metric("firsttoken.kvstore.read", "By", "KV given out, by the tier it lay in.", True)
_WRITTEN = Metric("firsttoken.kvstore.written", "By", "KV taken in.", True)
_EVICTED = Metric("firsttoken.kvstore.evicted", "{block}", "Blocks that gave way to others.", True)
_REJECTED = Metric(
    "firsttoken.kvstore.rejected",
    "{block}",
    "Blocks that did not verify, were not those wanted, or were not taken.",
    True,
)
_BLOCKS = Metric("firsttoken.kvstore.blocks", "{block}", "Blocks held.", False)
_CAPACITY = Metric(
    "firsttoken.kvstore.capacity", "{block}", "Blocks there is room for; 0: not known.", False
)
_SIZE = Metric("firsttoken.kvstore.size", "By", "Memory that blocks take.", False)
_BANDWIDTH = Metric(
    "firsttoken.kvstore.read.bandwidth", "By/s", "Speed of the latest reads from Redis.", False
)
_LATENCY = Metric(
    "firsttoken.kvstore.read.latency",
    "s",
    "Until the first byte of the latest reads from Redis.",
    False,
)
_CONNECTED = Metric(
    "firsttoken.kvstore.redis.connected", "{connection}", "1: Redis answers. 0: it does not.", False
)
_PENDING = Metric(
    "firsttoken.kvstore.redis.pending", "{block}", "Blocks that wait to be written to Redis.", False
)
_DROPPED = Metric(
    "firsttoken.kvstore.redis.dropped",
    "{block}",
    "Blocks not written to Redis: it was too slow, or failed.",
    True,
)
_CALLS = Metric("firsttoken.kvstore.calls", "{call}", "Reads and writes in progress.", False)
_TENANT_BLOCKS = Metric("firsttoken.kvstore.tenant.blocks", "{block}", "L1 by tenant.", False)
_TENANT_HITS = Metric("firsttoken.kvstore.tenant.hits", "{block}", "L1 hits by tenant.", True)
_TENANT_EVICTED = Metric(
    "firsttoken.kvstore.tenant.evicted", "{block}", "L1 evictions by tenant.", True
)
METRICS = (
    *(_HITS, _MISSES, _READ, _WRITTEN, _EVICTED, _REJECTED, _BLOCKS, _CAPACITY, _SIZE),
    *(_BANDWIDTH, _LATENCY, _CONNECTED, _PENDING, _DROPPED, _CALLS),
    *(_TENANT_BLOCKS, _TENANT_HITS, _TENANT_EVICTED, LEAK),
)


def read(store: KvStore) -> Iterator[Sample]:
    yield from _memory(store.tier1)
    if store.tier2 is not None:
        yield from _redis(store.tier2)
    yield Sample(_CALLS.name, store.num_readers, _label("kind", "read"))
    yield Sample(_CALLS.name, store.num_writers, _label("kind", "write"))
    reserved = 0 if store.num_writers else store.tier1.index.num_reserved
    yield Sample(LEAK.name, reserved, _label("what", "reservations"))


def _memory(tier: MemoryTier) -> Iterator[Sample]:
    counters, index = tier.counters, tier.index
    stats = Tier2Stats(
        num_blocks=index.num_blocks,
        capacity_blocks=index.num_slots,
        num_bytes=index.num_blocks * tier.arena.layout.slot_bytes,
        num_hits=counters.num_hits,
        num_misses=counters.num_misses,
        bytes_read=counters.bytes_read,
        bytes_written=counters.bytes_written,
        num_evicted=counters.num_evicted,
    )
    yield from _tier("l1", stats)
    for reason, count in counters.rejected.items():
        yield Sample(_REJECTED.name, count, (("tier", "l1"), ("reason", reason)))
    for tenant, counts in counters.by_tenant(index.tenants()).items():
        label = _label("tenant", tenant)
        yield Sample(_TENANT_BLOCKS.name, counts.num_blocks, label)
        yield Sample(_TENANT_HITS.name, counts.num_hits, label)
        yield Sample(_TENANT_EVICTED.name, counts.num_evicted, label)


def _redis(tier: Tier2) -> Iterator[Sample]:
    stats = tier.stats
    yield from _tier("l2", stats)
    for reason, count in tier.rejected.items():
        yield Sample(_REJECTED.name, count, (("tier", "l2"), ("reason", reason)))
    yield Sample(_CONNECTED.name, tier.connected)
    yield Sample(_PENDING.name, stats.num_pending_writes)
    yield Sample(_DROPPED.name, stats.num_dropped_writes)
    if stats.read_bytes_per_s:
        yield Sample(_BANDWIDTH.name, stats.read_bytes_per_s, _label("tier", "l2"))
        yield Sample(_LATENCY.name, stats.read_latency_s, _label("tier", "l2"))


def _tier(name: str, stats: Tier2Stats) -> Iterator[Sample]:
    label = _label("tier", name)
    yield Sample(_HITS.name, stats.num_hits, label)
    yield Sample(_MISSES.name, stats.num_misses, label)
    yield Sample(_READ.name, stats.bytes_read, label)
    yield Sample(_WRITTEN.name, stats.bytes_written, label)
    yield Sample(_EVICTED.name, stats.num_evicted, label)
    yield Sample(_BLOCKS.name, stats.num_blocks, label)
    yield Sample(_CAPACITY.name, stats.capacity_blocks, label)
    yield Sample(_SIZE.name, stats.num_bytes, label)


def _label(name: str, value: str) -> Labels:
    return ((name, value),)
