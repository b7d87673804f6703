"""What is shipped for Prometheus and Grafana asks for metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import dashboard, metrics_page
from services.observer.exposition import series_names

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
RULES_TEST = (ROOT / "deploy" / "prometheus" / "rules_test.yml").read_text()
DASHBOARD: dict[str, Any] = json.loads(dashboard.TARGET.read_text())

METRIC = re.compile(r"(?<![\w:.$])(?:firsttoken|gen_ai)_\w+(?![\w:]*:)")
RECORDED = re.compile(r"(?<![\w:])\w*:firsttoken_\w+:\w+|firsttoken:\w+:\w+")

KNOWN = {
    name
    for section in metrics_page.sections()
    for metric, kind in section.metrics
    for name in series_names(metric, kind)
}
RECORDS = set(re.findall(r"record: (\S+)", RULES))


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (each["expr"] for each in DASHBOARD["annotations"]["list"])
    yield from (each.get("definition", "") for each in DASHBOARD["templating"]["list"])


def expressions_of_rules() -> list[str]:
    return re.findall(r"expr: (.+?)\n +(?:for|- record|- alert):", RULES, re.DOTALL)


def test_every_metric_that_is_asked_for_exists() -> None:
    texts = [*queries(), *expressions_of_rules()]
    asked = {name for text in texts for name in METRIC.findall(text)}
    assert len(asked) > 40
    assert not asked - KNOWN
    assert not {name for text in texts for name in RECORDED.findall(text)} - RECORDS


def test_every_rule_has_an_expression_that_is_looked_at() -> None:
    # All but the last of each group, whose end is another: an alert, with its `for`.
    assert len(expressions_of_rules()) == RULES.count("expr: ")


def test_every_alert_is_seen_to_fire() -> None:
    silent = r"eval_time: \S+, alertname: \w+, exp_alerts: \[\]"
    fired = set(re.findall(r"alertname: (\w+)", re.sub(silent, "", RULES_TEST)))
    assert fired == set(re.findall(r"- alert: (\w+)", RULES))


def test_names_are_told_apart_from_labels_and_records() -> None:
    text = (
        'rate(firsttoken_a_total{firsttoken_b="x"}[5m]) / firsttoken:c:ratio + k:firsttoken_d:sum'
    )
    assert METRIC.findall(text) == ["firsttoken_a_total", "firsttoken_b"]
    assert RECORDED.findall(text) == ["firsttoken:c:ratio", "k:firsttoken_d:sum"]


def test_two_metrics_never_share_a_name() -> None:
    kinds: dict[str, str] = {}
    for section in metrics_page.sections():
        for metric, kind in section.metrics:
            for name in series_names(metric, kind):
                assert kinds.setdefault(name, metric.name) == metric.name


@pytest.mark.parametrize("panel", [p for p in DASHBOARD["panels"] if p["type"] != "row"])
def test_panels_stay_within_the_page(panel: dict[str, Any]) -> None:
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= dashboard.COLUMNS
    assert panel["targets"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells


def test_what_is_made_of_something_else_is_up_to_date() -> None:
    assert dashboard.make(dashboard.SOURCE.read_text()) == dashboard.TARGET.read_text()
    page = metrics_page.PAGE.read_text()
    assert metrics_page.make(page) == page, "run: python scripts/metrics_page.py"
