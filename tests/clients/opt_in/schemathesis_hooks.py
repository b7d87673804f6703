"""For schemathesis: what no JSON schema can say of our requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import schemathesis
from hypothesis import strategies

ROLES = {"system", "user", "assistant", "tool"}

# Of the arguments of a tool call in a message: a string that is JSON again.
schemathesis.openapi.format(
    "json",
    strategies.dictionaries(strategies.text(max_size=5), strategies.integers()).map(json.dumps),
)


@schemathesis.hook  # type: ignore[untyped-decorator]
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case) -> bool:
    """Each tool has a name of its own, and the template renders something.

    It may leave out a message of a role that it does not know.
    """
    if not isinstance(case.body, dict):
        return True
    names = [str(each.get("name")) for each in _objects(case.body, "tools", "function")]
    known = any(str(each.get("role")) in ROLES for each in _objects(case.body, "messages"))
    prompted = case.body.get("add_generation_prompt") is not False
    return len(set(names)) == len(names) and (known or prompted)


def _objects(body: dict[str, Any], name: str, inner: str | None = None) -> Iterator[dict[str, Any]]:
    values = body.get(name)
    for value in values if isinstance(values, list) else []:
        found = value.get(inner) if inner and isinstance(value, dict) else value
        if isinstance(found, dict):
            yield found
