"""Blocks of one prompt on their way from the KV store into the inbox."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from firsttoken.kvstore.v1 import kvstore_pb2
from services.core.kvblocks import Block
from services.runtime.tasks import end_tasks
from worker.copying import Copier, copy_blocks
from worker.deadline import Deadline
from worker.front import EngineFront
from worker.messages import StagedBlock
from worker.store_client import Store
from worker.stream import TokenStream

# Answers of the store that wait for room in the inbox, where they are places in memory
# and where they are bytes; more wait in the connection.
MAX_PLACES_AHEAD = 32
MAX_BYTES_AHEAD = 4
MAX_COPY_BLOCKS = 8
# How often to look whether the engine has computed what is still to come.
MEETING_INTERVAL_S = 0.01


class LoadFailed(Exception):
    """No more blocks come. Its text is the name of a counter."""


@dataclass(slots=True)
class LoadCounters:
    """`num_running`, `num_slots` and `num_slots_ahead` are 0 when nothing is loaded."""

    num_running: int = 0
    # Slots of the inbox in use, and slots filled for requests that still queue.
    num_slots: int = 0
    num_slots_ahead: int = 0
    num_blocks: int = 0
    num_blocks_from_l2: int = 0
    # Blocks that were not there any more or did not verify, and loads that ended early.
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class Chain(NamedTuple):
    """The blocks that a prompt can use, from its first: equally long."""

    storage_keys: Sequence[bytes]
    prefix_keys: Sequence[bytes]


class Until(NamedTuple):
    """When a read ends though more could come."""

    # The engine computes meanwhile, and may get there first.
    met: bool = False
    # The read has taken so long that it is to be thought over.
    overdue_s: float = math.inf


class Reading:
    """One read, to learn from how long it took."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        # Waiting for room says nothing of the tier.
        self.waited_s = 0.0
        self.num_blocks = 0
        self.num_from_l2 = 0
        # Until the first answer, and until the last block was staged.
        self.answered_s = 0.0
        self.staged_s = 0.0

    def answered(self) -> None:
        self.answered_s = self.answered_s or self.read_s

    def note(self, num_blocks: int, num_from_l2: int) -> None:
        self.num_blocks += num_blocks
        self.num_from_l2 += num_from_l2
        self.staged_s = self.read_s

    @property
    def read_s(self) -> float:
        """Until now."""
        return time.monotonic() - self._began_s - self.waited_s


