"""firsttoken config: read and change a mesh's configuration."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.cli import effects, reference, rpc
from services.cli.observer import ask
from services.cli.plain import plain
from services.cli.settings import parse_assignments, unknown_key
from services.core.config import flatten, from_json

# How long `set` waits for the members to report the new generation.
APPLY_TIMEOUT_S = 2.0
APPLY_POLL_S = 0.02


class Applied(NamedTuple):
    """How many of the members had the new generation, and when the last of them did."""

    members: int
    applied: int
    elapsed_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    get = actions.add_parser("get", help="print the configuration, a section or one setting")
    get.add_argument("key", nargs="?", metavar="KEY")
    get.set_defaults(act=_get)

    change = actions.add_parser("set", help="change settings of the running mesh, all or none")
    change.add_argument("assignments", nargs="+", metavar="KEY=VALUE")
    change.set_defaults(act=_set)

    diff = actions.add_parser("diff", help="print what differs from the defaults")
    diff.add_argument(
        "--effect",
        action="store_true",
        help="print each change of this mesh, and what TTFT, TPOT and hit rate were before and"
        " after it",
    )
    diff.set_defaults(act=_diff)

    docs = actions.add_parser("docs", help="print the reference of all settings, as Markdown")
    docs.set_defaults(act=None)

    for action in (get, change, diff):
        rpc.add_control_option(action)
        action.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    if arguments.act is None:
        print(reference.render(), end="")
    elif getattr(arguments, "effect", False):
        found = ask(arguments, "api", "effects")
        print(json.dumps(found) if arguments.json else "\n".join(map(plain, effects.show(found))))
    else:
        rpc.run(arguments.act(arguments))
    return 0


async def _get(arguments: argparse.Namespace) -> None:
    async with _control(arguments) as stub:
        response = await stub.GetConfig(control_pb2.GetConfigRequest(), timeout=rpc.TIMEOUT_S)
    values = _select(_flat(response.configuration), arguments.key)
    if arguments.json:
        _print_json({"generation": response.configuration.generation, "config": values})
    elif list(values) == [arguments.key]:
        value = values[arguments.key]
        print(value if isinstance(value, str) else json.dumps(value))
    else:
        for key, value in values.items():
            print(f"{key} = {json.dumps(value)}")


async def _set(arguments: argparse.Namespace) -> None:
    values = parse_assignments(arguments.assignments)
    request = control_pb2.SetConfigRequest(
        changes={key: json.dumps(value) for key, value in values.items()}
    )
    async with _control(arguments) as stub:
        response = await stub.SetConfig(request, timeout=rpc.TIMEOUT_S)
        generation = response.configuration.generation
        applied = await _wait_until_applied(stub, generation)
    if arguments.json:
        _print_json({"generation": generation, "changes": values, **applied._asdict()})
    else:
        print(
            f"generation {generation}, applied by {applied.applied} of {applied.members} members"
            f" within {applied.elapsed_ms:.0f} ms"
        )


async def _diff(arguments: argparse.Namespace) -> None:
    async with _control(arguments) as stub:
        response = await stub.GetConfig(control_pb2.GetConfigRequest(), timeout=rpc.TIMEOUT_S)
    # A section that has a name has no default.
    defaults = flatten(from_json(response.default_json))
    changed = {
        key: {"value": value, "default": defaults.get(key)}
        for key, value in _flat(response.configuration).items()
        if key not in defaults or value != defaults[key]
    }
    if arguments.json:
        _print_json({"generation": response.configuration.generation, "changed": changed})
    for key, pair in () if arguments.json else changed.items():
        print(f"{key} = {json.dumps(pair['value'])}  (default {json.dumps(pair['default'])})")


async def _wait_until_applied(
    stub: control_pb2_grpc.ControlServiceStub, generation: int
) -> Applied:
    started_s = time.monotonic()
    while True:
        response = await stub.ListMembers(control_pb2.ListMembersRequest(), timeout=rpc.TIMEOUT_S)
        elapsed_s = time.monotonic() - started_s
        applied = sum(member.generation >= generation for member in response.members)
        if applied == len(response.members) or elapsed_s > APPLY_TIMEOUT_S:
            return Applied(len(response.members), applied, elapsed_s * 1000)
        await asyncio.sleep(APPLY_POLL_S)


def _control(
    arguments: argparse.Namespace,
) -> AbstractAsyncContextManager[control_pb2_grpc.ControlServiceStub]:
    return rpc.control_stub(arguments.control, rpc.open_tls(arguments.tls_dir))


def _flat(configuration: control_pb2.Configuration) -> dict[str, Any]:
    return flatten(from_json(configuration.config_json))


def _select(values: dict[str, Any], key: str | None) -> dict[str, Any]:
    """All settings, those of a section, or one."""
    if key is None:
        return values
    chosen = {name: v for name, v in values.items() if name == key or name.startswith(f"{key}.")}
    if not chosen:
        raise unknown_key(key, values)
    return chosen


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document))
