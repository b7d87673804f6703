"""What a control replica knows: pure values, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import orjson

from firsttoken.control.v1 import control_pb2
from services.core.config import Snapshot, change
from services.core.errors import Conflict, InvalidArgument, Violation
from services.core.settings import MeshConfig

Members: TypeAlias = tuple[control_pb2.Member, ...]

FIRST_GENERATION = 1
MAX_ID_CHARACTERS = 128
# More than there are settings.
MAX_CHANGES = 1000

_ROLES = frozenset(control_pb2.MemberRole.values()) - {control_pb2.MEMBER_ROLE_UNSPECIFIED}
_STATES = frozenset(control_pb2.MemberState.values())


class Seat(NamedTuple):
    """A member and the stream that speaks for it."""

    session: int
    member: control_pb2.Member


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshState:
    """Immutable; each step gives a new one.

    `seats`: who has joined here, by member id. `elsewhere`: who has joined other
    replicas. Members are never changed in place.
    """

    snapshot: Snapshot
    seats: Mapping[str, Seat] = field(default_factory=lambda: MappingProxyType({}))
    elsewhere: Members = ()

    @property
    def local_members(self) -> Members:
        return tuple(seat.member for seat in self.seats.values())

    @property
    def members(self) -> Members:
        """Everybody once, ordered by role and id.

        One who fails over is in both places for a moment: the stream here is newer
        than what another replica last said.
        """
        known = {member.id: member for member in (*self.elsewhere, *self.local_members)}
        return tuple(sorted(known.values(), key=lambda member: (member.role, member.id)))

    def with_snapshot(self, snapshot: Snapshot) -> MeshState:
        return replace(self, snapshot=snapshot)

    def with_elsewhere(self, members: Members) -> MeshState:
        return replace(self, elsewhere=members)

    def seat(self, session: int, member: control_pb2.Member) -> MeshState:
        """Announce `member` by a new session, which takes the seat of an older one."""
        check_member(member)
        seats = {**self.seats, member.id: Seat(session, member)}
        return replace(self, seats=MappingProxyType(seats))

    def report(self, session: int, member: control_pb2.Member) -> MeshState:
        """Replace what `session` said of its member; nothing when it lost the seat."""
        seated = self.seats.get(member.id)
        if seated is None or seated.session != session:
            return self
        return self.seat(session, member)

    def unseat(self, session: int, member_id: str) -> MeshState:
        """The end of `session`; nothing when another session has the seat."""
        seated = self.seats.get(member_id)
        if seated is None or seated.session != session:
            return self
        seats = {key: seat for key, seat in self.seats.items() if key != member_id}
        return replace(self, seats=MappingProxyType(seats))

    def check_integrity(self) -> None:
        assert self.snapshot.generation >= FIRST_GENERATION
        for member_id, seat in self.seats.items():
            assert seat.member.id == member_id
        sessions = [seat.session for seat in self.seats.values()]
        assert len(sessions) == len(set(sessions)), "one stream speaks for two members"


def first_snapshot(config: MeshConfig) -> Snapshot:
    return Snapshot(FIRST_GENERATION, config)


def changed_config(
    snapshot: Snapshot, changes: Mapping[str, str], expected_generation: int | None
) -> MeshConfig:
    """The configuration after `changes`: dotted key to JSON value, or to a bare string.

    Raises Conflict when `expected_generation` is no longer the generation, and
    InvalidArgument naming every setting that cannot be so.
    """
    if expected_generation is not None and expected_generation != snapshot.generation:
        raise Conflict(
            f"the configuration is at generation {snapshot.generation},"
            f" not {expected_generation}: read it again and decide anew",
            reason="GENERATION_CHANGED",
        )
    if not changes:
        raise InvalidArgument.of("changes", "must name at least one setting")
    if len(changes) > MAX_CHANGES:
        rule = f"must be at most {MAX_CHANGES} settings"
        raise InvalidArgument.of("changes", f"{rule}; got {len(changes)}")
    return change(snapshot.config, {key: _value(text) for key, text in changes.items()})


def _value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text  # the setting's own rule says whether a string will do


def check_member(member: control_pb2.Member) -> None:
    """Raises InvalidArgument naming every field that keeps it from being a member."""
    # One that starts may announce itself before it knows where it will listen.
    located = ":" in member.address or member.state == control_pb2.MEMBER_STATE_STARTING
    rules = (
        ("id", 1 <= len(member.id) <= MAX_ID_CHARACTERS, f"1 to {MAX_ID_CHARACTERS} characters"),
        ("role", member.role in _ROLES, f"a role of this version; got {member.role}"),
        ("state", member.state in _STATES, f"a state of this version; got {member.state}"),
        ("address", located, "host:port"),
    )
    violations = [
        Violation(f"member.{name}", f"must be {rule}") for name, ok, rule in rules if not ok
    ]
    if violations:
        raise InvalidArgument(violations)
