"""Timing a piece of a request into its ledger, however the piece ends."""

from __future__ import annotations

import time

from services.core.ledger import Ledger, Segment


class timing:
    """A context manager: what is inside counts as `segment`, and has a span of its own."""

    __slots__ = ("_began_s", "_ledger", "_segment")

    def __init__(self, ledger: Ledger, segment: Segment) -> None:
        self._ledger = ledger
        self._segment = segment

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *raised: object) -> None:
        self._ledger.record(self._segment, self._began_s, time.monotonic())


class spending:
    """The same without a span, for what takes next to no time. `since_s`: before now."""

    __slots__ = ("_began_s", "_ledger", "_segment")

    def __init__(self, ledger: Ledger, segment: Segment, *, since_s: float | None = None) -> None:
        self._ledger = ledger
        self._segment = segment
        self._began_s = since_s

    def __enter__(self) -> None:
        if self._began_s is None:
            self._began_s = time.monotonic()

    def __exit__(self, *raised: object) -> None:
        assert self._began_s is not None
        self._ledger.spend(self._segment, time.monotonic() - self._began_s)
