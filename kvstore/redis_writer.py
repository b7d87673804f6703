"""Writing behind: blocks wait in a bounded queue, and are dropped when Redis is slow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvstore.redis_breaker import Circuit, CircuitBreaker
from kvstore.redis_guard import GuardedRedis
from kvstore.redis_link import Command, RedisUnavailable
from kvstore.redis_queue import Write, WriteQueue
from kvstore.redis_record import encode, encode_header
from kvstore.tier2 import Record
from services.core.kvblocks import Buffer
from services.runtime.logs import event
from services.runtime.tasks import end_tasks

CLOSE_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class WriteBehind:
    """A Redis that refuses blocks, being full, read-only or not ours to write, is left
    alone for `retry_s`: then one block tries again.
    """

    def __init__(
        self,
        redis: GuardedRedis,
        *,
        queue_bytes: int,
        batch_bytes: int,
        ttl_s: float,
        retry_s: float,
    ) -> None:
        self._redis = redis
        self._queue = WriteQueue(queue_bytes)
        self._batch_bytes = batch_bytes
        self._expiry = (b"PX", b"%d" % round(ttl_s * 1000)) if ttl_s else ()
        self._clock = asyncio.get_running_loop().time
        self._acceptance = CircuitBreaker(open_s=retry_s)
        self._num_under_way = 0
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.num_bytes_written = 0
        self.num_dropped = 0

    @property
    def num_pending(self) -> int:
        return len(self._queue) + self._num_under_way

    async def __aenter__(self) -> WriteBehind:
        self._task = asyncio.create_task(self._run(), name="redis: write behind")
        return self

    async def __aexit__(self, *exception: object) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.flush()
        except TimeoutError:
            event(logger, logging.WARNING, "blocks left unwritten", num_blocks=self.num_pending)
        finally:
            await end_tasks([task])
            self.drop_waiting()

    def offer(self, key: bytes, record: Record, payload: Buffer) -> bool:
        """False: dropped and counted."""
        if key in self._queue:
            return True
        header = encode_header(record)
        if not self._queue.has_room(len(header) + len(payload)) or not self._accepts():
            self.num_dropped += 1
            return False
        self._queue.push(Write(key, encode(header, payload)))
        self._idle.clear()
        self._work.set()
        return True

    async def flush(self) -> None:
        await self._idle.wait()

    def drop_waiting(self) -> None:
        self.num_dropped += self._queue.clear()
        self._note_failed_trial()  # it may have been among them
        self._rest_if_done()

    def check_integrity(self) -> None:
        self._queue.check_integrity()
        assert self._idle.is_set() == (self.num_pending == 0)

    def _accepts(self) -> bool:
        if not self._redis.breaker.admit():
            return False
        return self._acceptance.begin_trial(self._clock()) or self._acceptance.admit()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            batch = self._queue.take(self._batch_bytes)
            self._num_under_way = len(batch)
            try:
                await self._write(batch)
            finally:
                self._num_under_way = 0
                self._rest_if_done()

    def _rest_if_done(self) -> None:
        if not self._queue:
            self._work.clear()
        if not self.num_pending:
            self._idle.set()

    async def _write(self, batch: Sequence[Write]) -> None:
        refusals = []
        num_written = 0
        try:
            replies = await self._redis.write([self._command(write) for write in batch])
            refusals = [reply for reply in replies if isinstance(reply, Exception)]
            num_written = len(batch) - len(refusals)
            self.num_bytes_written += sum(
                len(write.value)
                for write, reply in zip(batch, replies, strict=True)
                if not isinstance(reply, Exception)
            )
        except RedisUnavailable:
            self._note_failed_trial()
        finally:
            self.num_dropped += len(batch) - num_written
        if refusals:
            self._refused(str(refusals[0]))
        elif num_written:
            self._acceptance.trial_succeeded()

    def _note_failed_trial(self) -> None:
        if self._acceptance.state is Circuit.HALF_OPEN:
            self._acceptance.failed(self._clock())

    def _command(self, write: Write) -> Command:
        return (b"SET", write.key, write.value, *self._expiry)

    def _refused(self, reason: str) -> None:
        if self._acceptance.is_closed:
            event(logger, logging.WARNING, "Redis refuses blocks", reason=reason)
        self._acceptance.failed(self._clock())
        self.drop_waiting()
