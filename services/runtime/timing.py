"""Timing a piece of a request into its ledger, however the piece ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.core.ledger import Ledger, Segment


@contextmanager
def timing(ledger: Ledger, segment: Segment) -> Iterator[None]:
    """What is inside counts as `segment`, and has a span of its own."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        ledger.record(segment, began_s, time.monotonic())


@contextmanager
def spending(ledger: Ledger, segment: Segment, *, since_s: float | None = None) -> Iterator[None]:
    """The same without a span, for what takes next to no time. `since_s`: before now."""
    began_s = time.monotonic() if since_s is None else since_s
    try:
        yield
    finally:
        ledger.spend(segment, time.monotonic() - began_s)
