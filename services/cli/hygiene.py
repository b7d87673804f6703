"""firsttoken hygiene: which changing text in prompts keeps them out of the caches."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from services.cli import rpc
from services.cli.observer import ask
from services.cli.plain import plain, quoted
from services.cli.why import place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show which text that changes with each request, such as a time stamp, stands before"
        " text that does not, and the hit rate that prompts would have without it. Text is shown"
        " with the setting observer.show_text."
    )
    rpc.add_control_option(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    found = ask(arguments, "api", "hygiene")
    print(json.dumps(found) if arguments.json else "\n".join(show(found)))
    return 0


def show(found: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    return map(plain, _lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{found['requests']} requests, {found['prompt_tokens']} prompt tokens"
    if found["hit_rate"] is not None:
        yield f"  hit rate                       {found['hit_rate']:.1%}"
    if found["predicted_hit_rate"] is not None:
        yield f"  without the stamps below       {found['predicted_hit_rate']:.1%}"
    if not found["changes"] and found["predicted_hit_rate"] is not None:
        yield ""
        yield "Nothing that changes stands before text that does not."
    for number, change in enumerate(found["changes"], start=1):
        yield ""
        yield from _change(number, change)
    for note in found["notes"]:
        yield ""
        yield f"Note: {note}"


def _change(number: int, change: Mapping[str, Any]) -> Iterator[str]:
    kind = change["kind"] or "text that changes"
    yield (
        f"{number}. {kind}: {change['values']} values in {change['requests']} requests; in"
        f" {change['trace_id']} tokens {change['start_token']} to {change['end_token']}"
        f"{place(change)}"
    )
    yield (
        f"   {change['lost_tokens']} tokens behind it are the same; hit rate without it alone"
        f" {change['predicted_hit_rate_alone']:.1%}"
    )
    if "examples" in change:
        yield f"   after {quoted(change['before'])}:"
        yield from (f"     {quoted(each)}" for each in change["examples"])
    yield f"   {change['advice']}"
