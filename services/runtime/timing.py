"""Timing a piece of a request into its ledger."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.core.ledger import Ledger, Segment


@contextmanager
def timing(ledger: Ledger, segment: Segment) -> Iterator[None]:
    """What is inside counts as `segment`, however it ends."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        ledger.record(segment, began_s, time.monotonic())
