"""A served KV store, and a client that has its memory mapped."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from firsttoken.kvstore.v1 import kvstore_pb2_grpc
from kvstore.memory_tier import MemoryTier
from kvstore.redis_tier import RedisTier
from kvstore.service import KvStoreServicer
from kvstore.store import KvStore
from services.core.kvblocks import HEADER_BYTES, Bytes
from services.core.settings import KvStoreSettings
from services.runtime.server import MeshServer
from services.runtime.sharing import MemoryServer, open_shared
from tests.kvstore.blocks import NUM_BYTES, Client, as_arena, client_of, nothing_reserved


class Running(NamedTuple):
    store: KvStore
    client: Client
    # As a worker on this host has mapped it.
    arena: Bytes


@contextlib.asynccontextmanager
async def running(
    *,
    num_slots: int = 40,
    policy: str = "lru",
    share: float = 1.0,
    redis: KvStoreSettings | None = None,
) -> AsyncIterator[Running]:
    """A real server; what it holds is checked when all calls have ended."""
    capacity_bytes = num_slots * (HEADER_BYTES + -(-NUM_BYTES // 64) * 64)
    tier1 = MemoryTier(capacity_bytes=capacity_bytes, policy=policy, max_tenant_share=share)
    async with KvStore(tier1, RedisTier(redis) if redis else None) as store:
        server = MeshServer("127.0.0.1:0", service_names=[])
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(KvStoreServicer(store), server.server)
        async with server, MemoryServer(tier1.arena.fd) as memory:
            mapped = await open_shared(memory.name)
            async with client_of(server.address) as client:
                yield Running(store, client, as_arena(mapped.array))
                await nothing_reserved(client)
                tier1.feed.close()
            mapped.close()
        store.check_integrity()
