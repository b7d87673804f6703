"""Make deploy/grafana/firsttoken.json of dashboard.toml beside it.

With --check nothing is written: exit status 1 says that the JSON is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana"
SOURCE, TARGET = FOLDER / "dashboard.toml", FOLDER / "firsttoken.json"

COLUMNS = 24
SIZES = {"stat": (4, 4), "timeseries": (8, 8)}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
CLASS = 'request_class=~"$request_class"'
WORDS = {"RATE": "$__rate_interval", "WHO": f'{CLASS}, tenant=~"$tenant"', "CLASS": CLASS}
# Without a value in the address bar: everybody.
VARIABLES = ("request_class", "tenant")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    made = make(SOURCE.read_text())
    if not parser.parse_args().check:
        TARGET.write_text(made)
    elif made != TARGET.read_text():
        print(f"{TARGET.name} is not what {SOURCE.name} says: run python scripts/dashboard.py")
        return 1
    return 0


def make(source: str) -> str:
    given = tomllib.loads(source)
    dashboard = {
        "title": given["title"],
        "uid": given["uid"],
        "schemaVersion": 39,
        "tags": ["firsttoken"],
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "graphTooltip": 1,
        "annotations": {"list": [_generations()]},
        "templating": {"list": [_datasource(), *map(_variable, VARIABLES)]},
        "panels": list(_lay_out(given["row"])),
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _lay_out(rows: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for row in rows:
        number += 1
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": row["title"], "gridPos": place, "panels": []}
        x, y, height = 0, y + 1, 0
        for panel in row["panel"]:
            kind = panel.get("kind", "timeseries")
            width, panel_height = panel.get("width", SIZES[kind][0]), SIZES[kind][1]
            if x + width > COLUMNS:
                x, y, height = 0, y + height, 0
            number += 1
            place = {"x": x, "y": y, "w": width, "h": panel_height}
            yield {"id": number, "gridPos": place, **_panel(kind, panel)}
            x, height = x + width, max(height, panel_height)
        y += height


def _panel(kind: str, panel: Mapping[str, Any]) -> dict[str, Any]:
    # Dots beside the curves, each a trace to open.
    more = {"exemplar": True} if panel.get("traces") else {}
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel.get("text", ""),
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": _field(kind, panel), "overrides": []},
        "options": _OPTIONS[kind],
        "targets": [
            {**_target(chr(ord("A") + number), legend, query), **more}
            for number, (legend, query) in enumerate(panel["queries"].items())
        ],
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"},
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
}


def _field(kind: str, panel: Mapping[str, Any]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    for color, value in zip(("orange", "red"), panel.get("warns", ()), strict=False):
        steps.append({"color": color, "value": value})
    field: dict[str, Any] = {
        "unit": panel.get("unit", "short"),
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if kind == "timeseries":
        stacked = panel.get("stacked", False)
        field["custom"] = {
            "fillOpacity": 40 if stacked else 5,
            "lineWidth": 1,
            "stacking": {"mode": "normal" if stacked else "none"},
            "thresholdsStyle": {"mode": "line" if "warns" in panel else "off"},
        }
    return field


def _target(letter: str, legend: str, query: str) -> dict[str, Any]:
    for word, meaning in WORDS.items():
        query = query.replace(word, meaning)
    return {"refId": letter, "datasource": DATASOURCE, "expr": query, "legendFormat": legend}


def _generations() -> dict[str, Any]:
    return {
        "name": "Configuration",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "purple",
        "expr": "changes(firsttoken_config_generation[$__rate_interval]) > 0",
        "titleFormat": "configuration changed",
        "step": "15s",
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _variable(name: str) -> dict[str, Any]:
    query = f"label_values(firsttoken_requests_total, {name})"
    return {
        "name": name,
        "label": name.replace("_", " "),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    sys.exit(main())
