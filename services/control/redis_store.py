"""The configuration in Redis (or Valkey), for several control replicas.

A configuration that Redis already holds wins over the file a replica was started
with: the file only gives the first generation. Replicas learn of changes by
pub/sub, and, since pub/sub may lose messages, look again every second.

Each replica writes who has joined it under a key that expires: members of a
replica that was killed are gone from the others' lists after MEMBERS_TTL_S, unless
they have come back through another replica before.

While Redis does not answer, a replica goes on with what it knows and refuses
changes. A Redis that has lost its data is given the configuration again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from types import TracebackType

from google.protobuf.message import DecodeError

from services.control.redis_records import (
    CONFIG_KEY,
    FAILURES,
    RedisRecords,
    StoredConfig,
)
from services.control.state import FIRST_GENERATION, Members
from services.control.store import Listener, changed_meanwhile
from services.core.config import Snapshot, from_json, to_json
from services.core.errors import InvalidArgument, Unavailable
from services.core.redis_url import without_password
from services.core.settings import MeshConfig
from services.core.tickets import SECRET_BYTES
from services.runtime.logs import event
from services.runtime.startup import StartupError
from services.runtime.tasks import end_tasks

CHECK_INTERVAL_S = 1.0
MEMBERS_TTL_S = 5.0
START_TIMEOUT_S = 5.0
RETRY_DELAY_S = 0.2

logger = logging.getLogger(__name__)


class RedisStore:
    """See Store. Entering raises StartupError when Redis cannot be reached."""

    def __init__(self, url: str, config: MeshConfig) -> None:
        self._place = without_password(url)
        try:
            self._records = RedisRecords(
                url, replica_id=secrets.token_hex(8), members_ttl_s=MEMBERS_TTL_S
            )
        except ValueError:  # which may show a password
            raise StartupError(
                f"control.redis_url: {self._place}: host or port cannot be read"
            ) from None
        self._stored = StoredConfig(FIRST_GENERATION, to_json(config))
        self._snapshot = Snapshot(FIRST_GENERATION, config)
        self._listener: Listener | None = None
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._members: Members = ()
        self._announced: Members = self._members
        self._answers = True
        # Reads and writes in one order: no older answer overtakes a newer one.
        self._lock = asyncio.Lock()
        self._look_again = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RedisStore:
        try:
            await self._begin()
        except BaseException:
            await self._records.close()
            raise
        self._tasks = [
            asyncio.create_task(self._keep_in_step(), name="redis store: keep in step"),
            asyncio.create_task(self._follow_changes(), name="redis store: follow changes"),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks, self._tasks = self._tasks, []
        await end_tasks(tasks)
        if tasks:
            with contextlib.suppress(*FAILURES):
                await self._records.withdraw()
        await self._records.close()

    def subscribe(self, listener: Listener) -> Snapshot:
        self._listener = listener
        return self._snapshot

    def share_members(self, members: Members) -> None:
        self._members = members
        self._look_again.set()

    async def latest(self) -> Snapshot:
        async with self._lock:
            with self._refusing_changes():
                self._adopt(await self._records.ensure_config(self._stored))
            return self._snapshot

    async def replace(self, old: Snapshot, config: MeshConfig) -> Snapshot:
        new = StoredConfig(old.generation + 1, to_json(config))
        async with self._lock:
            with self._refusing_changes():
                replaced = await self._records.replace_config(old.generation, new)
            if not replaced:
                raise changed_meanwhile()
            self._adopt(new)
            return self._snapshot

    async def _begin(self) -> None:
        stored = await self._first_answer()
        try:
            self._snapshot = Snapshot(stored.generation, from_json(stored.config_json))
        except (InvalidArgument, ValueError) as error:
            raise StartupError(
                f"the configuration in Redis at {self._place} (key {CONFIG_KEY}, generation"
                f" {stored.generation}) is not valid for this version: {error}"
            ) from error
        self._stored = stored

    async def _first_answer(self) -> StoredConfig:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.secret = await self._records.ensure_secret(self.secret)
                return await self._records.ensure_config(self._stored)
            except FAILURES as error:
                if time.monotonic() > deadline_s:
                    raise StartupError(
                        f"control.redis_url: no Redis answers at {self._place}"
                        f" (tried for {START_TIMEOUT_S:g} s): {error}"
                    ) from error
            await asyncio.sleep(RETRY_DELAY_S)

    async def _keep_in_step(self) -> None:
        while True:
            self._look_again.clear()
            try:
                async with self._lock:
                    await self._exchange()
            except FAILURES as error:
                self._note_silence(error)
            except DecodeError:
                logger.exception("another replica's members are unreadable")
            else:
                self._note_answer()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._look_again.wait()

    async def _exchange(self) -> None:
        members = self._members
        await self._records.share_members(members, announce=members is not self._announced)
        self._announced = members
        self._adopt(await self._records.ensure_config(self._stored))
        self.secret = await self._records.ensure_secret(self.secret)
        elsewhere = await self._records.members_elsewhere()
        if self._listener is not None:
            self._listener.joined_elsewhere(elsewhere)

    async def _follow_changes(self) -> None:
        while True:
            with contextlib.suppress(*FAILURES):
                async for _ in self._records.changes():
                    self._look_again.set()
            await asyncio.sleep(RETRY_DELAY_S)

    def _adopt(self, stored: StoredConfig) -> None:
        """Redis has the last word, even about a lower generation."""
        if stored == self._stored:
            return
        try:
            self._snapshot = Snapshot(stored.generation, from_json(stored.config_json))
        except (InvalidArgument, ValueError) as error:
            reason = str(error)
            event(logger, logging.ERROR, "the configuration in Redis is not valid", reason=reason)
            return
        self._stored = stored
        if self._listener is not None:
            self._listener.configured(self._snapshot)

    @contextlib.contextmanager
    def _refusing_changes(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            self._note_silence(error)
            raise Unavailable(
                f"the configuration cannot be changed while Redis at {self._place} does not"
                f" answer ({error}); the mesh goes on with generation {self._snapshot.generation}",
                reason="STORE_UNAVAILABLE",
                retry_delay_s=CHECK_INTERVAL_S,
            ) from error

    def _note_silence(self, error: BaseException) -> None:
        if self._answers:
            self._answers = False
            reason = str(error) or type(error).__name__
            event(
                logger,
                logging.WARNING,
                "Redis does not answer: going on with what is known",
                redis=self._place,
                reason=reason,
            )

    def _note_answer(self) -> None:
        if not self._answers:
            self._answers = True
            event(logger, logging.INFO, "Redis answers again", redis=self._place)
