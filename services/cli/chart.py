"""A ledger as a small bar chart. Pure."""

from __future__ import annotations

from collections.abc import Mapping

WIDTH = 40
BLOCKS = " ▏▎▍▌▋▊▉█"
# For a terminal that cannot print the blocks.
ASCII_BLOCKS = " #"


def render(
    ledger_ms: Mapping[str, float],
    residual_ms: float,
    total_ms: float,
    *,
    width: int = WIDTH,
    blocks: str = BLOCKS,
) -> list[str]:
    """A line a segment in the ledger's order, then what no segment owns, then the total."""
    rows = {**ledger_ms, "residual": residual_ms}
    longest = max(len(name) for name in rows)

    def line(name: str, value_ms: float, rest: str) -> str:
        return f"  {name:<{longest}} {value_ms:9.2f} ms  {rest}".rstrip()

    scale = 1 / total_ms if total_ms > 0 else 0.0
    lines = [line(name, value, bar(value * scale, width, blocks)) for name, value in rows.items()]
    return [*lines, line("total", total_ms, "to the first token")]


def bar(share: float, width: int, blocks: str = BLOCKS) -> str:
    """A bar of `share` of the width; what is more than nothing shows at least a sliver."""
    steps = len(blocks) - 1
    filled = round(min(max(share, 0.0), 1.0) * width * steps)
    if share > 0:
        filled = max(filled, 1)
    whole, part = divmod(filled, steps)
    return blocks[-1] * whole + (blocks[part] if part else "")


def blocks_for(encoding: str | None) -> str:
    try:
        BLOCKS.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII_BLOCKS
    return BLOCKS
