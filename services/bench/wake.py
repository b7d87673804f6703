"""What it costs on this machine to wake another process, by how long both have slept."""

from __future__ import annotations

import statistics
import subprocess
import time

# Seconds of sleep, and how often it is tried.
_PAUSES = {0.0: 500, 0.01: 50, 0.1: 20, 1.0: 3}


def wake_up_ms() -> dict[str, float]:
    """Median round trip of one byte through `cat`, by the pause before it, in seconds."""
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as echo:
        to_echo, from_echo = echo.stdin, echo.stdout
        assert to_echo is not None
        assert from_echo is not None

        def round_trip_ms(pause_s: float) -> float:
            time.sleep(pause_s)
            began_s = time.monotonic()
            to_echo.write(b".")
            from_echo.read(1)
            return (time.monotonic() - began_s) * 1e3

        return {
            f"{pause_s:g}": statistics.median(round_trip_ms(pause_s) for _ in range(count))
            for pause_s, count in _PAUSES.items()
        }
