"""The state of one control replica, and who is to be told when it changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping

from firsttoken.control.v1 import control_pb2
from services.control.state import Members, MeshState, changed_config
from services.control.store import Store
from services.core.config import Snapshot, to_json
from services.core.errors import Conflict
from services.core.tickets import KeyRing, derive_ring
from services.runtime import logs
from services.runtime.logs import event
from services.runtime.tickets import ring_to_proto

# Between two pushes to one member: a burst of changes becomes one push.
PUSH_INTERVAL_S = 0.01
MAX_CHANGE_ATTEMPTS = 16
# Who signs tickets, and who verifies them.
_TICKET_ROLES = (control_pb2.MEMBER_ROLE_ROUTER, control_pb2.MEMBER_ROLE_WORKER)

logger = logging.getLogger(__name__)


class Hub:
    """Keeps the latest state only: a consumer that is slow skips what it missed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._session_ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._closed = False
        self._changing = asyncio.Lock()
        self._state = MeshState(snapshot=store.subscribe(self))
        self._configuration = configuration_of(self._state.snapshot)
        self._membership = control_pb2.Membership()
        self._ticket_keys = control_pb2.TicketKeys()
        self._ring = KeyRing()
        logs.follow_level(self._state.snapshot.config.telemetry.log_level)

    @property
    def state(self) -> MeshState:
        return self._state

    @property
    def configuration(self) -> control_pb2.Configuration:
        return self._configuration

    @property
    def membership(self) -> control_pb2.Membership:
        return self._membership

    @property
    def ticket_keys(self) -> control_pb2.TicketKeys:
        return self._ticket_keys

    def renew_ticket_keys(self, now_s: float) -> None:
        """`now_s`: Unix time. To be called often: it changes little."""
        lifetime_s = self._state.snapshot.config.control.ticket_key_lifetime_s
        ring = derive_ring(self._store.secret, now_s, lifetime_s)
        if ring != self._ring:
            self._ring = ring
            self._ticket_keys = ring_to_proto(ring)
            for session in self._sessions.values():
                session.wake()

    @contextlib.contextmanager
    def session(self, member: control_pb2.Member) -> Iterator[Session]:
        """Make it a member for as long as the context is entered."""
        session = Session(self, next(self._session_ids), member)
        self._swap(self._state.seat(session.id, member))
        self._end_sessions(member.id)  # of the same member: it has come back before they ended
        self._sessions[session.id] = session
        event(logger, logging.INFO, "member joined", member_id=member.id, address=member.address)
        if self._closed:
            session.end()
        try:
            yield session
        finally:
            del self._sessions[session.id]
            self._swap(self._state.unseat(session.id, member.id))
            event(logger, logging.INFO, "member left", member_id=member.id)

    def report(self, session_id: int, member: control_pb2.Member) -> None:
        self._swap(self._state.report(session_id, member))

    async def change(self, changes: Mapping[str, str], expected_generation: int | None) -> Snapshot:
        """Apply all of `changes` or none, and tell every member. Errors: see changed_config."""
        async with self._changing:
            for _ in range(MAX_CHANGE_ATTEMPTS):
                old = await self._store.latest()
                # Not on the loop: with thousands of tenants it takes long.
                config = await asyncio.to_thread(changed_config, old, changes, expected_generation)
                if config == old.config:
                    return old
                try:
                    return await self._store.replace(old, config)
                except Conflict:
                    if expected_generation is not None:
                        raise
        raise Conflict("the configuration keeps changing: try again", reason="GENERATION_CHANGED")

    def configured(self, snapshot: Snapshot) -> None:
        if snapshot != self._state.snapshot:
            self._configuration = configuration_of(snapshot)
            self._swap(self._state.with_snapshot(snapshot))
            logs.follow_level(snapshot.config.telemetry.log_level)
            event(logger, logging.INFO, "configured", generation=snapshot.generation)

    def joined_elsewhere(self, members: Members) -> None:
        self._swap(self._state.with_elsewhere(members))

    def close(self) -> None:
        """End every stream, those to come as well."""
        self._closed = True
        self._end_sessions()

    def check_integrity(self) -> None:
        self._state.check_integrity()
        assert {seat.session for seat in self._state.seats.values()} <= self._sessions.keys()

    def _swap(self, state: MeshState) -> None:
        if state == self._state:
            return
        before, self._state = self._state, state
        if state.seats != before.seats:
            self._store.share_members(state.local_members)
        if state.members != before.members:
            self._membership = control_pb2.Membership(members=state.members)
        for session in self._sessions.values():
            session.wake()

    def _end_sessions(self, member_id: str | None = None) -> None:
        for session in self._sessions.values():
            if member_id in (None, session.member_id):
                session.end()


class Session:
    """One Join stream, seen from here."""

    def __init__(self, hub: Hub, session_id: int, member: control_pb2.Member) -> None:
        self.id = session_id
        self.member_id = member.id
        self._wants_keys = member.role in _TICKET_ROLES
        self._hub = hub
        self._ended = False
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def pushes(self) -> AsyncGenerator[control_pb2.JoinResponse]:
        """What the member does not know yet, the latest only, until the session ends."""
        configuration: control_pb2.Configuration | None = None
        membership: control_pb2.Membership | None = None
        ticket_keys: control_pb2.TicketKeys | None = None
        while not self._ended:
            self._changed.clear()
            if self._hub.configuration is not configuration:
                configuration = self._hub.configuration
                yield control_pb2.JoinResponse(configuration=configuration)
            # Before the members, among whom are those to use them with.
            if self._wants_keys and self._hub.ticket_keys is not ticket_keys:
                ticket_keys = self._hub.ticket_keys
                yield control_pb2.JoinResponse(ticket_keys=ticket_keys)
            if self._hub.membership is not membership:
                membership = self._hub.membership
                yield control_pb2.JoinResponse(membership=membership)
            await asyncio.sleep(PUSH_INTERVAL_S)
            await self._changed.wait()


def configuration_of(snapshot: Snapshot) -> control_pb2.Configuration:
    return control_pb2.Configuration(
        generation=snapshot.generation, config_json=to_json(snapshot.config)
    )
