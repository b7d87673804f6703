"""The stack of docker-compose.yml, started for real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.compose.daemon import answers, own_docker
from tests.compose.images import make_base_images
from tests.runtime.ports import free_port

ROOT = Path(__file__).parents[2]
# Long enough for two cores that compute something else too.
READY_TIMEOUT_S = 240


class Container(NamedTuple):
    id: str
    service: str
    pid: int
    status: str
    # "" without a health check.
    health: str
    exit_code: int
    num_restarts: int


class Stack:
    """A running stack under a name and on ports of its own."""

    def __init__(self, environment: Mapping[str, str], files: list[Path]) -> None:
        self.http = f"http://127.0.0.1:{free_port()}"
        self.page = f"http://127.0.0.1:{free_port()}"
        self._environment = {
            **environment,
            "FIRSTTOKEN_HTTP_PORT": self.http.rpartition(":")[2],
            "FIRSTTOKEN_PAGE_PORT": self.page.rpartition(":")[2],
            "GRAFANA_PORT": str(free_port()),
        }
        self._options = ["--project-name", f"firsttoken-test-{os.getpid()}"]
        self._options += [option for path in files for option in ("--file", str(path))]

    def compose(self, *arguments: str) -> str:
        """What it prints. Raises CalledProcessError, whose words pytest shows."""
        return self._run("docker", "compose", *self._options, *arguments)

    def inside(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command)

    def containers(self, *services: str) -> list[Container]:
        """Also those that have ended."""
        ids = self.compose("ps", "--all", "--quiet", *services).split()
        found: list[dict[str, Any]] = json.loads(self._run("docker", "inspect", *ids))
        return [_container(each) for each in found]

    def crash(self, container: Container) -> None:
        """As a defect would: Docker does not restart what `docker kill` has ended."""
        os.kill(container.pid, signal.SIGKILL)

    def _run(self, *command: str) -> str:
        ended = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True
        )
        if ended.returncode:
            raise AssertionError(f"{' '.join(command)}: {ended.stderr[-4000:]}")
        return ended.stdout


@contextlib.contextmanager
def running_stack(tools: Path) -> Iterator[Stack]:
    """Ready, and gone afterwards with all that it kept. `tools` has docker-compose."""
    with _docker(tools) as (environment, files):
        stack = Stack(environment, files)
        try:
            stack.compose("build")
            stack.compose("up", "--detach", "--wait", "--wait-timeout", str(READY_TIMEOUT_S))
            yield stack
        finally:
            stack.compose("down", "--volumes", "--remove-orphans")


@contextlib.contextmanager
def _docker(tools: Path) -> Iterator[tuple[dict[str, str], list[Path]]]:
    """The Docker of this machine, or one of our own without a registry."""
    files = [ROOT / "docker-compose.yml"]
    if answers():
        yield dict(os.environ), files
        return
    with own_docker() as environment:
        plugins = Path(environment["DOCKER_CONFIG"]) / "cli-plugins"
        plugins.mkdir(parents=True)
        (plugins / "docker-compose").symlink_to(tools / "docker-compose")
        make_base_images(environment)
        yield environment, [*files, Path(__file__).with_name("stand-ins.yml")]


def _container(found: dict[str, Any]) -> Container:
    state = found["State"]
    return Container(
        id=found["Id"],
        service=found["Config"]["Labels"]["com.docker.compose.service"],
        pid=state["Pid"],
        status=state["Status"],
        health=state.get("Health", {}).get("Status", ""),
        exit_code=state["ExitCode"],
        num_restarts=found["RestartCount"],
    )
