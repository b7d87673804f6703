"""Which requests the engine may have. Pure.

Fewer than it has room for: one that is full is reported to hang (#9628). And no more prompts
for other workers than may wait to be fetched: their KV leaves the engine only with that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker.messages import Submit
from worker.order import Urgency, in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    num_slots: int
    num_blocks: int
    block_tokens: int
    max_handoffs: int


@dataclass(frozen=True, slots=True)
class Place:
    """What a request has taken of the engine."""

    num_blocks: int
    for_another: bool


class Orphan(NamedTuple):
    """Something that the engine holds and the mesh does not need."""

    until_s: float
    step: int


class Admission:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places: dict[int, Place] = {}
        # KV that is on its way, or offered, and that nobody waits for.
        self._orphans: dict[int, Orphan] = {}

    @property
    def num_running(self) -> int:
        return len(self._places) - len(self._orphans)

    @property
    def num_orphans(self) -> int:
        return len(self._orphans)

    @property
    def num_blocks(self) -> int:
        """Of the mesh, that those who run may fill."""
        return sum(place.num_blocks for place in self._places.values())

    def admit(self, waiting: Sequence[Submit], *, prefill_tokens_per_s: float) -> list[Submit]:
        """Those that may run now, in order; they have their places.

        None passes the first that has no room, but for hand-offs: they wait for something else.
        """
        urgencies = {
            submit.request_id: Urgency.of(submit, len(submit.token_ids), prefill_tokens_per_s)
            for submit in waiting
        }
        submits = {submit.request_id: submit for submit in waiting}
        admitted = []
        for request_id in in_order(urgencies):
            submit = submits[request_id]
            place = self._place(submit)
            if place.for_another and self._num_handoffs >= self._limits.max_handoffs:
                continue
            if not self._has_room(place):
                break
            self._places[request_id] = place
            admitted.append(submit)
        return admitted

    def release(self, request_id: int) -> None:
        """May be called twice."""
        self._places.pop(request_id, None)
        self._orphans.pop(request_id, None)

    def leave(self, request_id: int, orphan_id: int, *, until_s: float, step: int) -> None:
        """The engine still has something of it that nobody waits for, beside what follows.

        It lets go of that at `until_s` by itself. `step`: which it is at.
        """
        self._places[orphan_id] = self._places[request_id]
        self._orphans[orphan_id] = Orphan(until_s, step)

    def drain(self, now_s: float, *, step: int, is_empty: bool) -> None:
        """Give back the places of orphans that are gone: the engine held nothing at `step`."""
        for request_id, orphan in list(self._orphans.items()):
            # A step that had begun before says nothing of it.
            is_gone = is_empty and not self.num_running and step > orphan.step + 1
            if now_s >= orphan.until_s or is_gone:
                self.release(request_id)

    def check_integrity(self) -> None:
        assert self._orphans.keys() <= self._places.keys(), "an orphan without a place"

    @property
    def _num_handoffs(self) -> int:
        return sum(place.for_another for place in self._places.values())

    def _has_room(self, place: Place) -> bool:
        if not self._places:
            return True  # one alone runs, whatever its size
        fits = self.num_blocks + place.num_blocks <= self._limits.num_blocks
        return len(self._places) < self._limits.num_slots and fits

    def _place(self, submit: Submit) -> Place:
        for_another = submit.export_from is not None
        num_answer = 1 if for_another else submit.sampling.max_tokens or 0
        num_tokens = len(submit.token_ids) + max(num_answer, len(submit.answer_ids))
        return Place(-(-num_tokens // self._limits.block_tokens), for_another)
