"""firsttoken status: the members of a mesh and what they are doing."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any, NamedTuple

import grpc.aio

from firsttoken.control.v1 import control_pb2
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from firsttoken.router.v1 import router_pb2, router_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.cli import rpc
from services.cli.members import role_name, state_name, worker_role_name
from services.core.config import from_json
from services.runtime.channels import open_channel
from services.runtime.tls import Tls

ANSWER_TIMEOUT_S = 2.0
SILENT = "does not answer"


class Status(NamedTuple):
    generation: int
    members: list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    rpc.add_control_option(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    status = rpc.run(_collect(arguments.control, rpc.open_tls(arguments.tls_dir)))
    if arguments.json:
        print(json.dumps(status._asdict()))
    else:
        print("\n".join(_table(status)))
    return 0


async def _collect(control: str, tls: Tls | None) -> Status:
    async with rpc.control_stub(control, tls) as stub:
        listed = await stub.ListMembers(control_pb2.ListMembersRequest(), timeout=rpc.TIMEOUT_S)
        configured = await stub.GetConfig(control_pb2.GetConfigRequest(), timeout=rpc.TIMEOUT_S)
    has_l2 = bool(from_json(configured.configuration.config_json).kvstore.redis_url)
    ordered = sorted(listed.members, key=lambda member: (-member.role, member.address))
    described = await asyncio.gather(*(_describe(member, tls, has_l2=has_l2) for member in ordered))
    return Status(listed.generation, list(described))


async def _describe(member: control_pb2.Member, tls: Tls | None, *, has_l2: bool) -> dict[str, Any]:
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
    if member.role == control_pb2.MEMBER_ROLE_OBSERVER:
        fields["page"] = member.http_address
    if member.role == control_pb2.MEMBER_ROLE_WORKER:
        fields["worker"] = {**rpc.plain(member.worker), "role": worker_role_name(member.worker)}
        fields["load"] = await _load(member.address, tls)
    if member.role == control_pb2.MEMBER_ROLE_ROUTER:
        fields["routing"] = await _routing(member.operator_address, tls)
    if member.role == control_pb2.MEMBER_ROLE_KVSTORE:
        fields["kvstore"] = await _blocks(member.address, tls, has_l2=has_l2)
    return fields


async def _load(address: str, tls: Tls | None) -> dict[str, Any] | None:
    """What the worker reports first; None when it does not answer."""
    async with open_channel(address, tls) as channel:
        watching = worker_pb2_grpc.WorkerServiceStub(channel).Watch(
            worker_pb2.WatchRequest(load_only=True), timeout=ANSWER_TIMEOUT_S
        )
        try:
            async for response in watching:
                load = response.snapshot.load if response.HasField("snapshot") else response.load
                return rpc.plain(load)
        except grpc.aio.AioRpcError:
            pass
        finally:
            watching.cancel()
    return None


async def _routing(address: str, tls: Tls | None) -> dict[str, Any] | None:
    """How a router's routing goes; None when it does not answer, or is not that far."""
    if not address:
        return None
    async with open_channel(address, tls) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        try:
            stats = await stub.GetStats(router_pb2.GetStatsRequest(), timeout=ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
    return rpc.plain(stats)


async def _blocks(address: str, tls: Tls | None, *, has_l2: bool) -> dict[str, Any] | None:
    """What the KV store has; None when it does not answer. `l2` is None without a Redis."""
    async with open_channel(address, tls) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        try:
            stats = await stub.GetStats(kvstore_pb2.GetStatsRequest(), timeout=ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
    l2 = {
        **rpc.plain(stats.l2),
        "connected": stats.l2_connected,
        "num_pending_writes": stats.num_pending_writes,
        "num_dropped_writes": stats.num_dropped_writes,
    }
    return {
        "l1": rpc.plain(stats.l1),
        "l2": l2 if has_l2 else None,
        "num_rejected": sum(stats.rejected.values()),
    }


def _table(status: Status) -> list[str]:
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
        for member in status.members
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [f"generation {status.generation}, {len(status.members)} members", "", *table]


def _remark(member: dict[str, Any]) -> str:
    parts = [member["detail"] or member["model"]]
    if "load" in member:
        capacity = member["worker"]
        role = "" if capacity["role"] == "both" else f"for {capacity['role']}"
        parts += [capacity["engine"], role, _describe_load(member["load"], capacity)]
    if member.get("page"):
        parts.append(f"page on {member['page']}")
    if "routing" in member:
        parts.append(_describe_routing(member["routing"]))
    if "kvstore" in member:
        parts.append(_describe_blocks(member["kvstore"]))
    return ", ".join(part for part in parts if part)


def _describe_load(load: dict[str, Any] | None, capacity: dict[str, Any]) -> str:
    if load is None:
        return SILENT
    parts = [
        f"{load['num_running']} running and {load['num_waiting']} waiting"
        f" for {capacity['num_slots']} slots",
        f"{load['num_blocks_cached']} of {capacity['num_blocks']} blocks cached",
    ]
    if load["num_handoffs_taken"] or capacity["role"] == "decode":
        parts.append(f"prompts computed by others: {load['num_handoffs_taken']}")
    if load["num_handoffs_given"] or capacity["role"] == "prefill":
        parts.append(f"prompts computed for others: {load['num_handoffs_given']}")
    if (kv := load["kv"])["blocks_loaded"]:
        parts.append(f"{kv['blocks_loaded']} blocks out of the KV store")
    return ", ".join(parts)


def _describe_routing(routing: dict[str, Any] | None) -> str:
    if routing is None:
        return SILENT
    parts = [routing["strategy"], f"{routing['num_in_flight']} in flight"]
    if routing["num_waiting"]:
        parts.append(f"{routing['num_waiting']} waiting")
    if routing["num_decisions"]:
        parts += [
            f"{routing['cached_tokens']} tokens found in caches and"
            f" {routing['predicted_tokens']} expected in {routing['num_decisions']} requests",
            f"{routing['num_index_blocks']} blocks known",
        ]
    if silent := routing["num_feeds"] - routing["num_live_feeds"]:
        parts.append(f"no reports from {silent} of {routing['num_feeds']}")
    if routing["num_recorded"] or routing["num_not_recorded"]:
        parts.append(f"{routing['num_recorded']} decisions recorded")
    if routing["num_not_recorded"]:
        parts.append(f"{routing['num_not_recorded']} not")
    return ", ".join(parts)


def _describe_blocks(blocks: dict[str, Any] | None) -> str:
    if blocks is None:
        return SILENT
    l1, l2 = blocks["l1"], blocks["l2"]
    parts = [f"{l1['num_blocks']} of {l1['capacity_blocks']} blocks in memory{_hits(l1)}"]
    if l2 is not None and l2["connected"]:
        parts.append(f"{l2['num_blocks']} in Redis{_hits(l2)}")
    elif l2 is not None:
        parts.append(f"Redis {SILENT}")
    if blocks["num_rejected"]:
        parts.append(f"{blocks['num_rejected']} blocks refused")
    return "; ".join(parts)


def _hits(tier: dict[str, Any]) -> str:
    asked = tier["num_hits"] + tier["num_misses"]
    return f" ({tier['num_hits']} hits in {asked} look-ups)" if asked else ""
