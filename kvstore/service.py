"""KvStoreService: protobuf to plain values and back."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial

from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from kvstore.reader import MAX_SENT_BYTES, Given
from kvstore.store import KvStore, Selection
from kvstore.tier2 import Tier2Stats, Wanted
from kvstore.writer import Finished, NewBlock, Reservation, State, Writer
from services.core.errors import InvalidArgument
from services.core.keys import KEY_BYTES, join_keys, snapshot_parts, split_keys, storage_key
from services.core.kvblocks import CHECKSUM_BYTES, MAX_FINGERPRINT_BYTES, Block
from services.runtime.changes import KeysChange, KeysEvent
from services.runtime.interceptor import Context
from services.runtime.protocol import MAX_TENANT_CHARACTERS

# Of the time until a caller's deadline, which is what the blocks are worth to it.
L2_SHARE = 0.25
# In one message: nothing else runs while places are reserved.
MAX_HEADERS = 4096

_STATES = {
    State.RESERVED: kvstore_pb2.RESERVATION_STATE_RESERVED,
    State.PRESENT: kvstore_pb2.RESERVATION_STATE_PRESENT,
    State.REFUSED: kvstore_pb2.RESERVATION_STATE_REFUSED,
}


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    def __init__(self, store: KvStore) -> None:
        self._store = store

    async def Match(
        self, request: kvstore_pb2.MatchRequest, context: Context
    ) -> kvstore_pb2.MatchResponse:
        remaining_s = context.time_remaining()
        patience_s = math.inf if remaining_s is None else L2_SHARE * remaining_s
        matched = await self._store.match(_chain("chain", request.chain), patience_s=patience_s)
        below = self._tier2_stats()
        return kvstore_pb2.MatchResponse(
            num_l1=matched.num_l1,
            num_all=matched.num_all,
            l2_bytes_per_s=below.read_bytes_per_s,
            l2_latency_ms=below.read_latency_s * 1e3,
        )

    async def Get(
        self, request: kvstore_pb2.GetRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.GetResponse]:
        chain = _chain("chain", request.chain)
        _check_get(request, len(chain))
        wanted = Wanted(request.fingerprint, request.num_bytes)
        given = self._store.get(chain, request.indices, wanted, mapped=request.mapped)
        async with aclosing(given) as answers:
            async for each in answers:
                yield _given_to_proto(each)

    async def Put(
        self, requests: AsyncIterator[kvstore_pb2.PutRequest], context: Context
    ) -> AsyncIterator[kvstore_pb2.PutResponse]:
        with self._store.writing() as writer:
            async for request in requests:
                match request.WhichOneof("event"):
                    case "reserve":
                        yield _reserve(writer, request.reserve)
                    case "commit":
                        num_blocks = await writer.commit(_finished(request.commit))
                        committed = kvstore_pb2.Committed(num_blocks=num_blocks)
                        yield kvstore_pb2.PutResponse(committed=committed)
                    case _:
                        raise InvalidArgument.of("event", "must be reserve or commit")

    async def Watch(
        self, request: kvstore_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.WatchResponse]:
        with self._store.tier1.feed.follow() as follower:
            while (event := await follower.next()) is not None:
                for response in _event_to_proto(event):
                    yield response

    async def GetStats(
        self, request: kvstore_pb2.GetStatsRequest, context: Context
    ) -> kvstore_pb2.GetStatsResponse:
        store, tier1, below = self._store, self._store.tier1, self._tier2_stats()
        rejected = dict(tier1.counters.rejected)
        if store.tier2 is not None:
            rejected |= {f"l2_{reason}": n for reason, n in store.tier2.rejected.items()}
        by_tenant = tier1.counters.by_tenant(tier1.index.tenants())
        return kvstore_pb2.GetStatsResponse(
            l1=self._tier1_stats(),
            l2=_tier2_to_proto(below),
            tenants=[
                kvstore_pb2.TenantStats(tenant=tenant, **counts._asdict())
                for tenant, counts in by_tenant.items()
            ],
            rejected=rejected,
            l2_connected=store.tier2 is not None and store.tier2.connected,
            num_pending_writes=below.num_pending_writes,
            num_dropped_writes=below.num_dropped_writes,
            num_reserved=tier1.index.num_reserved,
        )

    async def Evict(
        self, request: kvstore_pb2.EvictRequest, context: Context
    ) -> kvstore_pb2.EvictResponse:
        selection = request.WhichOneof("selection")
        if selection is None or (selection == "all" and not request.all):
            return kvstore_pb2.EvictResponse()
        evicted = await self._store.evict(
            Selection(
                storage_keys=_keys("storage_keys", request.storage_keys),
                tenant=request.tenant if selection == "tenant" else None,
                everything=selection == "all",
            ),
            from_l1=not request.tiers or kvstore_pb2.TIER_L1 in request.tiers,
            from_l2=not request.tiers or kvstore_pb2.TIER_L2 in request.tiers,
        )
        return kvstore_pb2.EvictResponse(num_l1=evicted.num_l1, num_l2=evicted.num_l2)

    def _tier1_stats(self) -> kvstore_pb2.TierStats:
        tier1 = self._store.tier1
        counters, index, layout = tier1.counters, tier1.index, tier1.arena.layout
        return kvstore_pb2.TierStats(
            num_blocks=index.num_blocks,
            capacity_blocks=index.num_slots,
            bytes=index.num_blocks * layout.slot_bytes,
            num_hits=counters.num_hits,
            num_misses=counters.num_misses,
            bytes_read=counters.bytes_read,
            bytes_written=counters.bytes_written,
            num_evicted=counters.num_evicted,
        )

    def _tier2_stats(self) -> Tier2Stats:
        return self._store.tier2.stats if self._store.tier2 is not None else Tier2Stats()


def _reserve(writer: Writer, reserve: kvstore_pb2.Reserve) -> kvstore_pb2.PutResponse:
    chain = _chain("reserve.chain", reserve.chain)
    _check_headers(reserve, len(chain))
    new = [_new_block(header, chain) for header in reserve.headers]
    largest = max((each.block.num_bytes for each in new), default=0)
    if not reserve.mapped and largest > MAX_SENT_BYTES:
        raise InvalidArgument.of(
            "reserve.headers.num_bytes",
            f"must be at most {MAX_SENT_BYTES} where the arena is not mapped; got {largest}",
        )
    reservations = writer.reserve(new, chain)
    pairs = zip(new, reservations, strict=True)
    return kvstore_pb2.PutResponse(
        reserved=kvstore_pb2.Reserved(
            reservations=[_reservation_to_proto(each.block, made) for each, made in pairs]
        )
    )


def _check_headers(reserve: kvstore_pb2.Reserve, length: int) -> None:
    most = min(length, MAX_HEADERS)
    if len(reserve.headers) > most:  # before any work for each
        raise InvalidArgument.of(
            "reserve.headers",
            f"must be at most {most}, for a chain of {length}; got {len(reserve.headers)}",
        )
    if len({header.index for header in reserve.headers}) < len(reserve.headers):
        raise InvalidArgument.of("reserve.headers.index", "must not be there twice")


def _reservation_to_proto(block: Block, made: Reservation) -> kvstore_pb2.Reservation:
    place = None
    if made.place is not None:
        place = kvstore_pb2.Place(slot=made.place.slot, generation=made.place.generation)
    return kvstore_pb2.Reservation(
        storage_key=block.storage_key, state=_STATES[made.state], place=place
    )


def _new_block(header: kvstore_pb2.BlockHeader, chain: Sequence[bytes]) -> NewBlock:
    """A block says what it is, and cannot lie about its key: that is a hash of the rest."""
    if len(header.prefix_key) != KEY_BYTES:
        raise InvalidArgument.of(
            "reserve.headers.prefix_key", f"must be {KEY_BYTES} bytes; got {len(header.prefix_key)}"
        )
    _check_fingerprint("reserve.headers.fingerprint", header.fingerprint)
    if header.storage_key != storage_key(header.prefix_key, header.fingerprint):
        raise InvalidArgument.of(
            "reserve.headers.storage_key", "must be the hash of prefix_key and fingerprint"
        )
    if header.index >= len(chain) or chain[header.index] != header.storage_key:
        raise InvalidArgument.of(
            "reserve.headers.index", "must be the place of the storage key in the chain"
        )
    if not header.num_bytes or not header.num_tokens:
        raise InvalidArgument.of("reserve.headers", "num_bytes and num_tokens must be positive")
    if len(header.tenant) > MAX_TENANT_CHARACTERS:
        raise InvalidArgument.of(
            "reserve.headers.tenant", f"must be at most {MAX_TENANT_CHARACTERS} characters"
        )
    block = Block(
        storage_key=header.storage_key,
        prefix_key=header.prefix_key,
        fingerprint=header.fingerprint,
        index=header.index,
        num_tokens=header.num_tokens,
        num_bytes=header.num_bytes,
    )
    return NewBlock(block, header.tenant)


def _finished(commit: kvstore_pb2.Commit) -> list[Finished]:
    if any(len(block.checksum) != CHECKSUM_BYTES for block in commit.blocks):
        raise InvalidArgument.of("commit.blocks.checksum", f"must be {CHECKSUM_BYTES} bytes")
    return [
        Finished(block.storage_key, block.checksum, block.data or None) for block in commit.blocks
    ]


def _check_get(request: kvstore_pb2.GetRequest, length: int) -> None:
    if len(request.indices) > length:  # before any work for each
        raise InvalidArgument.of(
            "indices", f"must be at most {length}, the chain's length; got {len(request.indices)}"
        )
    indices = set(request.indices)
    if len(indices) < len(request.indices):
        raise InvalidArgument.of("indices", "must not have an index twice")
    if any(index >= length for index in indices):
        raise InvalidArgument.of("indices", f"must be below {length}, the chain's length")
    _check_fingerprint("fingerprint", request.fingerprint)
    if not request.num_bytes:
        raise InvalidArgument.of("num_bytes", "must be positive")
    if not request.mapped and request.num_bytes > MAX_SENT_BYTES:
        raise InvalidArgument.of(
            "num_bytes", f"must be at most {MAX_SENT_BYTES} where the arena is not mapped"
        )


def _check_fingerprint(field: str, fingerprint: bytes) -> None:
    if not 1 <= len(fingerprint) <= MAX_FINGERPRINT_BYTES:
        raise InvalidArgument.of(field, f"must be 1 to {MAX_FINGERPRINT_BYTES} bytes")


def _chain(field: str, joined: bytes) -> list[bytes]:
    """Keys of a chain's blocks, each another: longer prefixes have other keys."""
    keys = _keys(field, joined)
    if len(set(keys)) < len(keys):
        raise InvalidArgument.of(field, "must not have a key twice")
    return keys


