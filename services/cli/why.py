"""firsttoken why: why a request's prompt was not in a cache."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from services.cli import rpc
from services.cli.observer import ask
from services.cli.plain import plain, quoted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say why a request's prompt, or a part of it, was not in a cache: where it leaves what"
        " was, and one cause. Text is shown with the setting observer.show_text."
    )
    parser.add_argument(
        "trace_id",
        type=_trace_id,
        metavar="TRACE_ID",
        help="of the request, as its answer, its span or the page has it; the first 6 digits do",
    )
    rpc.add_control_option(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _trace_id(text: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{6,32}", text):
        raise argparse.ArgumentTypeError(f"must be 6 to 32 hexadecimal digits; got {text!r}")
    return text


def run(arguments: argparse.Namespace) -> int:
    found = ask(arguments, "api", "why", arguments.trace_id)
    print(json.dumps(found) if arguments.json else "\n".join(show(found)))
    return 0


def show(found: Mapping[str, Any]) -> Iterator[str]:
    """For people."""
    return map(plain, _lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    cause = found["cause"].replace("_", " ")
    yield f"{found['trace_id']}: {cause}"
    yield f"  {found['summary']}"
    yield ""
    yield from _figures(found)
    for text in found["evidence"]:
        yield f"  - {text}"
    if difference := found.get("difference"):
        yield ""
        yield from _difference(difference, found["prompt_tokens"])
    if change := found.get("change"):
        yield ""
        yield from _change(change)
    for other in found.get("also", ()):
        yield ""
        yield f"Also: {other['summary']} ({other['lost_tokens']} tokens)"


def _figures(found: Mapping[str, Any]) -> Iterator[str]:
    tokens, cached = found["prompt_tokens"], found["cached_tokens"]
    parts = [f"{tokens} prompt tokens, {cached} of them cached"]
    if found["predicted_tokens"] is not None:
        parts.append(f"{found['predicted_tokens']} expected")
    parts.append(f"{found['lost_tokens']} computed for this reason")
    yield f"  {', '.join(parts)}"
    if found["worker_id"]:
        ttft = "no first token" if found["ttft_ms"] is None else f"TTFT {found['ttft_ms']:.0f} ms"
        yield f"  {found['worker_id']}, {found['strategy']}, {ttft}"


def _difference(difference: Mapping[str, Any], num_tokens: int) -> Iterator[str]:
    nearest = f"{difference['nearest_trace_id']}, {difference['nearest_ago_s']} s before"
    if difference["token"] == num_tokens:
        yield f"An earlier prompt has all of its tokens: {nearest}"
        return
    yield (
        f"It leaves the nearest earlier prompt at token {difference['token']}{place(difference)}:"
        f" {nearest}"
    )
    if "here" in difference:
        yield f"    both   ...{quoted(difference['before'])}"
        yield f"    here   {quoted(difference['here'])}..."
        yield f"    there  {quoted(difference['there'])}..."


def _change(change: Mapping[str, Any]) -> Iterator[str]:
    kind = change["kind"] or "something"
    yield (
        f"What changes: {kind}, tokens {change['start_token']} to {change['end_token']}"
        f"{place(change)}; {change['values']} values in {change['compared_prompts'] + 1} prompts,"
        f" {change['agreed_tokens_behind']} tokens behind it are the same"
    )
    if "text" in change:
        yield f"    here   {quoted(change['text'])}"
        for text in change["others"]:
            yield f"    others {quoted(text)}"


def place(found: Mapping[str, Any]) -> str:
    """Where in the chat, as far as that is known."""
    if found["character"] is None:
        return ""
    text = f"character {found['character']}"
    if found.get("end_character") is not None:
        text = f"characters {found['character']} to {found['end_character']}"
    message = "" if found["message"] is None else f", message {found['message']} ({found['role']})"
    return f"{message}, {text}"
