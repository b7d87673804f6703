"""The mesh around the requests: who is in it, and how it is configured. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from firsttoken.control.v1 import control_pb2
from services.core.config import Snapshot, flatten, without_passwords
from services.observer.model import Generation, Member

MAX_GENERATIONS = 100
# Of tenants: what nobody needs to see who looks at the mesh.
_SECRET = ("key_hashes", "identities", "salt")
_ROLE, _STATE = "MEMBER_ROLE_", "MEMBER_STATE_"


class Configurations:
    """The one that holds, and what the last generations changed."""

    def __init__(self) -> None:
        self.flat: Mapping[str, Any] = MappingProxyType({})
        self._generations: deque[Generation] = deque(maxlen=MAX_GENERATIONS)

    @property
    def generations(self) -> tuple[Generation, ...]:
        return tuple(self._generations)

    def take(self, snapshot: Snapshot, now_unix_s: float) -> Generation:
        """The first is compared with nothing."""
        before, self.flat = self.flat, _shown(snapshot)
        keys = before.keys() | self.flat.keys() if before else ()
        changes = {
            key: (before.get(key), self.flat.get(key))
            for key in sorted(keys)
            if before.get(key) != self.flat.get(key)
        }
        generation = Generation(snapshot.generation, now_unix_s, changes)
        self._generations.append(generation)
        return generation


def to_member(member: control_pb2.Member) -> Member:
    return Member(
        id=member.id,
        role=_name(control_pb2.MemberRole, member.role, _ROLE),
        state=_name(control_pb2.MemberState, member.state, _STATE),
        address=member.address,
        host=member.address.rpartition(":")[0],
        generation=member.generation,
        detail=member.detail,
    )


def _shown(snapshot: Snapshot) -> Mapping[str, Any]:
    flat = flatten(without_passwords(snapshot.config))
    return MappingProxyType(
        {key: value for key, value in flat.items() if key.rpartition(".")[2] not in _SECRET}
    )


def _name(enum: Any, number: int, prefix: str) -> str:
    """The number of one that this version does not know."""
    if number not in enum.values():
        return str(number)
    name: str = enum.Name(number)
    return name.removeprefix(prefix).lower()
