from __future__ import annotations

from firsttoken.control.v1.control_pb2 import (
    MEMBER_ROLE_ROUTER,
    MEMBER_STATE_DRAINING,
    Member,
)
from services.cli.members import describe, role_name, state_name


def test_roles_and_states_have_plain_names() -> None:
    member = Member(role=MEMBER_ROLE_ROUTER, state=MEMBER_STATE_DRAINING)

    assert (role_name(member), state_name(member)) == ("router", "draining")


def test_what_a_newer_mesh_knows_is_shown_by_its_number() -> None:
    member = Member()
    member.MergeFromString(b"\x10\x63\x20\x63")  # as it comes off the wire

    assert (role_name(member), state_name(member)) == ("99", "99")
    assert describe(member) == "99"
