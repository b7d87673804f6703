"""The command as its user runs it: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

COMMAND = (sys.executable, "-m", "services.cli.main")
TIMEOUT_S = 90.0
# For --exec: says where the mesh is, and keeps it until it is ended.
SERVE = 'echo "$FIRSTTOKEN_ROUTER $FIRSTTOKEN_CONTROL"; exec sleep 1000'


class Result(NamedTuple):
    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What a script reads: the last line of stdout."""
        return json.loads(self.stdout.splitlines()[-1])


class Endpoints(NamedTuple):
    router: str
    control: str

    @property
    def env(self) -> dict[str, str]:
        return {"FIRSTTOKEN_ROUTER": self.router, "FIRSTTOKEN_CONTROL": self.control}


class Run:
    """A process of ours and all that it started, found again by a mark in their environment.

    `directory`: where it keeps its logs.
    """

    def __init__(self, *arguments: str, directory: Path) -> None:
        self.mark = f"FIRSTTOKEN_TEST_RUN={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, name: value, "TMPDIR": str(directory)},
        )

    def wait_until_serving(self) -> Endpoints:
        """Of `up` with --exec SERVE."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the mesh did not start: {self.finish().stderr}"
        return Endpoints(*line.split())

    def finish(self) -> Result:
        stdout, stderr = self.process.communicate(timeout=TIMEOUT_S)
        return Result(self.process.returncode, stdout, stderr)

    def survivors(self) -> dict[int, str]:
        """The command line of every process that runs, by pid."""
        return dict(self._find())

    def wait_until_gone(self, timeout_s: float = 15.0) -> None:
        wait_for(lambda: not self.survivors(), timeout_s, lambda: f"{self.survivors()} still run")

    def close(self) -> None:
        for pid in self.survivors():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, 9)
        self.process.communicate()

    def _find(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace")
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it ended, or is another user's
                continue
            # A zombie has no command line.
            if command and self.mark in environment.split("\0"):
                yield int(entry.name), command.replace("\0", " ")


def wait_for(condition: Callable[[], bool], timeout_s: float, problem: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, problem()
        time.sleep(0.02)


def run_to_end(*arguments: str, stdin: str = "", env: Mapping[str, str] | None = None) -> Result:
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **(env or {})},
    )
    return Result(done.returncode, done.stdout, done.stderr)
