"""A holder's reports, checked for what is missing between them. Pure."""

from __future__ import annotations

import enum

from router.reports import LoadEvent, Report, SnapshotEvent


class Verdict(enum.Enum):
    # As it should be.
    NEXT = "next"
    # It was told before.
    OLD = "old"
    # Something before it was never told: only a snapshot helps.
    GAP = "gap"


class Feed:
    """Live from a snapshot on, until something is missing or it ends."""

    __slots__ = ("_incarnation", "_sequence", "is_live")

    def __init__(self) -> None:
        self.is_live = False
        self._incarnation = ""
        self._sequence = 0

    def judge(self, report: Report) -> Verdict:
        """Each report once, in the order in which they came."""
        event = report.event
        if isinstance(event, SnapshotEvent) and not event.continues:
            if (
                self.is_live
                and report.incarnation == self._incarnation
                and report.sequence < self._sequence
            ):
                return Verdict.OLD
            self.is_live = True
            self._incarnation, self._sequence = report.incarnation, report.sequence
            return Verdict.NEXT
        if not self.is_live or report.incarnation != self._incarnation:
            return self._end()
        ahead = report.sequence - self._sequence
        if isinstance(event, SnapshotEvent | LoadEvent):
            # It carries the number of the last event before it.
            return Verdict.NEXT if not ahead else self._end() if ahead > 0 else Verdict.OLD
        if ahead > 1:
            return self._end()
        if ahead < 1:
            return Verdict.OLD
        self._sequence = report.sequence
        return Verdict.NEXT

    def end(self) -> None:
        self.is_live = False

    def _end(self) -> Verdict:
        self.end()
        return Verdict.GAP
