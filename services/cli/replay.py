"""firsttoken replay: what recorded decisions would have come to with other settings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.cli import rpc
from services.cli.failures import Failure
from services.cli.kv_tables import table
from services.cli.settings import parse_assignments
from services.core.config import defaults
from services.core.errors import InvalidArgument
from services.simulation.recorded import Recording, read_recording
from services.simulation.what_if import Summary, caveats, is_faithful, recorded, replayed

MAX_WORKERS = 4096
_SECTIONS = ("router.", "worker.")
# Other settings have no part in a replay: its engine is simulated, it has neither stores nor
# prefill workers, and nothing goes over a network.
SETTINGS = frozenset(
    (
        *("router.routing_strategy", "router.index_max_blocks", "router.prefix_length"),
        *("router.concurrency_threshold", "router.max_queue", "router.batch_ageing_s"),
        *("router.max_wait_interactive_s", "router.max_wait_batch_s", "router.worker_wait_s"),
        *("router.max_attempts", "router.max_migrations", "router.max_deadline_s"),
        *("worker.num_slots", "worker.max_context_tokens", "worker.max_step_ms"),
        *("worker.max_batch_tokens", "worker.max_waiting"),
        *("worker.simulated.prefill_tokens_per_s", "worker.simulated.decode_step_ms"),
        *("worker.simulated.decode_step_ms_per_seq", "worker.simulated.num_blocks"),
        "worker.simulated.decode_overlap",
    )
)

_ROWS = {
    "requests": "requests",
    "answered": "answered",
    "hit_rate": "hit rate",
    "ttft_mean_ms": "TTFT mean, ms",
    "ttft_p50_ms": "TTFT P50, ms",
    "ttft_p95_ms": "TTFT P95, ms",
    "ttft_p99_ms": "TTFT P99, ms",
    "tpot_mean_ms": "TPOT mean, ms",
    "busiest_worker": "busiest worker / mean",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send what a router recorded (router.record_decisions) through a virtual mesh: first as it"
        " was, which shows how far a replay can be trusted, then with the changes."
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of router. or worker. that counts in a replay; may be repeated",
    )
    parser.add_argument(
        "--workers", type=_count, metavar="N", help="so many workers instead of those recorded"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    try:
        changes = _changes(arguments.set)
        recording = read_recording(arguments.file)
        columns = {"recorded": recorded(recording), "replayed": replayed(recording)}
        if changes or arguments.workers:
            columns["changed"] = replayed(recording, changes, arguments.workers)
    except OSError as error:
        raise Failure(f"cannot read {arguments.file}: {error.strerror}") from None
    except InvalidArgument as error:
        raise rpc.invalid(error) from None
    if arguments.json:
        print(json.dumps(_document(recording, columns, changes, arguments.workers)))
    else:
        print("\n".join(_lines(recording, columns, changes, arguments.workers)))
    return 0


def _changes(assignments: list[str]) -> dict[str, Any]:
    changes, known = parse_assignments(assignments), defaults()
    for key in changes:
        if not key.startswith(_SECTIONS):
            sections = " and ".join(_SECTIONS)
            raise Failure(f"--set {key}: only settings of {sections} have a part in a replay")
        if key in known and key not in SETTINGS:
            section = key[: key.index(".") + 1]
            names = sorted(each for each in SETTINGS if each.startswith(section))
            raise Failure(
                f"--set {key}: it has no part in a replay; those that have: {', '.join(names)}"
            )
    return changes


def _document(
    recording: Recording,
    columns: Mapping[str, Summary],
    changes: Mapping[str, Any],
    num_workers: int | None,
) -> dict[str, Any]:
    return {
        "file": recording.name,
        "faithful": is_faithful(columns["recorded"], columns["replayed"]),
        "caveats": list(caveats(recording)),
        "changes": dict(changes),
        "workers": num_workers,
        **{name: _plain(summary) for name, summary in columns.items()},
    }


def _plain(summary: Summary) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in summary._asdict().items()
    }


def _lines(
    recording: Recording,
    columns: Mapping[str, Summary],
    changes: Mapping[str, Any],
    num_workers: int | None,
) -> Iterator[str]:
    was, again = columns["recorded"], columns["replayed"]
    yield f"{recording.name}: {was.requests} requests"
    yield from (f"  note: {caveat}" for caveat in caveats(recording))
    yield ""
    rows = [("", *columns)]
    for field, text in _ROWS.items():
        cells = (_cell(field, getattr(summary, field)) for summary in columns.values())
        rows.append((text, *cells))
    yield from table(rows)
    yield ""
    points = 100 * (again.hit_rate - was.hit_rate)
    verdict = "faithful" if is_faithful(was, again) else "not faithful: judge changes with care"
    yield (
        f"As it was, the replay is {verdict} (hit rate {points:+.1f} points, TTFT P50"
        f" {_ratio(again.ttft_p50_ms, was.ttft_p50_ms)})."
    )
    if len(columns) > len(("recorded", "replayed")):
        what = [f"{key} = {json.dumps(value)}" for key, value in changes.items()]
        what += [f"{num_workers} workers"] if num_workers else []
        same = _plain(columns["changed"]) == _plain(again)
        verdict = "It changes nothing here." if same else "Compare with the column `replayed`."
        yield f"Changed: {', '.join(what)}. {verdict}"


def _cell(field: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if isinstance(value, int):
        return str(value)
    return (
        f"{value:.3f}" if field == "hit_rate" else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )


def _ratio(now: float, before: float) -> str:
    if math.isnan(now) or not before > 0:
        return "unknown"
    return f"{100 * (now / before - 1):+.0f} %"


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"must be in [1, {MAX_WORKERS}]")
    return value
