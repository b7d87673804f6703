"""The prompt that a command line means."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from services.cli.failures import Failure

Message: TypeAlias = Mapping[str, Any]


class Prompt(NamedTuple):
    """Text or messages, and the tools that a chat may call."""

    input: str | Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Returns the ways to give a prompt, of which one is needed: there may be more."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("prompt", nargs="?", metavar="PROMPT", help="what the user says")
    source.add_argument("--file", metavar="FILE", help="read the prompt from a file; -: stdin")
    source.add_argument(
        "--chat",
        metavar="FILE",
        help='read messages from a JSON file: a list, or {"messages": […], "tools": […]}; -: stdin',
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="send the prompt as it is, not as a user's message in the model's chat template",
    )
    return source


def read_prompt(arguments: argparse.Namespace) -> Prompt:
    """Raises Failure for a prompt of nothing, and for a file that cannot be read or is no chat."""
    if arguments.chat is not None:
        return _chat(_read(arguments.chat), arguments.chat)
    text = arguments.prompt if arguments.file is None else _read(arguments.file)
    if not text:
        raise Failure("the prompt must not be empty", code="INVALID_ARGUMENT")
    return Prompt(text if arguments.raw else [{"role": "user", "content": text}])


def _read(name: str) -> str:
    try:
        if name == "-":
            return sys.stdin.read()
        with open(name, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise Failure(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Failure(f"{name}: is no UTF-8 text: {error}") from None


def _chat(text: str, name: str) -> Prompt:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise Failure(f"{name}: is no JSON: {error}") from None
    except RecursionError:
        raise Failure(f"{name}: is nested too deeply") from None
    chat = {"messages": document} if isinstance(document, list) else document
    if not isinstance(chat, dict) or not _is_objects(chat.get("messages")):
        raise Failure(f'{name}: must be a list of messages, or {{"messages": […], "tools": […]}}')
    if not chat["messages"]:
        raise Failure(f"{name}: must have at least one message")
    tools = chat.get("tools")
    if tools is not None and not _is_objects(tools):
        raise Failure(f"{name}: tools must be a list of objects")
    return Prompt(chat["messages"], tools)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
