"""Answers of `firsttoken kv` for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

TIER_NAMES = {"l1": "L1 (memory)", "l2": "L2 (Redis)"}


def show_stats(document: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for store in document["stores"]:
        lines += [*([""] if lines else []), _who(store), *_stats_of(store)]
    return lines


def show_match(document: dict[str, Any]) -> list[str]:
    lines = [
        f"{document['tokens']} tokens, {document['blocks']} full blocks"
        f" of {document['block_tokens']}"
    ]
    for store in document["stores"]:
        for engine in store.get("engines", ()):
            lines.append(
                f"{_who(store)}, {engine['engine']} engine:"
                f" {engine['l1_tokens']} tokens ({engine['l1_blocks']} blocks) in L1,"
                f" {engine['tokens']} ({engine['blocks']}) in L1 or L2"
            )
        if "error" in store:
            lines.append(_who(store))
    return lines


def show_evicted(document: dict[str, Any]) -> list[str]:
    return [
        f"{_who(store)}: {store['l1_blocks']} blocks from L1, {store['l2_blocks']} from L2"
        if "error" not in store
        else _who(store)
        for store in document["stores"]
    ]


def _who(store: dict[str, Any]) -> str:
    name = f"{store['id']} at {store['address']}"
    return f"{name}: {store['error']['message']}" if "error" in store else name


def _stats_of(store: dict[str, Any]) -> Iterator[str]:
    if "error" in store:
        return
    header = ("tier", "blocks", "of", "MiB", "hits", "misses", "evicted", "MiB read", "MiB written")
    rows = [_tier_row(name, store[tier]) for tier, name in TIER_NAMES.items() if store[tier]]
    yield from table([header, *rows])
    if l2 := store["l2"]:
        if not l2["connected"]:
            yield "  Redis does not answer"
        if l2["num_pending_writes"] or l2["num_dropped_writes"]:
            waiting, dropped = l2["num_pending_writes"], l2["num_dropped_writes"]
            yield f"  blocks for Redis: {waiting} waiting, {dropped} dropped"
    if store["tenants"]:
        tenants = [
            (each["tenant"] or '""', *(str(each[f"num_{name}"]) for name in _TENANT_FIGURES))
            for each in store["tenants"]
        ]
        yield from table([("tenant in L1", *_TENANT_FIGURES), *tenants])
    for reason, number in sorted(store["rejected"].items()):
        yield f"  rejected: {number} for {reason}"


_TENANT_FIGURES = ("blocks", "hits", "evicted")


def _tier_row(name: str, stats: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        str(stats["num_blocks"]),
        str(stats["capacity_blocks"] or "-"),
        _mib(stats["bytes"]),
        *(str(stats[f"num_{figure}"]) for figure in ("hits", "misses", "evicted")),
        _mib(stats["bytes_read"]),
        _mib(stats["bytes_written"]),
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first column to the left, the figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        cells = [name.ljust(widths[0])]
        cells += [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        yield "  " + "  ".join(cells)
