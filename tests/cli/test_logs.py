from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from services.cli.logs import RunLogs, parse
from services.runtime.logs import FIELDS, JsonFormatter


def entry(level: int, message: str, **fields: object) -> str:
    """A line as a service writes it."""
    record = logging.LogRecord("part", level, __file__, 1, message, (), None)
    setattr(record, FIELDS, fields)
    return JsonFormatter("worker").format(record)


def test_a_services_entry_becomes_its_event_and_fields() -> None:
    assert parse(entry(logging.WARNING, "engine core ended", restarts=2)) == (
        logging.WARNING,
        "engine core ended restarts=2",
    )


@pytest.mark.parametrize("line", ["ggml: loading", "{not json", '{"a": 1}', "", "[1]"])
def test_any_other_line_is_taken_as_it_is(line: str) -> None:
    assert parse(line) == (None, line)


def test_an_exception_is_shown_by_its_last_line() -> None:
    fields = {"level": "error", "event": "broke", "exception": "Traceback\n  x\nValueError: no"}

    assert parse(json.dumps(fields)).text == "broke (ValueError: no)"


def test_only_what_is_severe_enough_is_shown_and_all_is_kept(tmp_path: Path) -> None:
    shown: list[str] = []
    lines = [entry(logging.INFO, "started"), entry(logging.ERROR, "broke"), "ggml: loading"]
    with RunLogs(tmp_path, least_level=logging.WARNING) as logs:
        log = logs.open("worker-1", shown.append)
        for line in lines:
            log.write(line)

    assert shown == ["error: broke"]
    assert (tmp_path / "worker-1.log").read_text().splitlines() == lines


def test_verbose_shows_everything(tmp_path: Path) -> None:
    shown: list[str] = []
    with RunLogs(tmp_path, least_level=logging.DEBUG) as logs:
        log = logs.open("router", shown.append)
        log.write(entry(logging.INFO, "started"))
        log.write("ggml: loading")

    assert shown == ["started", "ggml: loading"]


def test_last_words_are_the_last_plain_line(tmp_path: Path) -> None:
    with RunLogs(tmp_path, least_level=logging.ERROR) as logs:
        log = logs.open("control", lambda _: None)
        for line in ("control: port in use", "", entry(logging.INFO, "stopped")):
            log.write(line)

    assert log.last_words == "control: port in use"
