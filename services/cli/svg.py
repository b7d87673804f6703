"""Charts as inline SVG. Pure. Colours are the page's, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, BAR, GAP = 640, 18, 8
NAME_WIDTH, FIGURE_WIDTH = 150, 70
CURVE_HEIGHT, LEFT, BOTTOM, TOP = 300, 44, 34, 10
# As many as there are colours.
MAX_SERIES = 8


def bars(values: Mapping[str, float], *, digits: int, mark: float | None = None) -> str:
    """A bar for each name, from 0; a dashed line at `mark`."""
    room = WIDTH - NAME_WIDTH - FIGURE_WIDTH
    longest = max([*values.values(), mark or 0.0]) or 1.0
    height = len(values) * (BAR + GAP) + GAP
    parts = []
    for index, (name, value) in enumerate(values.items()):
        y = GAP + index * (BAR + GAP)
        length = room * value / longest
        parts += [
            _text(name, NAME_WIDTH - 8, y + BAR - 5, "end"),
            f'<rect class="fill{index % MAX_SERIES}" x="{NAME_WIDTH}" y="{y}"'
            f' width="{length:.1f}" height="{BAR}"/>',
            _text(f"{value:,.{digits}f}", NAME_WIDTH + length + 6, y + BAR - 5, "start"),
        ]
    if mark is not None:
        x = NAME_WIDTH + room * mark / longest
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    return _svg(height, parts)


def curves(series: Mapping[str, Sequence[float]]) -> str:
    """Cumulative shares. A series: the values at equally spaced shares from 0 to 1, rising;
    the axis of values is logarithmic."""
    everything = [value for values in series.values() for value in values if value > 0]
    low = math.floor(math.log10(min(everything, default=1.0)))
    high = max(math.ceil(math.log10(max(everything, default=10.0))), low + 1)
    parts = [*_grid(low, high)]
    for index, (name, values) in enumerate(series.items()):
        last = max(len(values) - 1, 1)
        points = " ".join(
            f"{_x(value, low, high):.1f},{_y(at / last):.1f}" for at, value in enumerate(values)
        )
        style = f"line{index % MAX_SERIES}"
        parts.append(
            f'<polyline class="{style}" points="{points}"><title>{escape(name)}</title></polyline>'
        )
    return _svg(CURVE_HEIGHT, parts)


def legend(names: Sequence[str]) -> str:
    keys = (
        f'<span class="key fill{index % MAX_SERIES}"></span>{escape(name)}'
        for index, name in enumerate(names)
    )
    return f'<p class="legend">{" ".join(keys)}</p>'


def _grid(low: int, high: int) -> Iterator[str]:
    for share in (0.0, 0.25, 0.5, 0.75, 0.95, 1.0):
        y = _y(share)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(f"{share:.0%}", LEFT - 6, y + 4, "end")
    for power in range(low, high + 1):
        x = _x(10.0**power, low, high)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{_y(0):.1f}"/>'
        yield _text(f"{10.0**power:,g}", x, CURVE_HEIGHT - BOTTOM + 18, "middle")


def _x(value: float, low: int, high: int) -> float:
    share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
    return LEFT + share * (WIDTH - LEFT - 30)


def _y(share: float) -> float:
    return TOP + (1 - share) * (CURVE_HEIGHT - BOTTOM - TOP)


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">{"".join(parts)}</svg>'
