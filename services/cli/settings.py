"""Settings on a command line: KEY=VALUE into what the configuration takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from services.core.config import (
    declared,
    defaults,
    is_named_section,
    named_as,
    unknown_setting,
)
from services.core.errors import InvalidArgument


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Dotted key to value; None for a section that has a name and is to go (tenants.acme=null).

    Raises InvalidArgument for what is no KEY=VALUE of a setting.
    """
    known = defaults()
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidArgument.of(assignment, "must be KEY=VALUE")
        if is_named_section(key) and text == "null":
            values[key] = None
        elif (declaration := declared(key)) in known:
            values[key] = parse_value(text, known[declaration])
        else:
            raise unknown_key(key, named_as(key, known))
    return values


def parse_value(text: str, example: Any) -> Any:
    """`text` as the type of `example`; as it is when it cannot be, for the bounds to refuse it."""
    if isinstance(example, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def unknown_key(key: str, known: Iterable[str]) -> InvalidArgument:
    return InvalidArgument([unknown_setting(key, known)])


def to_toml(flat: Mapping[str, Any]) -> str:
    """Dotted keys, one a line. A JSON scalar is a TOML scalar, with one exception: DEL."""
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n".replace("\x7f", "\\u007f")
        for key, value in flat.items()
    )
