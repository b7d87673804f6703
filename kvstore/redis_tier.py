"""L2: blocks in Redis (or Valkey, or a Redis Cluster), which outlive the node.

Never in a request's way: a read that finds no Redis is a miss, a write that finds no
room is dropped, and both are counted. See kvstore.tier2 for the contract,
redis_record for what lies in Redis, redis_guard for what happens when it does not answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing
from itertools import groupby, islice
from typing import Any

from kvstore.redis_address import RedisAddress, address_of
from kvstore.redis_cluster import ClusterLink
from kvstore.redis_guard import GuardedRedis
from kvstore.redis_link import Link, RedisUnavailable
from kvstore.redis_multiplexed import MultiplexedLink
from kvstore.redis_pool import PoolLink
from kvstore.redis_rates import MovingRatio
from kvstore.redis_record import (
    HEADER_BYTES_READ,
    KEY_PREFIX,
    decode,
    decode_header,
    redis_key,
    storage_key_in,
)
from kvstore.redis_throttle import Throttle
from kvstore.redis_writer import WriteBehind
from kvstore.tier2 import GROUP_BLOCKS, Found, Record, Tier2Stats, Wanted
from services.core.kvblocks import Buffer
from services.core.settings import KvStoreSettings
from services.runtime.resource import Resource
from services.runtime.tasks import end_tasks

# Batches of one read that are under way at once: one comes while one is taken.
READ_AHEAD = 2
# A batch takes no longer than this at the rate lately measured, so that blocks come one
# after the other, and a cancelled read leaves little behind.
BATCH_S = 0.05
FIRST_BATCH_BYTES = 1 << 20


class RedisTier(Resource):
    """See Tier2. Raises StartupError for settings that cannot be meant."""

    def __init__(self, settings: KvStoreSettings) -> None:
        self._settings = settings
        self._address = address_of(settings)
        self._throttle = Throttle(settings.debug_l2_bytes_per_s)
        self._rate = MovingRatio(half_life_weight=1.0)
        self._rejected: Counter[str] = Counter()
        self._num_hits = 0
        self._num_misses = 0
        self._num_bytes_read = 0

    async def _open(self, stack: AsyncExitStack) -> None:
        """Also when no Redis answers: it may later."""
        settings = self._settings
        self._redis = await stack.enter_async_context(
            GuardedRedis(
                _open_link(settings, self._address, settings.redis_pool_size),
                _open_link(settings, self._address, 1),
                place=str(self._address),
                retry_s=settings.redis_retry_s,
            )
        )
        self._writer = await stack.enter_async_context(
            WriteBehind(
                self._redis,
                queue_bytes=settings.redis_write_queue_bytes,
                batch_bytes=settings.redis_batch_bytes,
                ttl_s=settings.redis_ttl_s,
                retry_s=settings.redis_retry_s,
            )
        )
        self._redis.on_open = self._writer.drop_waiting

    @property
    def connected(self) -> bool:
        return self._redis.breaker.is_closed

    @property
    def rejected(self) -> Mapping[str, int]:
        """Also those not found out about in time ("late"), or at all ("unavailable")."""
        return self._rejected

    @property
    def stats(self) -> Tier2Stats:
        """Blocks and bytes are Redis's own figures of all it holds, seconds old."""
        fullness = self._redis.fullness
        return Tier2Stats(
            num_blocks=fullness.num_keys,
            num_bytes=fullness.num_bytes,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            bytes_read=self._num_bytes_read,
            bytes_written=self._writer.num_bytes_written,
            num_evicted=fullness.num_evicted,
            read_bytes_per_s=self._rate.value,
            read_latency_s=self._redis.latency.value,
            num_pending_writes=self._writer.num_pending,
            num_dropped_writes=self._writer.num_dropped,
        )

    def throttle(self, bytes_per_s: float) -> None:
        """Read no faster than this from now on; 0: as fast as it goes."""
        self._throttle.bytes_per_s = bytes_per_s

    async def get_many(
        self, chain: Sequence[bytes], indices: Sequence[int], wanted: Wanted
    ) -> AsyncGenerator[Found, None]:
        todo = _batches(indices, lambda: self._bytes_at_once() // wanted.num_bytes)
        reader = _Reader()
        ahead: deque[asyncio.Task[list[Found]]] = deque()
        try:
            while True:
                while len(ahead) < READ_AHEAD and (batch := next(todo, None)) is not None:
                    read = self._read(chain, batch, wanted, reader)
                    ahead.append(asyncio.create_task(read, name="redis: read"))
                if not ahead:
                    return
                for found in await ahead[0]:
                    yield found
                ahead.popleft()
        finally:
            await end_tasks(ahead)

    async def exists_many(
        self, chain: Sequence[bytes], start: int, *, patience_s: float = math.inf
    ) -> int:
        indices = range(start, len(chain))
        if not indices:
            return 0
        if self._redis.latency.value > patience_s:
            self._rejected["late"] += len(indices)
            return 0
        replies: list[Any] = []
        at_least_s = 0.0
        began_s = self._now_s()
        try:
            async with asyncio.timeout(None if math.isinf(patience_s) else patience_s):
                replies = await self._redis.read(
                    [(b"EXISTS", redis_key(chain, index)) for index in indices]
                )
        except RedisUnavailable:
            self._rejected["unavailable"] += len(indices)
            return 0
        except TimeoutError:
            self._rejected["late"] += len(indices)
            at_least_s = self._redis.latency.value  # having waited for less says nothing
        now_s = self._now_s()
        self._redis.latency.observe(max(now_s - began_s, at_least_s), 1, now_s)
        return next((n for n, reply in enumerate(replies) if not reply), len(replies))

    def put_nowait(self, chain: Sequence[bytes], record: Record, payload: Buffer) -> bool:
        return self._writer.offer(redis_key(chain, record.block.index), record, payload)

    async def flush(self) -> None:
        await self._writer.flush()

    async def evict(
        self,
        *,
        storage_keys: Sequence[bytes] = (),
        tenant: str | None = None,
        everything: bool = False,
    ) -> int:
        """Looks through all keys: for an operator, not for a request."""
        await self.flush()
        chosen = frozenset(storage_keys)
        num_evicted = 0
        try:
            async with aclosing(self._redis.scan(KEY_PREFIX + b"*")) as pages:
                async for page in pages:
                    keys = page if everything else await self._select(page, chosen, tenant)
                    num_evicted += await self._delete(keys)
        except RedisUnavailable:
            return num_evicted
        return num_evicted

    async def _read(
        self, chain: Sequence[bytes], batch: Sequence[int], wanted: Wanted, reader: _Reader
    ) -> list[Found]:
        began_s = self._now_s()
        groups = groupby(batch, key=lambda index: index // GROUP_BLOCKS)
        commands = [
            (b"MGET", *(redis_key(chain, index) for index in indices)) for _, indices in groups
        ]
        try:
            replies = await self._redis.read(commands)
        except RedisUnavailable:
            self._rejected["unavailable"] += len(batch)
            return [Found(index, "unavailable") for index in batch]
        values: list[bytes | None] = [value for reply in replies for value in reply]
        num_bytes = sum(len(value) for value in values if value is not None)
        await self._throttle.pass_bytes(num_bytes)
        self._measure(num_bytes, began_s, reader)
        pairs = zip(batch, values, strict=True)
        return [self._verify(value, chain[index], index, wanted) for index, value in pairs]

    def _verify(self, value: bytes | None, key: bytes, index: int, wanted: Wanted) -> Found:
        if value is None:
            self._num_misses += 1
            return Found(index, "missing")
        decoded = decode(value, key, index, wanted)
        if decoded.reason:
            self._num_misses += 1
            self._rejected[decoded.reason] += 1
        else:
            self._num_hits += 1
        return Found(index, *decoded)

    def _measure(self, num_bytes: int, began_s: float, reader: _Reader) -> None:
        """Count each moment of a read once, and not what its first byte took to come."""
        now_s = self._now_s()
        self._num_bytes_read += num_bytes
        took_s = now_s - max(began_s, reader.last_reply_s)
        if not reader.last_reply_s:
            took_s -= min(self._redis.latency.value, took_s / 2)
        reader.last_reply_s = now_s
        if num_bytes:
            self._rate.observe(num_bytes, took_s, now_s)

    def _bytes_at_once(self) -> int:
        rate = self._throttle.bytes_per_s or self._rate.value
        most = self._settings.redis_batch_bytes
        return min(most, int(rate * BATCH_S)) if rate else FIRST_BATCH_BYTES

    async def _select(
        self, keys: Sequence[bytes], chosen: Collection[bytes], tenant: str | None
    ) -> list[bytes]:
        selected = [key for key in keys if storage_key_in(key) in chosen]
        if tenant is None or not keys:
            return selected
        end = b"%d" % (HEADER_BYTES_READ - 1)
        starts = await self._redis.write([(b"GETRANGE", key, b"0", end) for key in keys])
        pairs = zip(keys, starts, strict=True)
        return selected + [key for key, start in pairs if _tenant_of(start) == tenant]

    async def _delete(self, keys: Sequence[bytes]) -> int:
        if not keys:
            return 0
        replies = await self._redis.write([(b"UNLINK", key) for key in keys])
        return sum(reply for reply in replies if isinstance(reply, int))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


class _Reader:
    """One read of several batches."""

    last_reply_s = 0.0


def _batches(indices: Iterable[int], blocks_at_once: Callable[[], int]) -> Iterator[list[int]]:
    rest = iter(indices)
    while batch := list(islice(rest, max(1, blocks_at_once()))):
        yield batch


def _tenant_of(start: Any) -> str | None:
    record = decode_header(start) if isinstance(start, bytes) else None
    return record.tenant if record else None


def _open_link(settings: KvStoreSettings, address: RedisAddress, max_connections: int) -> Link:
    connect_timeout_s, timeout_s = settings.redis_connect_timeout_s, settings.redis_timeout_s
    if not settings.redis_cluster and settings.redis_connections == "multiplexed":
        return MultiplexedLink(address, connect_timeout_s=connect_timeout_s, timeout_s=timeout_s)
    link = ClusterLink if settings.redis_cluster else PoolLink
    return link(
        address,
        max_connections=max_connections,
        connect_timeout_s=connect_timeout_s,
        timeout_s=timeout_s,
    )
