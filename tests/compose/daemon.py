"""A Docker of the test's own, where none runs: its daemon, and what it leaves behind undone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
# What each table is while nobody uses it.
TABLES = {
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
}


def answers(environment: dict[str, str] | None = None) -> bool:
    """Whether a Docker daemon does."""
    if shutil.which("docker") is None:
        return False
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


@contextlib.contextmanager
def own_docker() -> Iterator[dict[str, str]]:
    """The environment in which `docker` speaks to a daemon that lives as long as this.

    Needs root, dockerd and iptables. Its data lie in memory, as those of a test may.
    """
    directory = Path(tempfile.mkdtemp(prefix="firsttoken-docker-", dir="/dev/shm"))
    with _as_before(directory), (directory / "dockerd.log").open("w") as log:
        socket = f"unix://{directory}/docker.sock"
        daemon = subprocess.Popen(
            [
                *("dockerd", "-H", socket, "--pidfile", f"{directory}/dockerd.pid"),
                *("--data-root", f"{directory}/data", "--exec-root", f"{directory}/exec"),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        environment = {
            **os.environ,
            "DOCKER_HOST": socket,
            "DOCKER_CONFIG": f"{directory}/config",
        }
        try:
            _wait_until_up(daemon, environment, directory / "dockerd.log")
            yield environment
        finally:
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(STOP_TIMEOUT_S)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()


def _wait_until_up(daemon: subprocess.Popen[bytes], env: dict[str, str], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not answers(env):
        if daemon.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"dockerd did not start: {log.read_text()[-2000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def _as_before(directory: Path) -> Iterator[None]:
    """dockerd leaves its bridge, firewall rules and forwarding; its data are ours to remove."""
    rules, forward = _firewall(), IP_FORWARD.read_text()
    had_bridge = _has_bridge()
    try:
        yield
    finally:
        subprocess.run(["iptables-restore"], input=rules, text=True, check=True)
        if not had_bridge and _has_bridge():
            subprocess.run(["ip", "link", "delete", "docker0"], check=True)
        IP_FORWARD.write_text(forward)
        shutil.rmtree(directory)


def _firewall() -> str:
    """As `iptables-restore` takes it, with the tables that dockerd fills also when empty."""
    saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    for table, chains in TABLES.items():
        if f"*{table}\n" not in saved:
            policies = "".join(f":{chain} ACCEPT\n" for chain in chains)
            saved += f"*{table}\n{policies}COMMIT\n"
    return saved


def _has_bridge() -> bool:
    return Path("/sys/class/net/docker0").exists()
