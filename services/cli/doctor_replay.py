"""What the settings that the doctor would change come to in a replay of recorded decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from services.cli.replay import SETTINGS
from services.core.errors import InvalidArgument
from services.observer.doctor import Finding
from services.simulation.recorded import Recording, read_recording
from services.simulation.what_if import Summary, is_faithful, recorded, replayed

NO_RECORD = (
    "No record of decisions: with router.record_decisions=FILE, a replay says what a change would"
    " bring."
)


class Expected(NamedTuple):
    """The record as it was, replayed, and with the change."""

    ttft_mean_before_ms: float
    ttft_mean_after_ms: float
    ttft_p95_before_ms: float
    ttft_p95_after_ms: float
    hit_rate_before: float
    hit_rate_after: float
    is_faithful: bool


class Expectation(NamedTuple):
    # One for each finding; None: a replay has nothing to say of it.
    of_findings: list[Expected | None]
    # Why there is none; "": there is.
    note: str


def expect(
    findings: Sequence[Finding], config: Mapping[str, Any], record: Path | None
) -> Expectation:
    """`record`: as it was named. Raises InvalidArgument where that is none, OSError where it
    cannot be read.
    """
    changes = [_change(finding) for finding in findings]
    nothing: list[Expected | None] = [None for _ in findings]
    if not any(changes):
        return Expectation(nothing, "")
    path = record or _latest(str(config.get("router.record_decisions", "")))
    if path is None:
        return Expectation(nothing, NO_RECORD)
    try:
        recording = read_recording(path)
    except (InvalidArgument, OSError) as error:
        if record is not None:
            raise
        # The window's setting leads there, which may be another machine's.
        return Expectation(nothing, f"{path} is no record that can be replayed: {error}")
    if not recording.requests:
        return Expectation(nothing, f"{path.name} has no request to replay.")
    as_it_was = replayed(recording)
    faithful = is_faithful(recorded(recording), as_it_was)
    return Expectation(
        [_expected(recording, change, as_it_was, faithful) for change in changes], ""
    )


def _change(finding: Finding) -> dict[str, Any]:
    if finding.setting in SETTINGS and finding.after is not None:
        return {finding.setting: finding.after}
    return {}


def _expected(
    recording: Recording, change: Mapping[str, Any], before: Summary, faithful: bool
) -> Expected | None:
    if not change:
        return None
    after = replayed(recording, change)
    if not before.answered or not after.answered:
        return None
    return Expected(
        before.ttft_mean_ms,
        after.ttft_mean_ms,
        before.ttft_p95_ms,
        after.ttft_p95_ms,
        before.hit_rate,
        after.hit_rate,
        faithful,
    )


def _latest(named: str) -> Path | None:
    """Where routers on this machine write: a number may have come into the name."""
    if not named:
        return None
    found = sorted(_written(Path(named)), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _written(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    if path.parent.is_dir():
        yield from (
            each
            for each in path.parent.glob(f"{escape(path.stem)}*{escape(path.suffix)}")
            if each.is_file() and each != path
        )
