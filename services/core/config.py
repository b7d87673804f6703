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
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_type_hints

import orjson

from services.core.errors import InvalidArgument, Violation
from services.core.redis_url import HIDDEN, hides_password, without_password
from services.core.rules import Form, Rule
from services.core.settings import REDIS_URL, MeshConfig
from services.core.tensorrt import check_tensorrt

# Stands for any name, where a table has sections by name: tenants.NAME.salt.
ANY_NAME = "NAME"
NAME_FORM = Form(r"[A-Za-z0-9_-]{1,64}", "1 to 64 letters, digits, - or _")
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

    A section that has a name (tenants.acme) is made by its first setting, and removed
    by None. Raises InvalidArgument for an unknown key, a bad value, or a setting that
    is only read at start.
    """
    rules = dict(settings())
    current = flatten(config)
    violations: list[Violation] = []
    accepted: dict[str, Any] = {}
    for key, value in changes.items():
        rule = rules.get(declared(key))
        if value is None and any(key == name for name, _ in _named_sections(config)):
            current = {k: v for k, v in current.items() if not k.startswith(f"{key}.")}
        elif rule is None:
            violations.append(unknown_setting(key, named_as(key, rules)))
        elif rule.at_start and value != current[key]:
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
    # Sections in the order of their declarations, tenants by name.
    return orjson.dumps(config, option=orjson.OPT_SORT_KEYS).decode()


def without_passwords(config: MeshConfig) -> MeshConfig:
    """For whoever asks: passwords in it are hidden."""
    for key, url in _redis_urls(config):
        section, _, name = key.partition(".")
        hidden = dataclasses.replace(getattr(config, section), **{name: without_password(url)})
        config = dataclasses.replace(config, **{section: hidden})
    return config


def from_json(text: str) -> MeshConfig:
    """What `to_json` gave, be it of what `without_passwords` gave."""
    return _parse(orjson.loads(text))


def settings() -> Iterator[tuple[str, Rule]]:
    """Every dotted key and its rule, in the order of the declarations."""
    return _settings(MeshConfig, "")


def defaults() -> dict[str, Any]:
    """The default of every setting, by the keys of `settings`."""
    named: dict[str, Any] = {
        item.name: {ANY_NAME: _section_class(hint)()}
        for item, hint in _fields(MeshConfig)
        if _has_names(hint)
    }
    return flatten(dataclasses.replace(MeshConfig(), **named))


def _redis_urls(config: MeshConfig) -> Iterator[tuple[str, str]]:
    # Whatever else there is of it: tenants may be thousands.
    return ((key, attrgetter(key)(config)) for key, rule in settings() if rule.form is REDIS_URL)


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
    for item, hint in _fields(cls):
        name = f"{prefix}{item.name}"
        if "rule" in item.metadata:
            yield name, item.metadata["rule"]
        elif _has_names(hint):
            yield from _settings(_section_class(hint), f"{name}.{ANY_NAME}.")
        else:
            yield from _settings(hint, f"{name}.")


def _fields(cls: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = _hints(cls)
    return ((item, hints[item.name]) for item in dataclasses.fields(cls))


@functools.cache  # evaluating annotations is most of the cost of parsing
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _has_names(hint: Any) -> bool:
    """It is a table of sections by name."""
    return bool(get_args(hint))


def _section_class(hint: Any) -> Any:
    return get_args(hint)[1]


def declared(key: str) -> str:
    """The key of the declaration that `key` is of."""
    table, *rest = key.split(".")
    if _is_table_of_names(table) and len(rest) > 1:
        rest[0] = ANY_NAME
    return ".".join([table, *rest])


def is_named_section(key: str) -> bool:
    """`key` is of a section that has a name (tenants.acme), whether there is one or not."""
    table, *rest = key.split(".")
    return _is_table_of_names(table) and len(rest) == 1


def named_as(key: str, rules: Iterable[str]) -> list[str]:
    """The keys of `rules`, with the name that `key` has where they may have any."""
    table, *rest = key.split(".")
    name = rest[0] if rest and _is_table_of_names(table) else ANY_NAME
    return [rule.replace(f".{ANY_NAME}.", f".{name}.") for rule in rules]


def _is_table_of_names(table: str) -> bool:
    return any(item.name == table and _has_names(hint) for item, hint in _fields(MeshConfig))


def _named_sections(config: MeshConfig) -> Iterator[tuple[str, Any]]:
    for item, hint in _fields(MeshConfig):
        if _has_names(hint):
            for name, section in getattr(config, item.name).items():
                yield f"{item.name}.{name}", section


def _flatten(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(section):
        name, value = f"{prefix}{item.name}", getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, Mapping):
            for each, named in value.items():
                yield from _flatten(named, f"{name}.{each}.")
        else:
            yield name, value


def _build(cls: Any, document: Mapping[str, Any], prefix: str, violations: list[Violation]) -> Any:
    fields = {item.name: (item, hint) for item, hint in _fields(cls)}
    values: dict[str, Any] = {}
    for key, value in document.items():
        path = prefix + key
        if key not in fields:
            violations.append(unknown_setting(path, [prefix + name for name in fields]))
            continue
        item, hint = fields[key]
        if "rule" in item.metadata:
            values[key] = _check(value, hint, item.metadata["rule"], path, violations)
        elif not isinstance(value, Mapping):
            # What else it is may hold a password.
            violations.append(Violation(path, "must be a table of settings"))
        elif _has_names(hint):
            values[key] = _build_named(_section_class(hint), value, path, violations)
        else:
            values[key] = _build(hint, value, f"{path}.", violations)
    return cls(**values)


def _build_named(
    cls: Any, document: Mapping[str, Any], prefix: str, violations: list[Violation]
) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for name, value in document.items():
        path = f"{prefix}.{name[:MAX_KEY_CHARACTERS]}"
        if not re.fullmatch(NAME_FORM.pattern, name):
            violations.append(Violation(path, f"must be named with {NAME_FORM.words}"))
        elif not isinstance(value, Mapping):
            # What else it is may hold a password.
            violations.append(Violation(path, "must be a table of settings"))
        else:
            sections[name] = _build(cls, value, f"{path}.", violations)
    return sections


def _check_together(config: MeshConfig) -> Iterator[Violation]:
    """Rules of several settings, each within its own."""
    worker = config.worker
    if worker.max_batch_tokens < worker.num_slots:  # a step decodes a token of every request
        yield Violation(
            "worker.max_batch_tokens",
            f"must be at least worker.num_slots, {worker.num_slots}; got {worker.max_batch_tokens}",
        )
    if worker.engine == "tensorrt_llm":
        yield from check_tensorrt(worker, block_tokens=config.mesh.block_tokens)
    owners: dict[str, str] = {}
    for name, tenant in config.tenants.items():
        for field in ("key_hashes", "identities"):
            for credential in getattr(tenant, field).split():
                owner = owners.setdefault(credential, name)
                if owner != name:
                    yield Violation(
                        f"tenants.{name}.{field}", f"must not be another tenant's; {owner} has it"
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
