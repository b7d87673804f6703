"""What the store asks of the tier below node memory."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from services.core.kvblocks import Block, Buffer, Bytes

# Blocks of a chain that share a shard. Not the whole chain: real traffic shares its first
# block, and would all land on one.
GROUP_BLOCKS = 16


class Record(NamedTuple):
    """What lies in the second tier beside a block's bytes."""

    block: Block
    tenant: str
    # XXH3-128 of the bytes, as the writer gave it.
    checksum: bytes


class Wanted(NamedTuple):
    """What the reader of a chain expects of each of its blocks."""

    fingerprint: bytes
    num_bytes: int


class Found(NamedTuple):
    """An answer to a read: a verified block, or the reason why there is none.

    Reasons: "" for none, "missing" when it is not there, "unavailable" when that cannot be
    known, else what did not verify, as counted in `Tier2.rejected`.
    """

    # Its place in the chain.
    chain_index: int
    reason: str
    record: Record | None = None
    payload: Bytes | None = None


class Tier2Stats(NamedTuple):
    """Counted since the start. Rates are moving means of late reads; 0: none yet."""

    num_blocks: int = 0
    capacity_blocks: int = 0
    num_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    num_evicted: int = 0
    read_bytes_per_s: float = 0.0
    # Until the first byte of a read, in seconds.
    read_latency_s: float = 0.0
    num_pending_writes: int = 0
    num_dropped_writes: int = 0


class Tier2(Protocol):
    """Blocks that outlive this process. An async context manager.

    `chain`: the storage keys from the chain's start. A failure of the tier is never an
    exception: what cannot be read is not there, what cannot be written is dropped and
    counted. Only a cancellation passes through.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def connected(self) -> bool:
        """False while its circuit is open."""
        ...

    @property
    def stats(self) -> Tier2Stats: ...

    @property
    def rejected(self) -> Mapping[str, int]:
        """Blocks that did not verify, by reason."""
        ...

    def get_many(
        self, chain: Sequence[bytes], indices: Sequence[int], wanted: Wanted
    ) -> AsyncGenerator[Found, None]:
        """One answer for each index, in this order, as soon as it has come.

        What is given has been verified: key, fingerprint, index, size, checksum. Closing
        the iterator (aclosing) stops the read.
        """
        ...

    async def exists_many(
        self, chain: Sequence[bytes], start: int, *, patience_s: float = math.inf
    ) -> int:
        """How many blocks of the chain are here from `start` on without a gap.

        0 when that cannot be known within `patience_s`; at once, when it never is lately.
        """
        ...

    def put_nowait(self, chain: Sequence[bytes], record: Record, payload: Buffer) -> bool:
        """Write it soon. False: the queue was full, it is dropped and counted.

        `chain` goes up to this block at least; the block's `index` is its place in it.
        `payload` may change as soon as this returns.
        """
        ...

    async def evict(
        self,
        *,
        storage_keys: Sequence[bytes] = (),
        tenant: str | None = None,
        everything: bool = False,
    ) -> int:
        """Drop blocks of this mesh; how many were dropped.

        `storage_keys` come without their chain: they are looked for wherever they may be.
        """
        ...

    async def flush(self) -> None:
        """Wait until nothing is pending: written, or dropped."""
        ...
