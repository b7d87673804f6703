"""What the services of a run write: kept in files, and shown as a person wants it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from services.cli.folders import RunLock

# Fields of an entry that say nothing new beside the service's name.
_SILENT = frozenset({"time", "level", "service", "event", "logger", "pid", "exception"})


class Entry(NamedTuple):
    """A line of output. `level` is None when it is no structured entry."""

    level: int | None
    text: str


def parse(line: str) -> Entry:
    """A service's own JSON entry, or whatever a library or a traceback printed."""
    try:
        fields = json.loads(line) if line.startswith("{") else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or "event" not in fields:
        return Entry(None, line)
    return Entry(_level(fields), _readable(fields))


def _level(fields: dict[str, Any]) -> int:
    names = logging.getLevelNamesMapping()
    return names.get(str(fields.get("level", "")).upper(), logging.INFO)


def _readable(fields: dict[str, Any]) -> str:
    more = "".join(f" {key}={value}" for key, value in fields.items() if key not in _SILENT)
    cause = str(fields.get("exception", "")).strip().rpartition("\n")[2]
    return f"{fields['event']}{more}{f' ({cause})' if cause else ''}"


class ServiceLog:
    """One service's output."""

    def __init__(self, file: BinaryIO, show: Callable[[str], None], least_level: int) -> None:
        self._file = file
        self._show = show
        self._least_level = least_level
        # Of what was no structured entry: the reason it gave for not starting, or a
        # traceback's end.
        self.last_words = ""

    def write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        entry = parse(line)
        if entry.level is None:
            self.last_words = entry.text.strip() or self.last_words
        if (entry.level or logging.INFO) >= self._least_level:
            name = logging.getLevelName(entry.level or logging.INFO).lower()
            self._show(entry.text if name == "info" else f"{name}: {entry.text}")


class RunLogs:
    """The output of all services of a run, a file a service. A context manager.

    While it is entered, the folder is known to be of a run that lives.
    """

    def __init__(self, directory: Path, *, least_level: int) -> None:
        self._directory = directory
        self._least_level = least_level
        self._files: list[BinaryIO] = []
        self._lock: RunLock | None = None

    def open(self, name: str, show: Callable[[str], None]) -> ServiceLog:
        file = (self._directory / f"{name}.log").open("ab", buffering=0)
        self._files.append(file)
        return ServiceLog(file, show, self._least_level)

    def __enter__(self) -> RunLogs:
        self._lock = RunLock(self._directory)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
        if self._lock is not None:
            self._lock.close()
