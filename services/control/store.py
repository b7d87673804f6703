"""Where the configuration is kept."""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Protocol

from services.control.state import Members, first_snapshot
from services.core.config import Snapshot
from services.core.errors import Conflict
from services.core.settings import MeshConfig
from services.core.tickets import SECRET_BYTES


class Listener(Protocol):
    """Told on the event loop whatever the store learns, in order."""

    def configured(self, snapshot: Snapshot) -> None: ...

    def joined_elsewhere(self, members: Members) -> None: ...


class Store(Protocol):
    """An async context manager. Entered, it knows a configuration."""

    async def __aenter__(self) -> Store: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def subscribe(self, listener: Listener) -> Snapshot:
        """The configuration now; from here on `listener` is told."""
        ...

    async def latest(self) -> Snapshot:
        """Raises Unavailable when nobody can say."""
        ...

    async def replace(self, old: Snapshot, config: MeshConfig) -> Snapshot:
        """Make `config` the generation after `old`; the listener is told before this returns.

        Raises Conflict when `old` is no longer the latest, Unavailable when the
        store does not answer: whether it was replaced, the listener learns later.
        """
        ...

    def share_members(self, members: Members) -> None:
        """Let other replicas know who has joined this one."""
        ...

    @property
    def secret(self) -> bytes:
        """From which all replicas derive the keys that sign tickets. Known once entered."""
        ...


class MemoryStore:
    """For one control process: a restart begins again at generation 1 from its file."""

    def __init__(self, config: MeshConfig) -> None:
        self._snapshot = first_snapshot(config)
        self._listener: Listener | None = None
        self.secret = secrets.token_bytes(SECRET_BYTES)

    async def __aenter__(self) -> MemoryStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def subscribe(self, listener: Listener) -> Snapshot:
        self._listener = listener
        return self._snapshot

    async def latest(self) -> Snapshot:
        return self._snapshot

    async def replace(self, old: Snapshot, config: MeshConfig) -> Snapshot:
        if old.generation != self._snapshot.generation:
            raise changed_meanwhile()
        self._snapshot = Snapshot(old.generation + 1, config)
        if self._listener is not None:
            self._listener.configured(self._snapshot)
        return self._snapshot

    def share_members(self, members: Members) -> None:
        pass


def changed_meanwhile() -> Conflict:
    return Conflict(
        "the configuration was changed by somebody else at the same time: read it again",
        reason="GENERATION_CHANGED",
    )
