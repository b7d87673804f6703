"""Clients that are too large for everybody's tests: `make test-clients` installs and runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

TIMEOUT_S = 170.0
# Whatever a client would fetch, it finds nobody there.
OFFLINE = {
    **dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    ),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1"),
}


class Programs:
    """What is in the clients' own environment."""

    def __init__(self, folder: Path, directory: Path) -> None:
        self._folder = folder
        self._directory = directory

    def run(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """What it prints. It runs in an empty directory, without a network, and must end well."""
        done = subprocess.run(
            [str(self._folder / name), *arguments],
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, **OFFLINE, "HOME": str(self._directory), **(env or {})},
        )
        print(done.stdout)
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(Path(os.environ["FIRSTTOKEN_CLIENTS"]), tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _asked_for() -> None:
    if "FIRSTTOKEN_CLIENTS" not in os.environ:
        pytest.skip("`make test-clients` runs the large clients")
