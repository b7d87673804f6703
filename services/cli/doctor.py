"""firsttoken doctor: why first tokens are late, live or from a saved window."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.cli import rpc
from services.cli.doctor_replay import Expected, expect
from services.cli.failures import Failure
from services.cli.observer import ask_bytes
from services.cli.plain import plain
from services.core.errors import InvalidArgument
from services.observer.doctor import Diagnosis, examine
from services.observer.saved import Saved, load

HEALTHY, FINDINGS, BAD_INPUT = 0, 1, 2


class Judged(NamedTuple):
    saved: Saved
    diagnosis: Diagnosis
    # By the finding's place; None: there is no record of decisions.
    expected: Sequence[Expected | None]
    # Why a replay says nothing; "": it does.
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say why first tokens are late: the cause that explains most of it first, with the evidence"
        " and the setting to change. Exit status: 0 healthy, 1 findings, 2 bad input."
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a saved window; without one, what the observer of the mesh knows now",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the window that was judged")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="decisions that a router recorded, to replay changes with (default: where"
        " router.record_decisions of the window says, if it is on this machine)",
    )
    rpc.add_control_option(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    data = _read(arguments)
    try:
        saved = load(data.splitlines(), arguments.file.name if arguments.file else "the window")
    except InvalidArgument as error:
        raise _bad(error.message, error) from None
    if arguments.save is not None:
        _save(arguments.save, data)
    judged = _judge(saved, arguments.record)
    if arguments.json:
        print(json.dumps(_document(judged)))
    else:
        print("\n".join(map(plain, _lines(judged))))
    return FINDINGS if judged.diagnosis.findings else HEALTHY


def _read(arguments: argparse.Namespace) -> bytes:
    try:
        if arguments.file is None:
            return ask_bytes(arguments, "api", "window")
        if str(arguments.file) == "-":
            return sys.stdin.buffer.read()
        data: bytes = arguments.file.read_bytes()
        return data
    except Failure as failure:
        failure.exit_status = BAD_INPUT
        raise
    except OSError as error:
        raise _bad(f"cannot read {arguments.file}: {error.strerror}") from None


def _save(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise _bad(f"cannot write {path}: {error.strerror}") from None


def _judge(saved: Saved, record: Path | None) -> Judged:
    diagnosis = examine(saved.window, saved.clues)
    try:
        expected, note = expect(diagnosis.findings, saved.window.config, record)
    except InvalidArgument as error:
        raise _bad(error.message, error) from None
    except OSError as error:
        raise _bad(f"cannot read {record}: {error.strerror}") from None
    return Judged(saved, diagnosis, expected, note)


def _bad(message: str, error: InvalidArgument | None = None) -> Failure:
    if error is None:
        return Failure(message, exit_status=BAD_INPUT, code="INVALID_ARGUMENT")
    failure = rpc.invalid(error)
    failure.exit_status = BAD_INPUT
    return failure


def _document(judged: Judged) -> dict[str, Any]:
    document = judged.diagnosis.plain()
    for finding, expected in zip(document["findings"], judged.expected, strict=True):
        finding["replay"] = None if expected is None else expected._asdict()
    window = judged.saved.window
    return {
        "begin_unix_s": window.begin_unix_s,
        "end_unix_s": window.end_unix_s,
        **document,
        "replay_note": judged.note,
    }


def _lines(judged: Judged) -> Iterator[str]:
    window, diagnosis = judged.saved.window, judged.diagnosis
    minutes = f"{window.duration_s / 60:.1f} minutes"
    if diagnosis.findings:
        yield f"{diagnosis.num_requests} answered requests in {minutes}:"
    elif diagnosis.num_requests:
        yield f"Healthy: {diagnosis.num_requests} answered requests in {minutes}, nothing found."
    else:
        yield f"No request was answered in {minutes}: there is nothing to judge."
    pairs = zip(diagnosis.findings, judged.expected, strict=True)
    for number, (finding, expected) in enumerate(pairs, 1):
        yield ""
        yield f"{number}. {finding.cause.value} ({finding.severity.value})"
        yield f"   {finding.summary}"
        for evidence in finding.evidence:
            threshold = f" ({evidence.threshold})" if evidence.threshold else ""
            yield f"     {evidence.name}: {evidence.value}{threshold}"
        if finding.trace_ids:
            yield f"     traces: {', '.join(finding.trace_ids[:3])}"
        yield f"   change: {_change(finding.setting, finding.before, finding.after)}"
        yield f"   expected: {finding.expected}"
        if expected is not None:
            yield f"   replayed: {_replayed(expected)}"
    if judged.note and diagnosis.findings:
        yield ""
        yield judged.note
    if diagnosis.undecided:
        yield ""
        yield "Not enough evidence for, or against:"
        yield from (f"  {each.cause.value}: needs {each.needs}" for each in diagnosis.undecided)


def _change(setting: str, before: Any, after: Any) -> str:
    if not setting:
        return "no setting"
    if after is None:
        return setting if before is None else f"{setting}, which is {json.dumps(before)}"
    return f"{setting} from {json.dumps(before)} to {json.dumps(after)}"


def _replayed(expected: Expected) -> str:
    faithful = "" if expected.is_faithful else "; the replay is not faithful: judge with care"
    return (
        f"TTFT mean {expected.ttft_mean_before_ms:.1f} to {expected.ttft_mean_after_ms:.1f} ms, P95"
        f" {expected.ttft_p95_before_ms:.1f} to {expected.ttft_p95_after_ms:.1f} ms, hit rate"
        f" {expected.hit_rate_before:.3f} to {expected.hit_rate_after:.3f}{faithful}"
    )
