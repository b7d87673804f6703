from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from services.runtime import logs

logger = logging.getLogger("firsttoken.test")


@pytest.fixture(autouse=True)
def logging_is_as_before() -> Iterator[None]:
    root, handlers, level = logging.root, logging.root.handlers[:], logging.root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pretend_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)


def test_elsewhere_than_on_a_terminal_an_event_is_a_line_of_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("router")
    logs.event(logger, logging.INFO, "member joined", member_id="w1", num_slots=4)
    entry = json.loads(capsys.readouterr().err)

    assert (entry["service"], entry["level"]) == ("router", "info")
    assert entry["event"] == "member joined"
    assert (entry["member_id"], entry["num_slots"]) == ("w1", 4)
    assert entry["time"].endswith("+00:00")


def test_a_terminal_gets_a_readable_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch, True)
    logs.configure("router")
    logs.event(logger, logging.INFO, "member joined", member_id="w1")
    logs.event(logger, logging.WARNING, "control lost")
    first, second = capsys.readouterr().err.splitlines()

    assert first.split(" ", 1)[1] == "router: member joined member_id=w1"
    assert second.split(" ", 1)[1] == "router: warning: control lost"


@pytest.mark.parametrize(("wanted", "is_json"), [("json", True), ("text", False)])
def test_the_environment_has_the_last_word(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    is_json: bool,
) -> None:
    pretend_terminal(monkeypatch, is_json)
    monkeypatch.setenv("FIRSTTOKEN_LOG", wanted)
    logs.configure("router")
    logger.info("hello")

    assert capsys.readouterr().err.startswith("{") == is_json


def test_what_is_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "warning")
    logs.event(logger, logging.INFO, "quiet")
    logs.set_level("debug")
    logs.event(logger, logging.DEBUG, "loud")
    written = capsys.readouterr().err

    assert "quiet" not in written
    assert "loud" in written


def test_a_configuration_s_level_is_followed_only_where_the_logging_is_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = logging.root.level
    logs.follow_level("error")
    untouched = logging.root.level
    logs.configure("router")
    logs.follow_level("error")
    logger.warning("quiet")

    assert untouched == before
    assert "quiet" not in capsys.readouterr().err


def test_an_exception_comes_with_its_traceback_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("router")
    try:
        raise KeyError("why")
    except KeyError:
        logger.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()

    assert "KeyError: 'why'" in json.loads(line)["exception"]


@pytest.mark.parametrize("value", [object, "\ud800", 1 << 70, {1: 2}, float("nan"), b"\xff"])
def test_any_value_can_be_logged(capsys: pytest.CaptureFixture[str], value: object) -> None:
    logs.configure("router")
    logs.event(logger, logging.INFO, "odd", value=value)

    assert json.loads(capsys.readouterr().err)["event"] == "odd"


def test_configuring_twice_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router")
    logs.configure("router")
    logger.info("hello")

    assert capsys.readouterr().err.count("hello") == 1
