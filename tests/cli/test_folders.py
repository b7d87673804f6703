from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.folders import LOCK, RunLock, remove_stale_runs

LOCK_AND_DIE = """
import os, signal, sys
from pathlib import Path
from services.cli.folders import RunLock

lock = RunLock(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's, the only one of all."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / "firsttoken-x"
    directory.mkdir()
    (directory / "worker.log").write_text("here")
    return directory


def die_locked(directory: Path) -> None:
    subprocess.run([sys.executable, "-c", LOCK_AND_DIE, str(directory)])
    assert (directory / LOCK).exists()


def test_the_folder_of_a_killed_run_goes(directory: Path) -> None:
    die_locked(directory)

    remove_stale_runs()

    assert not directory.exists()


def test_the_folder_of_a_run_that_lives_stays(directory: Path) -> None:
    lock = RunLock(directory)

    remove_stale_runs()

    assert (directory / "worker.log").exists()
    lock.close()


def test_a_folder_that_is_kept_for_its_logs_stays(directory: Path) -> None:
    RunLock(directory).close()

    remove_stale_runs()

    assert [file.name for file in directory.iterdir()] == ["worker.log"]


def test_other_folders_and_links_stay(directory: Path, tmp_path: Path) -> None:
    for name in ("other", "firsttoken-file"):
        (tmp_path / name).write_text("here")
    elsewhere = tmp_path / "elsewhere"
    directory.rename(elsewhere)
    die_locked(elsewhere)
    directory.symlink_to(elsewhere)

    remove_stale_runs()

    assert (elsewhere / "worker.log").exists()
    assert len(list(tmp_path.iterdir())) == 4
