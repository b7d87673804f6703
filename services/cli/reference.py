"""The reference of all settings, as docs/configuration.md has it."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from services.core.config import defaults, settings
from services.core.rules import Rule

_INTRODUCTION = """\
# Configuration

<!-- Written by `firsttoken config docs > docs/configuration.md`; a test fails when it is stale. -->

The control service reads one TOML file when it starts (`firsttoken up --config FILE.toml`), checks
it, and pushes it to every process. All of it is optional:

```toml
[router]
routing_strategy = "least_outstanding"

[worker]
num_slots = 4
```

`firsttoken config set KEY=VALUE …` changes settings while the mesh runs, all of them or none. Each
accepted change is a new generation, and every member reports the generation it has applied
(`firsttoken status`). A change that breaks a bound is refused with the setting's name and what it
must be, and the old generation stays. A setting marked *at start* is read once by the process that
uses it: change it in the file and start again, or for one run with `firsttoken up --set KEY=VALUE`.

A change lives as long as the control service, which starts with what the file says. With
`control.redis_url` the configuration lives in Redis: the file then only gives the first generation,
and what Redis already holds wins over the file and over `--set`.

`firsttoken config get` shows what a running mesh has, `firsttoken config diff` what differs from
the defaults below.
"""


def render() -> str:
    values = defaults()
    sections = groupby(settings(), key=lambda item: item[0].rpartition(".")[0])
    parts = [_INTRODUCTION]
    for section, rules in sections:
        parts.append(f"\n## `[{section}]`\n\n")
        parts.append("| setting | default | may be | meaning |\n|---|---|---|---|\n")
        parts.extend(_row(key, rule, values[key]) for key, rule in rules)
    return "".join(parts)


def _row(key: str, rule: Rule, default: Any) -> str:
    when = " *At start.*" if rule.at_start else ""
    name = key.rpartition(".")[2]
    return f"| `{name}` | `{json.dumps(default)}` | {_range(rule, default)} | {rule.doc}{when} |\n"


def _range(rule: Rule, default: Any) -> str:
    if rule.choices:
        return ", ".join(f"`{choice}`" for choice in rule.choices)
    if rule.form:
        return rule.form.words
    if isinstance(default, bool):
        return "`true`, `false`"
    if rule.low is None or rule.high is None:
        return "text"
    kind = "a whole number" if isinstance(default, int) else "a number"
    return f"{kind} in [{_number(rule.low)}, {_number(rule.high)}]"


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value == int(value) else f"{value:g}"
