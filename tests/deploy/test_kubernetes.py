"""What can be said of deploy/kubernetes without a cluster, and without its schemas."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.kubernetes import OVERLAYS, ROOT, Manifest, apply, containers, pod_of, render
from services.cli.main import COMMANDS
from services.core.config import parse
from services.core.ledger import Segment
from services.runtime.process import INSECURE_VARIABLE
from services.runtime.tls import TLS_DIR_VARIABLE

REPOSITORY = ROOT.parent.parent
RENDERED = {overlay: render(ROOT / "overlays" / overlay) for overlay in OVERLAYS}
STACK = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
NAME = "app.kubernetes.io/name"
MODULES = {
    **{name: f"services.{name}" for name in ("control", "tokenizer", "gateway", "observer")},
    **{"router": "router", "kvstore": "kvstore", "prefill": "worker", "decode": "worker"},
}
OF_OTHERS = {"redis-control", "redis-cluster", "redis-cluster-form"}
# Who calls whom (docs/architecture.md), and, as the observer's pod, commands that people run there.
CALLS = {
    *((each, "control") for each in MODULES if each != "control"),
    *((each, "observer") for each in MODULES if each != "control"),
    *(("router", each) for each in ("tokenizer", "kvstore", "prefill", "decode")),
    *(("gateway", each) for each in ("router", "decode")),
    *(("observer", each) for each in ("router", "tokenizer", "kvstore", "prefill", "decode")),
    *(("decode", each) for each in ("prefill", "kvstore")),
    ("prefill", "kvstore"),
    *(("control", "redis-control"), ("kvstore", "redis-cluster")),
    *(("redis-cluster", "redis-cluster"), ("redis-cluster-form", "redis-cluster")),
}

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def of_kind(overlay: str, *kinds: str) -> Iterator[Manifest]:
    return (each for each in RENDERED[overlay] if each["kind"] in kinds)


def pods(overlay: str) -> dict[str, Manifest]:
    found = (pod for each in RENDERED[overlay] if (pod := pod_of(each)) is not None)
    return {pod["metadata"]["labels"][NAME]: pod for pod in found}


def container(overlay: str, name: str) -> dict[str, Any]:
    [found] = pods(overlay)[name]["spec"]["containers"]
    return dict(found)


def ports(overlay: str, name: str) -> dict[str, int]:
    return {
        each["name"]: each["containerPort"] for each in container(overlay, name).get("ports", ())
    }


def command(overlay: str, name: str) -> str:
    return " ".join(container(overlay, name)["command"])


def selected(selector: dict[str, Any], overlay: str) -> set[str]:
    names = set(pods(overlay))
    if labels := selector.get("matchLabels"):
        names &= {labels[NAME]}
    for expression in selector.get("matchExpressions", ()):
        assert (expression["key"], expression["operator"]) == (NAME, "In")
        assert set(expression["values"]) <= names
        names &= set(expression["values"])
    return names


@overlays
def test_every_part_is_there(overlay: str) -> None:
    assert set(pods(overlay)) == set(MODULES) | OF_OTHERS


@overlays
def test_everything_lies_in_one_namespace_under_a_name_of_its_own(overlay: str) -> None:
    rest = [each for each in RENDERED[overlay] if each["kind"] != "Namespace"]
    names = [(each["kind"], each["metadata"]["name"]) for each in rest]

    assert {each["metadata"]["namespace"] for each in rest} == {"firsttoken"}
    assert len(set(names)) == len(names)


def test_every_file_is_used() -> None:
    named = {"prometheus-adapter.yaml"}
    for path in ROOT.rglob("kustomization.yaml"):
        text = yaml.safe_load(path.read_text())
        files = [*text["resources"], *(each["path"] for each in text.get("patches", ()))]
        files += [name for each in text.get("configMapGenerator", ()) for name in each["files"]]
        named |= {path.name, *files}

    assert [path for path in ROOT.rglob("*.*") if path.is_file() and path.name not in named] == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@overlays
def test_kubectl_makes_the_same_of_it(overlay: str) -> None:
    made = subprocess.run(
        ["kubectl", "kustomize", ROOT / "overlays" / overlay],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    def key(manifest: Manifest) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"]["name"]

    theirs = sorted(yaml.safe_load_all(made.stdout), key=key)
    assert sorted(RENDERED[overlay], key=key) == theirs


def test_what_is_not_rendered_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: a-\n")

    with pytest.raises(ValueError, match="namePrefix: not known here"):
        render(tmp_path)
    with pytest.raises(KeyError):
        apply({"spec": {}}, {"op": "replace", "path": "/spec/replicas", "value": 1})
    with pytest.raises(KeyError):
        apply({"spec": {}}, {"op": "add", "path": "/specs/replicas", "value": 1})


@overlays
@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_process_is_one_of_ours_with_options_that_it_has(
    overlay: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = command(overlay, name)
    module = re.search(r"python -m (\S+)", line)
    assert module is not None
    assert module[1] == MODULES[name]

    main = importlib.import_module(f"{module[1]}.__main__").main
    with pytest.raises(SystemExit):
        main(["--help"])

    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    given = set(re.findall(r"(?<= )--[a-z-]+", line))
    assert "--listen" in given
    assert given <= options
    assert line.startswith(("python ", "sh -c exec python ", "sh -c sed ")), "PID 1 hears of a stop"


@overlays
@pytest.mark.parametrize("name", sorted(set(MODULES) - {"prefill", "decode"}))
def test_ports_are_those_it_listens_on_and_as_in_compose(overlay: str, name: str) -> None:
    line = command(overlay, name)
    listened = {int(each) for each in re.findall(r'POD_IP\)?"?:(\d+)', line.replace('"', ""))}
    in_compose = {
        int(each)
        for each in re.findall(r"listen=\S+?:(\d+)", " ".join(STACK["services"][name]["command"]))
    }

    assert set(ports(overlay, name).values()) == listened == in_compose


@overlays
def test_processes_find_every_replica_of_control(overlay: str) -> None:
    [control] = (
        each for each in of_kind(overlay, "StatefulSet") if each["metadata"]["name"] == "control"
    )
    port = ports(overlay, "control")["grpc"]
    replicas = [f"control-{index}.control:{port}" for index in range(control["spec"]["replicas"])]

    for name in set(MODULES) - {"control"}:
        assert f"--control={','.join(replicas)}" in command(overlay, name)


@overlays
@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_is_said_or_listened_to_in_the_clear(overlay: str, name: str) -> None:
    pod, one = pods(overlay)[name]["spec"], container(overlay, name)
    [settings] = (
        each
        for each in of_kind(overlay, "ConfigMap")
        if each["metadata"]["name"] == "firsttoken-process"
    )
    [mount] = (each for each in one["volumeMounts"] if each["name"] == "tls")
    [volume] = (each for each in pod["volumes"] if each["name"] == "tls")

    assert INSECURE_VARIABLE not in settings["data"]
    assert settings["data"][TLS_DIR_VARIABLE] == mount["mountPath"]
    assert one["envFrom"] == [{"configMapRef": {"name": "firsttoken-process"}}]
    assert "--insecure" not in command(overlay, name)
    assert "secret" in volume


def test_every_variable_is_read_somewhere() -> None:
    [settings] = (
        each
        for each in of_kind("cpu", "ConfigMap")
        if each["metadata"]["name"] == "firsttoken-process"
    )
    source = "".join(
        path.read_text()
        for folder in ("services/runtime", "services/cli")
        for path in (REPOSITORY / folder).glob("*.py")
    )

    assert [name for name in settings["data"] if f'"{name}"' not in source] == []


@overlays
def test_a_container_can_do_little_harm(overlay: str) -> None:
    for manifest in RENDERED[overlay]:
        for each in containers(manifest):
            pod = pod_of(manifest)
            assert pod is not None
            allowed = each["securityContext"]
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
            assert pod["spec"]["automountServiceAccountToken"] is False
            assert allowed["readOnlyRootFilesystem"] is True
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in each["resources"]["limits"]
            mounted = {volume["name"] for volume in each["volumeMounts"]}
            claims = manifest["spec"].get("volumeClaimTemplates", ())
            there = {volume["name"] for volume in pod["spec"].get("volumes", ())}
            assert mounted == there | {claim["metadata"]["name"] for claim in claims}


@overlays
@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_pod_says_how_it_is(overlay: str, name: str) -> None:
    one = container(overlay, name)

    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = one[kind]
        if "httpGet" in probe:
            assert (name, probe["httpGet"]["port"]) == ("gateway", "https")
            continue
        line = probe["exec"]["command"][-1]
        place = re.fullmatch(r'exec firsttoken probe "(.+)"', line)
        assert place is not None
        if name in ("prefill", "decode"):
            assert place[1] == "$(cat /tmp/address)"
            assert "--ready-fd=3 3>/tmp/address" in command(overlay, name)
        else:
            assert int(place[1].removeprefix("$POD_IP:")) in ports(overlay, name).values()


@overlays
def test_a_worker_is_drained_within_its_grace(overlay: str) -> None:
    for name in ("prefill", "decode"):
        hook = container(overlay, name)["lifecycle"]["preStop"]["exec"]["command"][-1]
        found = re.fullmatch(
            r'exec firsttoken (\w+) "\$\(cat /tmp/address\)" --seconds (\d+)', hook
        )
        assert found is not None
        assert found[1] in COMMANDS
        # Then comes SIGTERM, whose own grace is 5 s.
        assert int(found[2]) + 10 <= pods(overlay)[name]["spec"]["terminationGracePeriodSeconds"]


@overlays
def test_every_selector_finds_pods_and_every_port_is_theirs(overlay: str) -> None:
    for service in of_kind(overlay, "Service"):
        [name] = selected({"matchLabels": service["spec"]["selector"]}, overlay)
        for port in service["spec"].get("ports", ()):
            assert ports(overlay, name)[port["targetPort"]] == port["port"]
    for budget in of_kind(overlay, "PodDisruptionBudget"):
        assert len(selected(budget["spec"]["selector"], overlay)) == 1
    for manifest in of_kind(overlay, "Deployment", "StatefulSet", "DaemonSet"):
        assert selected(manifest["spec"]["selector"], overlay) == {manifest["metadata"]["name"]}


@overlays
def test_policies_allow_the_calls_that_are_made_and_no_others(overlay: str) -> None:
    denied, allowed = set(), set()
    for policy in of_kind(overlay, "NetworkPolicy"):
        targets = selected(policy["spec"]["podSelector"], overlay)
        if "ingress" not in policy["spec"]:
            denied |= targets
        for rule in policy["spec"].get("ingress", ()):
            for target in targets:
                own = set(ports(overlay, target).values())
                asked = {each["port"] for each in rule.get("ports", ())}
                assert asked & own if asked else target in ("prefill", "decode")
            for peer in rule.get("from", ()):
                if "podSelector" in peer:
                    callers = selected(peer["podSelector"], overlay)
                    allowed |= {(caller, target) for caller in callers for target in targets}

    assert denied == set(pods(overlay))
    assert allowed == CALLS


@overlays
def test_the_configuration_holds(overlay: str) -> None:
    [mesh] = (
        each
        for each in of_kind(overlay, "ConfigMap")
        if each["metadata"]["name"] == "firsttoken-mesh"
    )
    settings = tomllib.loads(mesh["data"]["mesh.toml"])
    # Not every build has it.
    engine = settings["worker"].pop("engine")
    config = parse(settings)

    assert engine == {"cpu": "llamacpp", "gpu": "tensorrt_llm"}[overlay]
    assert config.router.require_credentials
    assert config.control.redis_url == "redis://:PASSWORD@redis-control:6379"
    assert "s|PASSWORD|$REDIS_PASSWORD|" in command(overlay, "control")
    assert config.kvstore.redis_cluster
    assert config.kvstore.redis_url == "redis://redis-cluster:6379"
    [mount] = (
        each for each in container(overlay, "kvstore")["volumeMounts"] if each["name"] == "redis"
    )
    assert config.kvstore.redis_password_file == f"{mount['mountPath']}/password"


def test_only_on_the_hosts_network_blocks_are_shared() -> None:
    on_host = {name for name, pod in pods("gpu").items() if pod["spec"].get("hostNetwork")}

    assert on_host == {"prefill", "decode", "kvstore"}
    assert not any(pod["spec"].get("hostNetwork") for pod in pods("cpu").values())


def test_workers_come_and_go_by_what_is_measured() -> None:
    values = yaml.safe_load((ROOT / "prometheus-adapter.yaml").read_text())
    rules = {rule["name"]["as"]: rule for rule in values["rules"]["external"]}
    described = (REPOSITORY / "docs" / "metrics.md").read_text()
    scalers = {each["metadata"]["name"]: each for each in of_kind("gpu", "HorizontalPodAutoscaler")}
    asked = {}
    for name, scaler in scalers.items():
        [scaled] = (
            each for each in of_kind("gpu", "StatefulSet") if each["metadata"]["name"] == name
        )
        assert "replicas" not in scaled["spec"], "applying it again would undo the scaling"
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == ("StatefulSet", name)
        [metric] = scaler["spec"]["metrics"]
        asked[name] = metric["external"]["metric"]["name"]

    assert set(asked.values()) == set(rules)
    for rule in rules.values():
        text = f"{rule['seriesQuery']} {rule['metricsQuery']}"
        for metric in re.findall(r"firsttoken_\w+", text):
            family, suffix = re.fullmatch(r"(\w+?)(_count|_sum)", metric).groups()  # type: ignore[union-attr]
            assert f"`{family}_bucket`, `_count`, `_sum`" in described, suffix
    segments = {
        name: set(re.findall(r'segment="(\w+)"', rules[metric]["metricsQuery"]))
        for name, metric in asked.items()
    }
    assert segments == {
        "prefill": {str(Segment.PREFILL_QUEUE)},
        "decode": {str(Segment.QUEUE)},
    }
