"""What `firsttoken up` tells on the way."""

from __future__ import annotations

import sys
import time


class Screen:
    """Prints to stderr: stdout belongs to answers, and to the command of --exec."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def report(self, name: str, text: str) -> None:
        print(f"{self.elapsed_s:6.1f} s  {name:<9}  {text}", file=sys.stderr, flush=True)
