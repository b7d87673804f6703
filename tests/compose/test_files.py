"""What can be said of the stack without starting it; test_up.py starts it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.control.configfile import read_config
from services.core.config import parse

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
STACK: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
OF_THE_MESH = {
    *("control", "control-gpu", "tokenizer", "router", "gateway", "observer", "kvstore"),
    *("worker", "worker-gpu", "node"),
}
OF_OTHERS = {"redis", "collector", "jaeger", "prometheus", "grafana"}
# Its only purpose is to be there; and two images without anything that could look.
UNCHECKED = {"node", "collector", "jaeger"}
PUBLISHED = {"gateway", "observer", "grafana"}


def test_every_part_is_there_and_described() -> None:
    described = (ROOT / "docs" / "compose.md").read_text()

    assert set(SERVICES) == OF_THE_MESH | OF_OTHERS
    assert [name for name in SERVICES if f"`{name}`" not in described] == []


@pytest.mark.parametrize("name", sorted(OF_THE_MESH | OF_OTHERS))
def test_a_container_can_do_little_harm(name: str) -> None:
    service = SERVICES[name]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert not {"privileged", "cap_add", "pid", "ipc", "devices"} & set(service)
    assert service.get("network_mode", "service:node") == "service:node"


@pytest.mark.parametrize("name", sorted(OF_THE_MESH))
def test_a_process_of_the_mesh_is_not_root(name: str) -> None:
    assert SERVICES[name]["user"] == "10001:10001"


def test_only_what_people_open_is_published_and_only_here() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}

    assert set(published) == PUBLISHED
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_only_published_services_reach_a_network_with_a_way_out() -> None:
    inner = {name for name, network in STACK["networks"].items() if network.get("internal")}
    outer = {name for name, each in SERVICES.items() if set(each.get("networks", ())) - inner}

    assert outer == PUBLISHED


def test_nothing_of_the_host_is_written() -> None:
    mounted = [each for service in SERVICES.values() for each in service.get("volumes", ())]

    assert {each.split(":")[0] for each in mounted} == set(STACK["volumes"])


def test_what_is_mounted_is_there() -> None:
    files = {name: ROOT / each["file"] for name, each in STACK["configs"].items()}

    assert [name for name, path in files.items() if not path.is_file()] == []


@pytest.mark.parametrize("name", sorted(OF_THE_MESH | OF_OTHERS))
def test_a_container_says_how_it_is(name: str) -> None:
    check = SERVICES[name].get("healthcheck")

    assert (check is None) is (name in UNCHECKED)


@pytest.mark.parametrize("name", sorted(OF_OTHERS))
def test_an_image_of_others_has_a_version(name: str) -> None:
    assert re.search(r":v?\d", SERVICES[name]["image"])


@pytest.mark.parametrize("name", sorted(OF_THE_MESH - {"node"}))
def test_the_process_itself_hears_of_a_stop(name: str) -> None:
    """It is PID 1: a shell before it has been replaced."""
    program, *rest = SERVICES[name]["command"]

    assert program == "python" or (program == "sh" and rest[1].startswith("exec python "))


@pytest.mark.parametrize("name", sorted(OF_THE_MESH - {"node"}))
def test_a_process_is_one_of_ours(name: str) -> None:
    command = " ".join(SERVICES[name]["command"])
    found = re.search(r"python -m (\S+)", command)

    assert found is not None
    assert (ROOT / found[1].replace(".", "/") / "__main__.py").is_file()


def test_control_starts_with_a_configuration_that_holds() -> None:
    config = read_config(ROOT / "deploy" / "compose" / "mesh.toml")

    assert config.worker.engine == "llamacpp"
    assert config.kvstore.redis_url == "redis://redis:6379"
    assert config.telemetry.otlp_endpoint == "http://collector:4317"


def test_a_gpu_changes_the_engine_and_sizes_alone() -> None:
    plain, gpu = (
        tomllib.loads((ROOT / "deploy" / "compose" / f"{name}.toml").read_text())
        for name in ("mesh", "mesh-gpu")
    )

    assert gpu["worker"].pop("engine") == "tensorrt_llm"
    assert parse(gpu).kvstore.redis_url == parse(plain).kvstore.redis_url
    assert gpu["telemetry"] == plain["telemetry"]


def test_profiles_swap_workers() -> None:
    profiles = {name: service.get("profiles") for name, service in SERVICES.items()}
    defaults = dict(
        line.split("=") for line in (ROOT / ".env").read_text().splitlines() if "=" in line
    )

    assert defaults["COMPOSE_PROFILES"] == "cpu"
    assert {name for name, each in profiles.items() if each == ["cpu"]} == {"control", "worker"}
    assert {name for name, each in profiles.items() if each == ["gpu"]} == {
        "control-gpu",
        "worker-gpu",
    }


def test_an_image_is_built_anywhere_and_runs_as_nobody() -> None:
    stages = re.split(r"(?m)^FROM ", DOCKERFILE)[1:]
    images = [stage for stage in stages if "CMD" in stage]

    assert "--mount" not in DOCKERFILE
    assert stages[-1].strip() == "mesh"
    assert len(images) == 2
    for image in images:
        assert "USER 10001:10001" in image
        assert 'CMD ["' in image


def test_what_is_copied_is_not_ignored() -> None:
    kept = re.findall(r"(?m)^!(\S+)", (ROOT / ".dockerignore").read_text())
    copied = re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", DOCKERFILE)

    assert {name for names in copied for name in names.split()} == set(kept)
