"""The end of a process whose work is done."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End now: everything that was open has been closed.

    Python would first take all modules apart again, while whoever stops a mesh waits for one
    process after the other.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
