"""The mesh's configuration: one immutable value, parsed and validated in one place.

The control service does so when it changes; every other process receives the result
and swaps its snapshot whole. No request ever parses it. settings.py declares what
there is.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import orjson

from services.core.errors import InvalidArgument, Violation
from services.core.redis_url import HIDDEN, hides_password, without_password
from services.core.settings import REDIS_URL, MeshConfig, Rule

AT_START = "is read at start: change it in the configuration file and restart"
HAS_NO_PASSWORD = f"has {HIDDEN} where its password was hidden: write the password"
# Of a key for which a setting of a similar name is looked for.
MAX_KEY_CHARACTERS = 128


class Snapshot(NamedTuple):
    """A configuration and the generation it is."""

    generation: int
    config: MeshConfig


def parse(document: Mapping[str, Any]) -> MeshConfig:
    """The configuration that a nested mapping (TOML, JSON) of somebody's describes.

    Raises InvalidArgument naming every unknown key and every value out of bounds.
    """
    config = _parse(document)
    violations = [
        Violation(key, HAS_NO_PASSWORD) for key, url in _redis_urls(config) if hides_password(url)
    ]
    if violations:
        raise InvalidArgument(violations, reason="INVALID_CONFIG")
    return config


def change(config: MeshConfig, changes: Mapping[str, Any]) -> MeshConfig:
    """`config` with dotted keys changed, while the mesh runs.

    Raises InvalidArgument for an unknown key, a bad value, or a setting that is
    only read at start.
    """
    rules = dict(settings())
    current = flatten(config)
    violations: list[Violation] = []
    accepted: dict[str, Any] = {}
    for key, value in changes.items():
        if key not in rules:
            violations.append(unknown_setting(key, rules))
        elif rules[key].at_start and value != current[key]:
            violations.append(Violation(key, AT_START))
        else:
            accepted[key] = value
    try:
        changed = parse(nest({**current, **accepted}))
    except InvalidArgument as error:
        violations += error.violations
    if violations:
        raise InvalidArgument(violations, reason="INVALID_CONFIG")
    return changed


def flatten(config: MeshConfig) -> dict[str, Any]:
    """Dotted key to value, in the order of the declarations."""
    return dict(_flatten(config, ""))


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for dotted, value in flat.items():
        *sections, key = dotted.split(".")
        table = document
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
    return document


def to_json(config: MeshConfig) -> str:
    """Canonical: equal configurations give equal text."""
    return orjson.dumps(nest(flatten(config)), option=orjson.OPT_SORT_KEYS).decode()


def without_passwords(config: MeshConfig) -> MeshConfig:
    """For whoever asks: passwords in it are hidden."""
    hidden = {key: without_password(url) for key, url in _redis_urls(config)}
    return _parse(nest({**flatten(config), **hidden}))


def from_json(text: str) -> MeshConfig:
    """What `to_json` gave, be it of what `without_passwords` gave."""
    return _parse(orjson.loads(text))


def settings() -> Iterator[tuple[str, Rule]]:
    """Every dotted key and its rule, in the order of the declarations."""
    return _settings(MeshConfig, "")


def _redis_urls(config: MeshConfig) -> Iterator[tuple[str, str]]:
    values = flatten(config)
    return ((key, values[key]) for key, rule in settings() if rule.form is REDIS_URL)


def _parse(document: Mapping[str, Any]) -> MeshConfig:
    violations: list[Violation] = []
    config = _build(MeshConfig, document, "", violations)
    if not violations:
        assert isinstance(config, MeshConfig)
        violations += _check_together(config)
    if violations:
        raise InvalidArgument(violations, reason="INVALID_CONFIG")
    assert isinstance(config, MeshConfig)
    return config


def _settings(cls: Any, prefix: str) -> Iterator[tuple[str, Rule]]:
    hints = _hints(cls)
    for item in dataclasses.fields(cls):
        if "rule" in item.metadata:
            yield prefix + item.name, item.metadata["rule"]
        else:
            yield from _settings(hints[item.name], f"{prefix}{item.name}.")


@functools.cache  # evaluating annotations is most of the cost of parsing
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _flatten(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from _flatten(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def _build(cls: Any, document: Mapping[str, Any], prefix: str, violations: list[Violation]) -> Any:
    fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for key, value in document.items():
        path = prefix + key
        if key not in fields:
            violations.append(unknown_setting(path, [prefix + name for name in fields]))
        elif "rule" in fields[key].metadata:
            values[key] = _check(value, hints[key], fields[key].metadata["rule"], path, violations)
        elif isinstance(value, Mapping):
            values[key] = _build(hints[key], value, f"{path}.", violations)
        else:
            # What else it is may hold a password.
            violations.append(Violation(path, "must be a table of settings"))
    return cls(**values)


def _check_together(config: MeshConfig) -> Iterator[Violation]:
    """Rules of several settings, each within its own."""
    worker = config.worker
    if worker.max_batch_tokens < worker.num_slots:  # a step decodes a token of every request
        yield Violation(
            "worker.max_batch_tokens",
            f"must be at least worker.num_slots, {worker.num_slots}; got {worker.max_batch_tokens}",
        )


def _check(value: Any, kind: type[Any], rule: Rule, path: str, violations: list[Violation]) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    problem = ""
    if type(value) is not kind:
        noun = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        problem = f"must be {noun[kind]}"
    elif rule.choices and value not in rule.choices:
        problem = f"must be one of {', '.join(rule.choices)}"
    elif rule.form and not re.fullmatch(rule.form.pattern, value):
        problem = f"must be {rule.form.words}"
    elif (
        rule.low is not None
        and rule.high is not None
        and (not math.isfinite(value) or not rule.low <= value <= rule.high)
    ):
        problem = f"must be in [{rule.low:.15g}, {rule.high:.15g}]"
    if problem:
        # A URL may hold a password.
        got = "" if rule.form else f"; got {_show(value)}"
        violations.append(Violation(path, f"{problem}{got}"))
    return value


def _show(value: Any) -> str:
    """As repr, yet never long, and however deeply nested."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short.repr(value)


def unknown_setting(path: str, known: Iterable[str]) -> Violation:
    """Says that `path` is none of `known`, and what may have been meant."""
    if len(path) > MAX_KEY_CHARACTERS:
        return Violation(path, "is no setting")
    keys = list(known)
    section = _nearest_section(f"{path}.", keys)
    names = dict.fromkeys(
        key.removeprefix(section).partition(".")[0] for key in keys if key.startswith(section)
    )
    listed = ", ".join(section + name for name in names)
    if section == f"{path}.":
        return Violation(path, f"is no setting but a section; known in it: {listed}")
    meant = difflib.get_close_matches(path.removeprefix(section), names, n=1)
    nearest = [section + name for name in meant] or difflib.get_close_matches(
        path, keys, n=1, cutoff=0.75
    )
    if nearest:
        return Violation(path, f"is no setting; did you mean {nearest[0]}?")
    return Violation(path, f"is no setting; known here: {listed}")


def _nearest_section(path: str, keys: Sequence[str]) -> str:
    """The longest beginning of `path` that is a section, with its dot; "" for none."""
    section = path
    while section:
        section = section.rpartition(".")[0]
        if section and any(key.startswith(f"{section}.") for key in keys):
            return f"{section}."
    return ""
