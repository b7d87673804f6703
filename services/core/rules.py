"""How a setting is declared, in settings.py and the modules beside it."""

from __future__ import annotations

from dataclasses import field
from typing import Any, NamedTuple


class Form(NamedTuple):
    """What a text may be: a regular expression that all of it matches, and its words."""

    pattern: str
    words: str


class Rule(NamedTuple):
    """What a setting may be."""

    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    form: Form | None = None
    at_start: bool = False


def setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    form: Form | None = None,
    at_start: bool = False,
) -> Any:
    rule = Rule(doc, low, high, choices, form, at_start)
    return field(default=default, metadata={"rule": rule})
