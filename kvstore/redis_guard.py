"""Redis behind a circuit breaker: a request waits for one that hangs once, and no more.

While the circuit is open nobody's request tries whether Redis is back: a task of ours
does. It also looks, every few seconds, at how full Redis is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from kvstore.redis_breaker import Circuit, CircuitBreaker
from kvstore.redis_link import Command, Link, RedisUnavailable
from kvstore.redis_rates import MovingRatio
from kvstore.redis_record import KEY_PREFIX
from services.runtime.logs import event
from services.runtime.tasks import end_tasks

LOOK_INTERVAL_S = 5.0
_TRIAL_KEY = KEY_PREFIX + b"{trial}:"

logger = logging.getLogger(__name__)


class Fullness(NamedTuple):
    """Of all primaries together, at the last look."""

    num_keys: int = 0
    num_bytes: int = 0
    # 0: unlimited.
    max_bytes: int = 0
    num_evicted: int = 0


class GuardedRedis:
    """Reads and writes have a connection or pool each: no block waits behind a write."""

    def __init__(self, reads: Link, writes: Link, *, place: str, retry_s: float) -> None:
        self._reads = reads
        self._writes = writes
        self._place = place
        self._clock = asyncio.get_running_loop().time
        self.breaker = CircuitBreaker(open_s=retry_s, state=Circuit.OPEN)
        self.fullness = Fullness()
        # Seconds until it answers something small; looking at it keeps that fresh.
        self.latency = MovingRatio(half_life_weight=16.0)
        self.on_open: Callable[[], None] = lambda: None
        self._opened = asyncio.Event()
        self._reported: bool | None = None
        self._policies: set[str] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GuardedRedis:
        """Redis has been tried; it need not be there."""
        try:
            await self._try()
        except BaseException:
            await self._close_links()
            raise
        self._keeper = asyncio.create_task(self._keep(), name="redis: keep")
        return self

    async def __aexit__(self, *exception: object) -> None:
        keeper, self._keeper = self._keeper, None
        await end_tasks([keeper] if keeper else [])
        await self._close_links()

    async def _close_links(self) -> None:
        await self._reads.close()
        await self._writes.close()

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        """Raises RedisUnavailable, for an error reply too: reads have no other reason."""
        replies = await self._call(self._reads, commands)
        refusals = [reply for reply in replies if isinstance(reply, Exception)]
        if refusals:
            self._failed(str(refusals[0]))
            raise RedisUnavailable(str(refusals[0]))
        return replies

    async def write(self, commands: Sequence[Command]) -> list[Any]:
        """Error replies are exceptions in their places. Raises RedisUnavailable."""
        return await self._call(self._writes, commands)

    async def scan(self, pattern: bytes) -> AsyncGenerator[list[bytes], None]:
        self._admit()
        async for keys in self._writes.scan(pattern):
            yield keys

    async def _call(self, link: Link, commands: Sequence[Command]) -> list[Any]:
        self._admit()
        try:
            return await link.call(commands)
        except RedisUnavailable as error:
            self._failed(str(error))
            raise

    def _admit(self) -> None:
        if not self.breaker.admit():
            raise RedisUnavailable("the circuit is open")

    async def _keep(self) -> None:
        while True:
            if self.breaker.is_closed:
                await self._look()
                await self._wait_for_opening(LOOK_INTERVAL_S)
            else:
                await asyncio.sleep(self.breaker.trial_due_in_s(self._clock()))
                await self._try()

    async def _wait_for_opening(self, timeout_s: float) -> None:
        # Not asyncio.wait_for, which may drop a cancellation.
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
        except TimeoutError:
            return

    async def _try(self) -> None:
        """What any read does, so that whatever would fail it fails the trial."""
        if not self.breaker.begin_trial(self._clock()):
            return
        try:
            await self._reads.check((b"MGET", _TRIAL_KEY))
        except RedisUnavailable as error:
            self._failed(str(error))
        else:
            self._succeeded()

    async def _look(self) -> None:
        began_s = self._clock()
        try:
            primaries = await self._reads.info()
        except RedisUnavailable as error:
            self._failed(str(error))
            return
        now_s = self._clock()
        self.latency.observe(now_s - began_s, 1, now_s)
        self.fullness = Fullness(
            num_keys=sum(map(_num_keys, primaries)),
            num_bytes=_sum(primaries, "used_memory"),
            max_bytes=_sum(primaries, "maxmemory"),
            num_evicted=_sum(primaries, "evicted_keys"),
        )
        policies = {each["maxmemory_policy"] for each in primaries if "maxmemory_policy" in each}
        if "noeviction" in policies - self._policies:
            event(
                logger,
                logging.WARNING,
                "Redis will refuse blocks when it is full: its maxmemory-policy is noeviction,"
                " allkeys-lru would make room",
                redis=self._place,
            )
        self._policies = policies

    def _succeeded(self) -> None:
        self.breaker.trial_succeeded()
        self._opened.clear()
        if self._changed(True):
            event(logger, logging.INFO, "Redis answers", redis=self._place)

    def _failed(self, reason: str) -> None:
        self.breaker.failed(self._clock())
        self._opened.set()
        if self._changed(False):
            event(
                logger,
                logging.WARNING,
                "Redis does not answer: going on without L2",
                redis=self._place,
                reason=reason,
            )
            self.on_open()

    def _changed(self, answers: bool) -> bool:
        changed = answers is not self._reported
        self._reported = answers
        return changed


def _num_keys(info: dict[str, str]) -> int:
    databases = (value for name, value in info.items() if name[:2] == "db" and "keys=" in value)
    return sum(int(value.partition("keys=")[2].partition(",")[0]) for value in databases)


def _sum(primaries: list[dict[str, str]], name: str) -> int:
    return sum(int(info.get(name, 0)) for info in primaries)
