"""Prometheus itself reads what is shipped for it, and every panel of the dashboard shows something.

FIRSTTOKEN_PROMETHEUS is the path of a Prometheus with promtool beside it: `make test-backends`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scripts import dashboard
from tests.cli.running import Run, wait_for
from tests.deploy.traffic import send
from tests.runtime.ports import free_port

PROMETHEUS = os.environ.get("FIRSTTOKEN_PROMETHEUS", "")
FOLDER = Path(__file__).resolve().parent.parent.parent / "deploy" / "prometheus"
# For --exec: says where the mesh is, and keeps it until it is ended.
SERVE = 'echo "$FIRSTTOKEN_ROUTER $FIRSTTOKEN_PAGE"; exec sleep 1000'
# Caches so small that KV comes out of every tier, and prompts long enough to be handed off.
SETTINGS = (
    "worker.simulated.prefill_tokens_per_s=6000",
    "worker.simulated.num_blocks=48",
    "worker.num_slots=4",
    "worker.kv_load=always",
    "worker.handoff_min_tokens=256",
    "kvstore.capacity_mb=1",
    "observer.slo_ttft_ms=60",
)
TRAFFIC_S = 25.0
# No engine here speculates.
WITHOUT_DATA = {"mean length"}

pytestmark = [
    pytest.mark.skipif(not PROMETHEUS, reason="FIRSTTOKEN_PROMETHEUS names no Prometheus"),
    pytest.mark.timeout(300),
]


class Watched(NamedTuple):
    """A mesh that has had requests, and a Prometheus that has scraped it meanwhile."""

    page: str
    prometheus: str

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[float]:
        result = self.get("query", query=expression)["result"]
        return [float(each["value"][1]) for each in result]


def promtool(*arguments: str, text: str = "") -> str:
    done = subprocess.run(
        [Path(PROMETHEUS).with_name("promtool"), *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def scraping(directory: Path, page: str) -> Iterator[str]:
    """A Prometheus with the configuration that is shipped, but once a second."""
    shipped = (FOLDER / "prometheus.yml").read_text()
    (directory / "prometheus.yml").write_text(
        shipped.replace("15s", "1s").replace("observer:7190", page.removeprefix("http://"))
    )
    (directory / "rules.yml").write_text((FOLDER / "rules.yml").read_text())
    address = f"127.0.0.1:{free_port()}"
    command = [
        PROMETHEUS,
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
    ]
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        wait_for(
            lambda: is_ready(f"http://{address}"),
            60.0,
            lambda: (directory / "prometheus.log").read_text(),
        )
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    options = [option for setting in SETTINGS for option in ("--set", setting)]
    run = Run(
        *("up", "--engine", "simulated", "--workers", "2", "--prefill-workers", "1"),
        *("--exec", SERVE, *options),
        directory=directory,
    )
    try:
        assert run.process.stdout is not None
        line = run.process.stdout.readline()
        assert line, f"the mesh did not start: {run.finish().stderr}"
        router, page = line.split()
        with scraping(directory, page) as prometheus:
            assert asyncio.run(send(router, seconds=TRAFFIC_S)) > 50
            yield Watched(page, prometheus)
    finally:
        run.process.terminate()
        run.close()


def test_promtool_finds_nothing_wrong_with_configuration_and_rules() -> None:
    promtool("check", "config", "--lint=all", "--lint-fatal", str(FOLDER / "prometheus.yml"))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(FOLDER / "rules.yml"))


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(FOLDER / "rules_test.yml"))


def test_promtool_finds_nothing_wrong_with_the_metrics(watched: Watched) -> None:
    with urllib.request.urlopen(f"{watched.page}/metrics", timeout=30) as response:
        promtool("check", "metrics", text=response.read().decode())


def test_prometheus_takes_all_of_it(watched: Watched) -> None:
    [target] = watched.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    rules = [rule for group in watched.get("rules")["groups"] for rule in group["rules"]]
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}


@pytest.mark.parametrize(
    ("title", "legend", "expression"),
    [
        (panel["title"], target["legendFormat"], target["expr"])
        for panel in json.loads(dashboard.TARGET.read_text())["panels"]
        for target in panel.get("targets", ())
    ],
)
def test_every_panel_shows_something(
    watched: Watched, title: str, legend: str, expression: str
) -> None:
    meant = {"$__rate_interval": "20s", "$request_class": ".*", "$tenant": ".*"}
    for word, value in meant.items():
        expression = expression.replace(word, value)
    values = watched.query(expression)
    assert legend in WITHOUT_DATA or any(map(math.isfinite, values)), f"{title}: {expression}"


def test_a_first_token_has_a_trace_that_can_be_opened(watched: Watched) -> None:
    name = "gen_ai_server_time_to_first_token_seconds_bucket"
    now_s = time.time()
    found = watched.get("query_exemplars", query=name, start=f"{now_s - 600}", end=f"{now_s}")
    traces = {each["labels"]["trace_id"] for series in found for each in series["exemplars"]}
    assert traces
    url = f"{watched.page}/api/requests/{traces.pop()}"
    with urllib.request.urlopen(url, timeout=30) as response:
        assert response.status == 200


def test_series_say_of_which_process_they_are(watched: Watched) -> None:
    query = "count by (service, instance) (firsttoken_process_cpu_seconds_total)"
    found = watched.get("query", query=query)["result"]
    services = sorted(each["metric"]["service"] for each in found)
    once = ["gateway", "kvstore", "observer", "router", "tokenizer"]
    assert services == [*once, "worker", "worker", "worker"]


def test_the_mesh_leaks_nothing_once_it_is_idle(watched: Watched) -> None:
    wait_for(
        lambda: not any(watched.query("firsttoken_leak_held")),
        30.0,
        lambda: str(watched.get("query", query="firsttoken_leak_held > 0")["result"]),
    )
