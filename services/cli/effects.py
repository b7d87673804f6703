"""What changes of a configuration did, for a person."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from services.cli.kv_tables import table

_FIGURES = {
    "requests": "requests",
    "ttft_mean_ms": "TTFT mean, ms",
    "ttft_p50_ms": "P50",
    "ttft_p95_ms": "P95",
    "tpot_mean_ms": "TPOT mean, ms",
    "hit_rate": "hit rate",
}


def show(found: Mapping[str, Any]) -> Iterator[str]:
    rows = found["generations"]
    if not rows:
        yield "Nothing is known of any configuration yet."
        return
    for row in rows:
        yield f"generation {row['generation']}{_since(row['since_unix_s'])}"
        for key, (before, after) in row["changes"].items():
            yield f"  {key} = {json.dumps(after)}  (was {json.dumps(before)})"
        if row["effect"] is not None:
            yield f"  against generation {row['effect']['against']}: {_verdict(row['effect'])}"
    yield ""
    cells = [
        (str(row["generation"]), *(_cell(name, row[name]) for name in _FIGURES)) for row in rows
    ]
    yield from table([("generation", *_FIGURES.values()), *cells])
    yield ""
    yield f"Differences are more than noise by {found['test']}."


def _verdict(effect: Mapping[str, Any]) -> str:
    parts = [
        f"{text} {100 * figure['change']:+.0f} % (p = {figure['p']:g})"
        for name, text in (("ttft", "TTFT"), ("tpot", "TPOT"), ("hit_rate", "hit rate"))
        if (figure := effect.get(name))
        and figure["more_than_noise"]
        and figure["change"] is not None
    ]
    text = ", ".join(parts) or effect["verdict"]
    return f"{text}; {effect['note']}" if effect.get("note") else text


def _since(unix_s: float | None) -> str:
    if unix_s is None:
        return ""
    return f", since {datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "requests":
        return str(value)
    return f"{value:.3f}" if name == "hit_rate" else f"{value:.1f}"
