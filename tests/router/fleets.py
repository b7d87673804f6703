"""Plain values for tests of the pure parts."""

from __future__ import annotations

from router.fleet import Announced, Fleet, Worker


def announce(
    name: str,
    *,
    ready: bool = True,
    num_slots: int = 8,
    max_context_tokens: int = 2048,
    address: str = "",
) -> Announced:
    return Announced(name, address or f"{name}:7000", ready, num_slots, max_context_tokens)


def make_worker(name: str, *, in_flight: int = 0, turn: int = 0, address: str = "") -> Worker:
    worker = Worker(announce(name, address=address))
    worker.in_flight = in_flight
    worker.turn = turn
    return worker


def make_fleet(*names: str, num_slots: int = 8) -> Fleet:
    fleet = Fleet()
    fleet.update(announce(name, num_slots=num_slots) for name in names)
    return fleet