def _keys(field: str, joined: bytes) -> list[bytes]:
    try:
        return split_keys(joined)
    except ValueError as error:
        raise InvalidArgument.of(field, str(error)) from None


def _given_to_proto(given: Given) -> kvstore_pb2.GetResponse:
    if given.record is None:
        return kvstore_pb2.GetResponse(index=given.chain_index)
    block, tenant, checksum = given.record
    response = kvstore_pb2.GetResponse(
        index=given.chain_index,
        header=kvstore_pb2.BlockHeader(
            storage_key=block.storage_key,
            prefix_key=block.prefix_key,
            fingerprint=block.fingerprint,
            index=block.index,
            num_tokens=block.num_tokens,
            num_bytes=block.num_bytes,
            checksum=checksum,
            tenant=tenant,
        ),
        from_l2=given.from_l2,
    )
    if given.place is not None:
        response.mapped.slot = given.place.slot
        response.mapped.generation = given.place.generation
    elif given.data is not None:
        response.data = given.data
    return response


def _event_to_proto(event: KeysEvent) -> Iterator[kvstore_pb2.WatchResponse]:
    make = partial(
        kvstore_pb2.WatchResponse, sequence=event.sequence, incarnation=event.incarnation
    )
    if not isinstance(event, KeysChange):
        for number, keys in enumerate(snapshot_parts(event.keys)):
            yield make(snapshot=keys, continues=number > 0)
    elif event.added:
        yield make(stored=join_keys(event.keys))
    else:
        yield make(evicted=join_keys(event.keys))


def _tier2_to_proto(stats: Tier2Stats) -> kvstore_pb2.TierStats:
    return kvstore_pb2.TierStats(
        num_blocks=stats.num_blocks,
        capacity_blocks=stats.capacity_blocks,
        bytes=stats.num_bytes,
        num_hits=stats.num_hits,
        num_misses=stats.num_misses,
        bytes_read=stats.bytes_read,
        bytes_written=stats.bytes_written,
        num_evicted=stats.num_evicted,
        read_bytes_per_s=stats.read_bytes_per_s,
    )
