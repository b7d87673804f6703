"""firsttoken status: the members of a mesh and what they are doing."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from firsttoken.control.v1 import control_pb2
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.cli import rpc
from services.cli.members import role_name, state_name, worker_role_name
from services.runtime.channels import open_channel

LOAD_TIMEOUT_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rpc.add_control_option(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    generation, members = rpc.run(_collect(arguments.control))
    if arguments.json:
        print(json.dumps({"generation": generation, "members": members}))
    else:
        print("\n".join(_table(generation, members)))
    return 0


async def _collect(control: str) -> tuple[int, list[dict[str, Any]]]:
    async with rpc.control_stub(control) as stub:
        response = await stub.ListMembers(control_pb2.ListMembersRequest(), timeout=rpc.TIMEOUT_S)
    ordered = sorted(response.members, key=lambda member: (-member.role, member.address))
    return response.generation, list(await asyncio.gather(*map(_describe, ordered)))


async def _describe(member: control_pb2.Member) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": member.id,
        "role": role_name(member),
        "state": state_name(member),
        "generation": member.generation,
        "address": member.address,
        "pid": member.pid,
        "model": member.model,
        "detail": member.detail,
    }
    if member.role == control_pb2.MEMBER_ROLE_WORKER:
        fields["worker"] = {**_plain(member.worker), "role": worker_role_name(member.worker)}
        fields["load"] = await _load(member.address)
    return fields


async def _load(address: str) -> dict[str, Any] | None:
    """What the worker reports first; None when it does not answer."""
    async with open_channel(address) as channel:
        watching = worker_pb2_grpc.WorkerServiceStub(channel).Watch(
            worker_pb2.WatchRequest(load_only=True), timeout=LOAD_TIMEOUT_S
        )
        try:
            async for response in watching:
                load = response.snapshot.load if response.HasField("snapshot") else response.load
                return _plain(load)
        except grpc.aio.AioRpcError:
            pass
        finally:
            watching.cancel()
    return None


def _plain(message: Message) -> dict[str, Any]:
    """The fields of a message that has only scalars; MessageToDict makes strings of uint64."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _table(generation: int, members: list[dict[str, Any]]) -> list[str]:
    rows = [("role", "state", "generation", "address", "pid", "")]
    rows += [
        (
            member["role"],
            member["state"],
            str(member["generation"]),
            member["address"],
            str(member["pid"]),
            _remark(member),
        )
        for member in members
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [f"generation {generation}, {len(members)} members", "", *table]


def _remark(member: dict[str, Any]) -> str:
    parts = [member["detail"] or member["model"]]
    if "load" in member:
        capacity = member["worker"]
        role = "" if capacity["role"] == "both" else f"for {capacity['role']}"
        parts += [capacity["engine"], role, _describe_load(member["load"], capacity)]
    return ", ".join(part for part in parts if part)


def _describe_load(load: dict[str, Any] | None, capacity: dict[str, Any]) -> str:
    if load is None:
        return "does not answer"
    return (
        f"{load['num_running']} running and {load['num_waiting']} waiting"
        f" for {capacity['num_slots']} slots,"
        f" {load['num_blocks_cached']} of {capacity['num_blocks']} blocks cached"
    )
