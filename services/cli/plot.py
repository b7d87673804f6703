"""What benchmarks measured, as one HTML file that needs nothing else. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from services.cli import svg

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --dim: #666; --grid: #ddd;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b58900; --c5: #56b4e9;
  --c6: #7a5195; --c7: #555; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e6e8ea; --dim: #9aa0a6;
  --grid: #33383d; --c0: #4aa8e0; --c1: #ff8a3d; --c2: #2fc79b; --c3: #e59fc6; --c4: #e0b53a;
  --c5: #8fd0f5; --c6: #b48bd0; --c7: #aaa; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 680px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.3em; } h2 { font-size: 1em; margin: 2em 0 .3em; }
p { margin: .2em 0; color: var(--dim); } svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; }
.grid { stroke: var(--grid); } .mark { stroke: var(--ink); stroke-dasharray: 4 3; }
polyline { fill: none; stroke-width: 2; }
.legend { color: var(--ink); } .key { display: inline-block; width: .8em; height: .8em;
  margin: 0 .3em 0 .9em; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: right; padding: .2em .6em; border-bottom: 1px solid var(--grid);
  white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
"""
_SERIES = "".join(
    f".fill{n} {{ fill: var(--c{n}); background: var(--c{n}); }}"
    f" .line{n} {{ stroke: var(--c{n}); }}\n"
    for n in range(svg.MAX_SERIES)
)


def page(
    document: Mapping[str, Any],
    head: Iterable[str],
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> str:
    """Of `bench route`. `head`: what was measured, in lines. `header` and `rows`: the table of
    all figures."""
    strategies = document["strategies"]
    curves = document["ttft_curve_ms"]
    ideal = document["oracle"]["hit_rate"]
    parts = [
        f"<h1>Routing strategies: {escape(document['workload']['name'])}</h1>",
        *(f"<p>{escape(line)}</p>" for line in head),
        "<h2>Time to first token: share of requests that had it within so many ms</h2>",
        svg.legend(list(curves)),
        svg.curves(curves),
        *_bars(strategies, "ttft_p50_ms", "Time to first token, median, ms", digits=1),
        *_bars(strategies, "ttft_p95_ms", "Time to first token, 95th percentile, ms", digits=1),
        *_bars(
            strategies,
            "hit_rate",
            "Share of prompt tokens found in cache (dashed: an offline router that knows all)",
            digits=3,
            mark=ideal,
        ),
        *_bars(
            strategies,
            "work_max",
            "Work of the busiest worker, in means (dashed: even)",
            digits=3,
            mark=1.0,
        ),
        "<h2>All figures</h2>",
        table(header, rows),
    ]
    return frame("firsttoken bench route", parts)


def frame(title: str, parts: Iterable[str]) -> str:
    """The whole page. `parts`: HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{_SERIES}</style></head>\n<body>"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _bars(
    strategies: Sequence[Mapping[str, Any]],
    figure: str,
    title: str,
    *,
    digits: int,
    mark: float | None = None,
) -> list[str]:
    values = {row["strategy"]: row[figure] for row in strategies}
    return bars(values, title, digits=digits, mark=mark)


def bars(
    values: Mapping[str, float | None], title: str, *, digits: int, mark: float | None = None
) -> list[str]:
    """One for each name that has a figure; a dashed line at `mark`."""
    known = {name: value for name, value in values.items() if value is not None}
    if not known:
        return []
    return [f"<h2>{escape(title)}</h2>", svg.bars(known, digits=digits, mark=mark)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>{line("th", header)}{body}</table></div>'
