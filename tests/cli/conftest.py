"""A running mesh for the command, and runs that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cli.running import SERVE, Endpoints, Run


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Starts the command in the background; what it leaves behind is ended."""
    runs: list[Run] = []

    def start(*arguments: str) -> Run:
        runs.append(Run(*arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(scope="package")
def mesh() -> Iterator[Endpoints]:
    """A simulated mesh with two workers, run by the command itself."""
    run = Run("up", "--engine", "simulated", "--exec", SERVE)
    try:
        yield run.wait_until_serving()
    finally:
        run.process.terminate()
        run.close()
