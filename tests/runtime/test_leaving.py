from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import atexit, sys
from services.runtime.leaving import leave

atexit.register(print, "taken apart")
print("said", end="")
print("complained", end="", file=sys.stderr)
leave(3)
"""


def test_what_was_said_is_out_the_status_is_given_and_nothing_is_taken_apart() -> None:
    # What is said to a pipe is buffered, unless the environment says otherwise.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )

    assert (done.returncode, done.stdout, done.stderr) == (3, "said", "complained")
