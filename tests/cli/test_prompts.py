from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest

from services.cli import prompts
from services.cli.failures import Failure
from services.cli.prompts import Prompt

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


def read(*arguments: str) -> Prompt:
    parser = argparse.ArgumentParser()
    prompts.add_arguments(parser)
    return prompts.read_prompt(parser.parse_args(arguments))


def test_a_prompt_is_a_users_message() -> None:
    assert read("Hello") == Prompt([{"role": "user", "content": "Hello"}])


def test_a_raw_prompt_is_sent_as_it_is() -> None:
    assert read("--raw", "Hello") == Prompt("Hello")


def test_a_prompt_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n", encoding="utf-8")

    assert read("--raw", "--file", str(file)) == Prompt("Grüße\n")


def test_a_prompt_may_come_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))

    assert read("--raw", "--file", "-") == Prompt("Hello")


@pytest.mark.parametrize(
    ("document", "prompt"),
    [
        (MESSAGES, Prompt(MESSAGES)),
        ({"messages": MESSAGES}, Prompt(MESSAGES)),
        ({"messages": MESSAGES, "tools": TOOLS}, Prompt(MESSAGES, TOOLS)),
    ],
)
def test_a_chat_is_a_list_of_messages_or_has_one(
    tmp_path: Path, document: Any, prompt: Prompt
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(document))

    assert read("--chat", str(file)) == prompt


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{", "is no JSON"),
        ("[" * 100_000, "chat.json: is nested too deeply"),
        ('"Hello"', "must be a list of messages"),
        ("[1]", "must be a list of messages"),
        ('{"tools": []}', "must be a list of messages"),
        ("[]", "at least one message"),
        ('{"messages": [{}], "tools": [1]}', "tools must be a list of objects"),
    ],
)
def test_a_broken_chat_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)

    with pytest.raises(Failure, match=message):
        read("--chat", str(file))


@pytest.mark.parametrize("arguments", [[""], ["--raw", ""], ["--file", "/dev/null"]])
def test_a_prompt_of_nothing_is_refused(arguments: list[str]) -> None:
    with pytest.raises(Failure, match="must not be empty"):
        read(*arguments)


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    binary = tmp_path / "image"
    binary.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(Failure, match="nowhere: cannot be read: No such file"):
        read("--file", "nowhere")
    with pytest.raises(Failure, match="image: is no UTF-8 text"):
        read("--file", str(binary))


@pytest.mark.parametrize(
    "arguments", [[], ["Hello", "--file", "f"], ["--file", "f", "--chat", "c"]]
)
def test_there_is_exactly_one_prompt(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(*arguments)

    assert caught.value.code == 2