class ChainReader:
    """Reads blocks of a chain in any order, and stages each as soon as it has verified."""

    def __init__(
        self,
        front: EngineFront,
        copier: Copier,
        counters: LoadCounters,
        store: Store,
        stream: TokenStream,
        chain: Chain,
        deadline: Deadline,
    ) -> None:
        self._front = front
        self._copier = copier
        self._counters = counters
        self._store = store
        self._stream = stream
        self._chain = chain
        self._deadline = deadline
        self._num_ahead = 0
        self.num_staged = 0
        self.staged_s = time.monotonic()

    def started(self) -> None:
        """The request queues no longer; or nothing more is read for it."""
        self._counters.num_slots_ahead -= self._num_ahead
        self._num_ahead = 0

    async def read(self, indices: Sequence[int], reading: Reading, until: Until) -> None:
        """Until all are staged, or nothing is to be waited for any more.

        Raises LoadFailed or AioRpcError where it ends before.
        """
        done = 0
        async with self._open(indices) as answers:
            while done < len(indices) and not self.met(indices[done]):
                batch = await self._take(answers, indices[done], reading, until)
                if not batch:
                    return
                reading.answered()
                slots = await self._acquire(len(batch), reading)
                answers.put_back(batch[len(slots) :])
                batch = batch[: len(slots)]
                await self._stage(batch, indices[done : done + len(slots)], slots, reading)
                done += len(slots)

    def met(self, index: int) -> bool:
        """The engine has computed into this block, or past it."""
        return self._stream.num_computed > index * self._front.info.block_tokens

    @contextlib.asynccontextmanager
    async def _open(self, indices: Sequence[int]) -> AsyncIterator[_Answers]:
        request = kvstore_pb2.GetRequest(
            chain=b"".join(self._chain.storage_keys[: max(indices) + 1]),
            indices=indices,
            mapped=self._store.arena is not None,
            fingerprint=self._front.info.fingerprint,
            num_bytes=self._front.info.block_bytes,
        )
        call = self._store.stub.Get(request)
        answers = _Answers(call, MAX_PLACES_AHEAD if request.mapped else MAX_BYTES_AHEAD)
        try:
            yield answers
        finally:
            call.cancel()
            await answers.close()

    async def _take(
        self, answers: _Answers, index: int, reading: Reading, until: Until
    ) -> list[kvstore_pb2.GetResponse]:
        """What has come; empty when it is not to be waited for any more."""
        while not self.met(index):
            left_s = until.overdue_s - reading.read_s
            if left_s <= 0:
                break
            if until.met:
                left_s = min(left_s, MEETING_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s if math.isfinite(left_s) else None):
                    return await answers.take()
        return []

    async def _acquire(self, count: int, reading: Reading) -> list[int]:
        began_s = time.monotonic()
        with self._deadline.paused():
            if self._queues:
                # Those that still queue leave room for those that run.
                room = self._front.inbox.num_slots // 2 - self._counters.num_slots_ahead
                if room > 0:
                    count = min(count, room)
                else:
                    await self._stream.started()
            slots = self._front.inbox.acquire_now(count)
            if not slots:
                # The engine takes what it has of this prompt, though more is to come.
                self._stream.stage([], flush=True)
                slots = await self._front.inbox.acquire(count)
        reading.waited_s += time.monotonic() - began_s
        self._counters.num_slots += len(slots)
        if self._queues:
            self._num_ahead += len(slots)
            self._counters.num_slots_ahead += len(slots)
        return slots

    @property
    def _queues(self) -> bool:
        return self._stream.num_cached_blocks is None

    async def _stage(
        self,
        batch: list[kvstore_pb2.GetResponse],
        indices: Sequence[int],
        slots: list[int],
        reading: Reading,
    ) -> None:
        expected = [self._expected(index) for index in indices]
        into = [self._front.arena.inbox[slot] for slot in slots]
        arena = self._store.arena
        reasons = await self._copier.run(
            lambda: copy_blocks(arena, batch, expected, into),
            on_failure=lambda: self._give_back(slots),
        )
        good = next((place for place, reason in enumerate(reasons) if reason), len(batch))
        reading.note(good, sum(found.from_l2 for found in batch[:good]))
        self._hand_over(indices[:good], slots[:good])
        self._counters.num_blocks_from_l2 += sum(found.from_l2 for found in batch[:good])
        if good < len(batch):
            self._give_back(slots[good:])
            self._counters.rejected[reasons[good]] += 1
            raise LoadFailed(reasons[good])

    def _expected(self, index: int) -> Block:
        info = self._front.info
        return Block(
            storage_key=self._chain.storage_keys[index],
            prefix_key=self._chain.prefix_keys[index],
            fingerprint=info.fingerprint,
            index=index,
            num_tokens=info.block_tokens,
            num_bytes=info.block_bytes,
        )

    def _hand_over(self, indices: Sequence[int], slots: list[int]) -> None:
        if not slots:
            return
        num_tokens = self._front.info.block_tokens
        pairs = zip(indices, slots, strict=True)
        self._stream.stage([StagedBlock(index, slot, num_tokens) for index, slot in pairs])
        self._counters.num_slots -= len(slots)
        self._counters.num_blocks += len(slots)
        self.num_staged += len(slots)
        self.staged_s = time.monotonic()

    def _give_back(self, slots: list[int]) -> None:
        self._front.inbox.release(slots)
        self._counters.num_slots -= len(slots)


class _Answers:
    """The answers of a Get, read ahead as far as `max_ahead`."""

    def __init__(self, call: Any, max_ahead: int) -> None:
        # After the answers, what ended the call.
        self._queue: asyncio.Queue[kvstore_pb2.GetResponse | Exception] = asyncio.Queue(max_ahead)
        self._ahead: deque[kvstore_pb2.GetResponse | Exception] = deque()
        self._reader = asyncio.create_task(self._read(call), name="read kv blocks")

    async def take(self) -> list[kvstore_pb2.GetResponse]:
        """What has come, at least one. Raises what ended the call."""
        if not self._ahead:
            self._ahead.append(await self._queue.get())
        while len(self._ahead) < MAX_COPY_BLOCKS and not self._queue.empty():
            self._ahead.append(self._queue.get_nowait())
        batch: list[kvstore_pb2.GetResponse] = []
        while self._ahead:
            found = self._ahead[0]
            if isinstance(found, Exception):
                if not batch:
                    raise found
                break
            batch.append(found)
            self._ahead.popleft()
        return batch

    def put_back(self, batch: list[kvstore_pb2.GetResponse]) -> None:
        self._ahead.extendleft(reversed(batch))

    async def close(self) -> None:
        await end_tasks([self._reader])

    async def _read(self, call: Any) -> None:
        ended: Exception = LoadFailed("incomplete")
        try:
            async for found in call:
                await self._queue.put(found)
        except grpc.aio.AioRpcError as error:
            ended = error
        await self._queue.put(ended)
