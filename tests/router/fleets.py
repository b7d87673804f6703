"""Plain values for tests of the pure parts."""

from __future__ import annotations

from typing import Any

from router.fleet import Announced, Fleet, Role, Worker


def announce(
    name: str,
    *,
    ready: bool = True,
    num_slots: int = 8,
    max_context_tokens: int = 2048,
    address: str = "",
    role: Role = Role.BOTH,
    fingerprint: str = "f",
    num_blocks: int = 0,
) -> Announced:
    address = address or f"{name}:7000"
    return Announced(
        name, address, ready, num_slots, max_context_tokens, role, fingerprint, num_blocks
    )


def make_worker(name: str, *, in_flight: int = 0, turn: int = 0, **announced: Any) -> Worker:
    worker = Worker(announce(name, **announced))
    worker.in_flight = in_flight
    worker.turn = turn
    return worker


def make_fleet(*names: str, num_slots: int = 8) -> Fleet:
    fleet = Fleet()
    fleet.update(announce(name, num_slots=num_slots) for name in names)
    return fleet
