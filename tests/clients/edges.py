"""A mesh with its HTTP edge as a user starts it, for clients that know nothing of it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.cli.running import Run, wait_for

MODEL = "smollm2-135m-instruct"
# For --exec: says where the edge is, and keeps it until it is ended.
SERVE = 'echo "$FIRSTTOKEN_HTTP"; exec sleep 1000'
IDLE_TIMEOUT_S = 60.0


class HttpEdge(NamedTuple):
    """`url` has no path; OpenAI's clients want `base_url`."""

    url: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def metrics(self) -> dict[str, float]:
        """By name, those of all labels added up."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        sums: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def wait_until_idle(self) -> None:
        """Nothing runs but the request that asks."""
        name = "firsttoken_gateway_requests_in_flight"
        wait_for(
            lambda: self.metrics()[name] == 1, IDLE_TIMEOUT_S, lambda: f"{name}: {self.metrics()}"
        )


@contextmanager
def run_http_edge(directory: Path, *arguments: str) -> Iterator[HttpEdge]:
    """`arguments`: of `firsttoken up`."""
    options = ("--no-kvstore", "--no-observer", "--exec", SERVE)
    run = Run("up", *options, *arguments, directory=directory)
    try:
        assert run.process.stdout is not None
        url = run.process.stdout.readline().strip()
        assert url, f"the mesh did not start: {run.finish().stderr}"
        yield HttpEdge(url)
    finally:
        run.process.terminate()
        run.close()
