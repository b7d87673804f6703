"""What a benchmark measured, for a person: names and figures, and tables where there are rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from services.cli.kv_tables import table


def show_figures(document: Mapping[str, Any], indent: str = "  ") -> Iterator[str]:
    """Mappings become headings, lists of mappings become tables."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from show_figures(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{name}"
            rows = [dict(_flatten(row)) for row in value]
            header = tuple(dict.fromkeys(key for row in rows for key in row))
            cells = [tuple(_cell(row.get(key, "")) for key in header) for row in rows]
            yield from (f"{indent}{line}" for line in table([header, *cells]))
        else:
            yield f"{indent}{name:<34} {_cell(value)}"


def _flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
