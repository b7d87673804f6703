"""The folder of a run. One whose run was killed goes when the next begins."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "firsttoken-"
# Locked while the run lives; gone once the folder is kept for its logs.
LOCK = ".running"


class RunLock:
    """Held until closed, or until this process ends, however that may be."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def remove_stale_runs() -> None:
    """The folders of this user's runs that ended without a word."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if _is_stale(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _is_stale(directory: Path) -> bool:
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return False
        fd = os.open(directory / LOCK, os.O_RDWR)
    except OSError:  # none, or gone by now
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
