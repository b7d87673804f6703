"""What the control service says about the members of a mesh."""

from __future__ import annotations

from typing import Any

from firsttoken.control.v1 import control_pb2

READY = control_pb2.MEMBER_STATE_READY


def role_name(member: control_pb2.Member) -> str:
    return enum_name(control_pb2.MemberRole, member.role, "MEMBER_ROLE_")


def state_name(member: control_pb2.Member) -> str:
    return enum_name(control_pb2.MemberState, member.state, "MEMBER_STATE_")


def worker_role_name(capacity: control_pb2.WorkerCapacity) -> str:
    """Which part of a request it serves: "both", "prefill" or "decode"."""
    name = enum_name(control_pb2.WorkerRole, capacity.role, "WORKER_ROLE_")
    return "both" if name == "unspecified" else name


def describe(member: control_pb2.Member) -> str:
    """One readable line: what it is doing, or what it is ready for."""
    if member.state != READY:
        return member.detail or state_name(member)
    parts = [f"ready on {member.address}"]
    if member.http_address:
        parts = [f"ready, its page on {member.http_address}"]
    if member.model:
        parts.append(member.model)
    if member.worker.engine:
        parts.append(f"{member.worker.engine} engine, {member.worker.num_slots} slots")
        if (role := worker_role_name(member.worker)) != "both":
            parts.append(f"for {role}")
    return ", ".join(parts)


def enum_name(enum: Any, number: int, prefix: str) -> str:
    """Of a value without its prefix; the number of one that this version does not know."""
    if number not in enum.values():
        return str(number)
    name: str = enum.Name(number)
    return name.removeprefix(prefix).lower()
