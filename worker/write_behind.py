"""Blocks that entered the worker's pool, written to the KV store behind the requests.

The pool goes on living meanwhile: a block whose place was overwritten before its copy
was complete is dropped, like every block that there is no room or no store for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np

from firsttoken.kvstore.v1 import kvstore_pb2
from services.core.keys import storage_key
from services.core.kvblocks import Bytes, checksum, payload, read_generation
from services.runtime.logs import event
from worker.chains import Chains
from worker.copying import Copier
from worker.front import EngineFront
from worker.messages import StoredBlock
from worker.recent_writes import RecentWrites
from worker.store_client import Store, StoreClient

MAX_BATCH_BLOCKS = 16
MAX_BATCH_BYTES = 8 << 20
ANSWER_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 0.2
# Blocks known to be in the store already, at most.
MAX_PRESENT = 1 << 16

logger = logging.getLogger(__name__)


class WriteCounters:
    """Blocks. `num_writing` is 0 when nothing waits and nothing is written."""

    def __init__(self) -> None:
        self.num_stored = 0
        self.num_present = 0
        self.num_writing = 0
        self.dropped: Counter[str] = Counter()


class _Batch(NamedTuple):
    """Consecutive blocks of one chain. `chain`: storage keys up to the last of them."""

    blocks: list[StoredBlock]
    chain: list[bytes]
    tenant: str

    @property
    def storage_keys(self) -> list[bytes]:
        return self.chain[-len(self.blocks) :]


class WriteBehind:
    """`run` it as a task; `offer` is what the front calls."""

    def __init__(
        self, front: EngineFront, client: StoreClient, copier: Copier, chains: Chains
    ) -> None:
        self.counters = WriteCounters()
        self.recent = RecentWrites()
        self._front = front
        self._client = client
        self._copier = copier
        self._chains = chains
        self._waiting: deque[StoredBlock] = deque()
        self._max_waiting = 0
        # Of this store, blocks that need not be written.
        self._present: OrderedDict[bytes, None] = OrderedDict()
        self._awake = asyncio.Event()
        client.on_change(self._awake.set)

    def configure(self, *, max_waiting: int) -> None:
        self._max_waiting = max_waiting

    def offer(self, blocks: Sequence[StoredBlock]) -> None:
        for block in blocks:
            self._chains.append(block.prefix_key, block.previous_key)
            if self._client.store is None and not self._client.hangs:
                self._drop("no store", 1)
            elif len(self._waiting) >= self._max_waiting:
                self._drop("queue full", 1)
            else:
                self._waiting.append(block)
                self.counters.num_writing += 1
        self._awake.set()

    def _note_present(self, storage_keys: Iterable[bytes]) -> None:
        for key in storage_keys:
            self._present[key] = None
        while len(self._present) > MAX_PRESENT:
            self._present.popitem(last=False)

    async def run(self) -> None:
        while True:
            await self._something_to_write()
            store = self._client.store
            if store is not None:
                await self._write_while_it_answers(store)
            elif not self._client.hangs:
                self._abandon()
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _something_to_write(self) -> None:
        while not self._waiting:
            self._awake.clear()
            await self._awake.wait()

    async def _write_while_it_answers(self, store: Store) -> None:
        self._present.clear()
        try:
            with store.use():
                await self._write_to(store)
        except TimeoutError:
            self._client.suspect(store)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, EOFError) as error:
            event(logger, logging.INFO, "kv store takes no blocks", reason=repr(error))
            self._client.suspect(store)

    def _abandon(self) -> None:
        self.counters.num_writing -= len(self._waiting)
        self._drop("no store", len(self._waiting))
        self._waiting.clear()

    def _drop(self, reason: str, count: int) -> None:
        if count:
            self.counters.dropped[reason] += count

    async def _write_to(self, store: Store) -> None:
        """Through one call, for as long as it is good."""
        call = store.stub.Put()
        try:
            while store is self._client.store:
                if not self._waiting:
                    self._awake.clear()
                    await self._awake.wait()
                    continue
                batch = self._next_batch()
                if batch is not None and not await self._write(store, call, batch):
                    return
        finally:
            call.cancel()

    def _next_batch(self) -> _Batch | None:
        """The next blocks that follow each other; None when the first is of no use."""
        most = max(1, min(MAX_BATCH_BLOCKS, MAX_BATCH_BYTES // self._front.info.block_bytes))
        blocks = [self._waiting.popleft()]
        while (
            self._waiting
            and len(blocks) < most
            and self._waiting[0].previous_key == blocks[-1].prefix_key
        ):
            blocks.append(self._waiting.popleft())
        chain = self._chains.find(blocks[-1].prefix_key)
        if chain is None or len(chain.prefix_keys) != blocks[-1].block_index + 1:
            self.counters.num_writing -= len(blocks)
            self._drop("chain unknown", len(blocks))
            return None
        fingerprint = self._front.info.fingerprint
        keys = [storage_key(key, fingerprint) for key in chain.prefix_keys]
        return _Batch(blocks, keys, chain.tenant)

    async def _write(self, store: Store, call: Any, batch: _Batch) -> bool:
        """False when the call must not be used again."""
        num_settled, write = 0, None
        try:
            if self._present.keys() >= set(batch.storage_keys):
                num_settled = len(batch.blocks)
                self.counters.num_present += num_settled
                return True
            write = self.recent.begin(batch.blocks, time.monotonic())
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reservations = await self._reserve(store, call, batch)
                num_settled = self._settle(reservations)
                copied = await self._copy_all(store, batch, reservations)
                num_overwritten = len(batch.blocks) - num_settled - len(copied)
                self._drop("overwritten", num_overwritten)
                num_settled += num_overwritten
                await self._commit(call, copied)
                num_settled += len(copied)
            # What is reserved and not committed is free again when the call ends.
            return not num_overwritten
        finally:
            if write is not None:
                write.ended_s = time.monotonic()
            self.counters.num_writing -= len(batch.blocks)
            self._drop("failed", len(batch.blocks) - num_settled)

    async def _reserve(
        self, store: Store, call: Any, batch: _Batch
    ) -> Sequence[kvstore_pb2.Reservation]:
        info = self._front.info
        pairs = zip(batch.blocks, batch.storage_keys, strict=True)
        headers = [
            kvstore_pb2.BlockHeader(
                storage_key=key,
                prefix_key=block.prefix_key,
                fingerprint=info.fingerprint,
                index=block.block_index,
                num_tokens=info.block_tokens,
                num_bytes=info.block_bytes,
                tenant=batch.tenant,
            )
            for block, key in pairs
        ]
        reserve = kvstore_pb2.Reserve(
            headers=headers, chain=b"".join(batch.chain), mapped=store.arena is not None
        )
        await call.write(kvstore_pb2.PutRequest(reserve=reserve))
        reservations = (await _read(call)).reserved.reservations
        if len(reservations) != len(headers):
            raise EOFError("the KV store answered for other blocks")
        return list(reservations)

    def _settle(self, reservations: Sequence[kvstore_pb2.Reservation]) -> int:
        """Count those that are not to be written."""
        states = Counter(reservation.state for reservation in reservations)
        num_present = states[kvstore_pb2.RESERVATION_STATE_PRESENT]
        num_refused = states[kvstore_pb2.RESERVATION_STATE_REFUSED]
        self.counters.num_present += num_present
        self._drop("refused", num_refused)
        self._note_present(
            reservation.storage_key
            for reservation in reservations
            if reservation.state == kvstore_pb2.RESERVATION_STATE_PRESENT
        )
        return num_present + num_refused

    async def _copy_all(
        self, store: Store, batch: _Batch, reservations: Sequence[kvstore_pb2.Reservation]
    ) -> list[kvstore_pb2.CommittedBlock]:
        reserved = [
            (block, reservation)
            for block, reservation in zip(batch.blocks, reservations, strict=True)
            if reservation.state == kvstore_pb2.RESERVATION_STATE_RESERVED
        ]
        copies = await self._copier.run(
            lambda: [self._copy(store.arena, *pair) for pair in reserved],
            on_failure=lambda: None,
        )
        return [copy for copy in copies if copy is not None]

    def _copy(
        self, into: Bytes | None, block: StoredBlock, reservation: kvstore_pb2.Reservation
    ) -> kvstore_pb2.CommittedBlock | None:
        """None when its place in the pool now holds another. Runs in a thread."""
        arena = self._front.arena
        source = arena.pool[block.place]
        if int(arena.generations[block.place]) != block.generation:
            return None
        committed = kvstore_pb2.CommittedBlock(storage_key=reservation.storage_key)
        if into is None:
            committed.data = source.tobytes()
            committed.checksum = checksum(committed.data)
        else:
            place = reservation.place
            if read_generation(into, place.slot) != place.generation:
                return None  # the store has given it to somebody else
            copied = payload(into, place.slot, len(source))
            np.copyto(copied, source)
            committed.checksum = checksum(copied)
        still_there = int(arena.generations[block.place]) == block.generation
        return committed if still_there else None

    async def _commit(self, call: Any, blocks: list[kvstore_pb2.CommittedBlock]) -> None:
        if not blocks:
            return
        await call.write(kvstore_pb2.PutRequest(commit=kvstore_pb2.Commit(blocks=blocks)))
        num_stored = (await _read(call)).committed.num_blocks
        self.counters.num_stored += num_stored
        self._drop("not committed", len(blocks) - num_stored)
        self._note_present(block.storage_key for block in blocks)


async def _read(call: Any) -> kvstore_pb2.PutResponse:
    """Raises EOFError when the call has ended."""
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise EOFError("the KV store ended the call")
    response: kvstore_pb2.PutResponse = answer
    return response
