"""A running mesh for the command, and runs that leave nothing behind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.cli.running import SERVE, Endpoints, Run


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """With a short path: what runs in it is found by that, and a socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="ft-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts the command in the background; what it leaves behind is ended."""
    runs: list[Run] = []

    def start(*arguments: str, env: Mapping[str, str] | None = None) -> Run:
        runs.append(Run(*arguments, directory=tmp_path, env=env))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(scope="package")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """A simulated mesh with two workers, run by the command itself."""
    directory = tmp_path_factory.mktemp("mesh")
    run = Run("up", "--engine", "simulated", "--exec", SERVE, directory=directory)
    try:
        yield run.wait_until_serving()
    finally:
        run.process.terminate()
        run.close()
