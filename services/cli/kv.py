"""firsttoken kv: what the KV stores of a mesh hold, and dropping it."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc.aio

from firsttoken._errors import to_mesh_error
from firsttoken._requests import build_request
from firsttoken.control.v1 import control_pb2
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.cli import kv_tables, prompts, rpc
from services.cli.failures import BAD_REQUEST, Failure
from services.cli.members import READY
from services.core.config import from_json
from services.core.keys import join_keys, split_keys, storage_key
from services.core.tokens import BYTES_PER_TOKEN
from services.runtime.channels import open_channel
from services.runtime.tls import Tls

ANSWER_TIMEOUT_S = 5.0
# An eviction looks through all that Redis holds.
EVICT_TIMEOUT_S = 120.0
TIERS = {
    "l1": (kvstore_pb2.TIER_L1,),
    "l2": (kvstore_pb2.TIER_L2,),
    "both": (kvstore_pb2.TIER_L1, kvstore_pb2.TIER_L2),
}


class Keys(NamedTuple):
    """A prompt's full blocks, under the names that one kind of worker stores them by."""

    engine: str
    fingerprint: str
    chain: bytes


class Encoded(NamedTuple):
    num_tokens: int
    block_tokens: int
    # Of the full blocks.
    prefix_keys: list[bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    stats = actions.add_parser("stats", help="show what each store holds, by tier and tenant")
    stats.set_defaults(act=_stats, show=kv_tables.show_stats)

    match = actions.add_parser("match", help="show how much of a prompt each store holds, by tier")
    source = prompts.add_arguments(match)
    source.add_argument(
        "--ids", type=_token_ids, metavar="IDS", help="the prompt's token ids: 1,2,3"
    )
    match.add_argument("--tenant", default="", metavar="T", help="whose prompt it is")
    match.add_argument("--cache-salt", default="", metavar="S", help="as the request has it")
    match.set_defaults(act=_match, show=kv_tables.show_match)

    evict = actions.add_parser(
        "evict", help="drop blocks of a tenant, or all; what workers hold themselves stays"
    )
    selection = evict.add_mutually_exclusive_group(required=True)
    selection.add_argument("--tenant", metavar="T", help='of this tenant; "" is who names none')
    selection.add_argument("--all", action="store_true", help="of everybody")
    evict.add_argument(
        "--tier", choices=TIERS, default="both", help="l1: node memory, l2: Redis (default both)"
    )
    evict.set_defaults(act=_evict, show=kv_tables.show_evicted)

    for action in (stats, match, evict):
        rpc.add_control_option(action)
        action.add_argument("--json", action="store_true", help="print one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    arguments.tls = rpc.open_tls(arguments.tls_dir)
    document = rpc.run(arguments.act(arguments))
    if arguments.json:
        print(json.dumps(document), flush=True)
    else:
        print("\n".join(arguments.show(document)), flush=True)
    return BAD_REQUEST if any("error" in store for store in document["stores"]) else 0


async def _stats(arguments: argparse.Namespace) -> dict[str, Any]:
    control, tls = arguments.control, arguments.tls
    has_l2 = await _has_l2(control, tls)

    async def ask(stub: kvstore_pb2_grpc.KvStoreServiceStub) -> dict[str, Any]:
        stats = await stub.GetStats(kvstore_pb2.GetStatsRequest(), timeout=ANSWER_TIMEOUT_S)
        return _stats_document(stats, has_l2=has_l2)

    return {"stores": await _ask_stores(await _members(control, tls), tls, ask)}


async def _match(arguments: argparse.Namespace) -> dict[str, Any]:
    members = await _members(arguments.control, arguments.tls)
    encoded = await _encode(_tokenizer_of(members), arguments)
    kinds = _keys(members, encoded.prefix_keys)

    async def ask(stub: kvstore_pb2_grpc.KvStoreServiceStub) -> dict[str, Any]:
        return {"engines": [await _match_one(stub, keys, encoded.block_tokens) for keys in kinds]}

    return {
        "tenant": arguments.tenant,
        "tokens": encoded.num_tokens,
        "block_tokens": encoded.block_tokens,
        "blocks": len(encoded.prefix_keys),
        "stores": await _ask_stores(members, arguments.tls, ask),
    }


async def _evict(arguments: argparse.Namespace) -> dict[str, Any]:
    request = kvstore_pb2.EvictRequest(tiers=TIERS[arguments.tier])
    if arguments.all:
        request.all = True
    else:
        request.tenant = arguments.tenant

    async def ask(stub: kvstore_pb2_grpc.KvStoreServiceStub) -> dict[str, Any]:
        evicted = await stub.Evict(request, timeout=EVICT_TIMEOUT_S)
        return {"l1_blocks": evicted.num_l1, "l2_blocks": evicted.num_l2}

    members = await _members(arguments.control, arguments.tls)
    stores = await _ask_stores(members, arguments.tls, ask)
    return {"tenant": arguments.tenant, "tier": arguments.tier, "stores": stores}


async def _members(control: str, tls: Tls | None) -> list[control_pb2.Member]:
    async with rpc.control_stub(control, tls) as stub:
        response = await stub.ListMembers(control_pb2.ListMembersRequest(), timeout=rpc.TIMEOUT_S)
    return sorted(response.members, key=lambda member: member.address)


async def _has_l2(control: str, tls: Tls | None) -> bool:
    async with rpc.control_stub(control, tls) as stub:
        response = await stub.GetConfig(control_pb2.GetConfigRequest(), timeout=rpc.TIMEOUT_S)
    return bool(from_json(response.configuration.config_json).kvstore.redis_url)


async def _ask_stores(
    members: Sequence[control_pb2.Member],
    tls: Tls | None,
    ask: Callable[[kvstore_pb2_grpc.KvStoreServiceStub], Awaitable[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """What each store says; of one that does not answer, its `error`."""
    stores = [m for m in members if m.role == control_pb2.MEMBER_ROLE_KVSTORE and m.state == READY]
    if not stores:
        raise Failure("no KV store in this mesh is ready", code="FAILED_PRECONDITION")

    async def ask_one(member: control_pb2.Member) -> dict[str, Any]:
        who = {"id": member.id, "address": member.address}
        async with open_channel(member.address, tls) as channel:
            try:
                return who | await ask(kvstore_pb2_grpc.KvStoreServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                failure = rpc.to_failure(to_mesh_error(error), nobody="does not answer")
                return who | {"error": failure.fields()}

    return list(await asyncio.gather(*map(ask_one, stores)))


def _tokenizer_of(members: Sequence[control_pb2.Member]) -> str:
    for member in members:
        if member.role == control_pb2.MEMBER_ROLE_TOKENIZER and member.state == READY:
            return member.address
    raise Failure("no tokenizer in this mesh is ready", code="FAILED_PRECONDITION")


async def _encode(address: str, arguments: argparse.Namespace) -> Encoded:
    request = _encode_request(arguments)
    async with open_channel(address, arguments.tls) as channel:
        try:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            encoded = await stub.Encode(request, timeout=ANSWER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            nobody = f"the tokenizer at {address} does not answer"
            raise rpc.to_failure(to_mesh_error(error), nobody=nobody) from None
    _, *prefix_keys = split_keys(encoded.prefix_keys)
    num_tokens = len(encoded.token_ids) // BYTES_PER_TOKEN
    return Encoded(num_tokens, encoded.block_tokens, prefix_keys)


def _encode_request(arguments: argparse.Namespace) -> tokenizer_pb2.EncodeRequest:
    try:
        if arguments.ids is not None:
            generate = build_request(arguments.ids, {})
        else:
            prompt = prompts.read_prompt(arguments)
            generate = build_request(
                prompt.input, {} if prompt.tools is None else {"tools": prompt.tools}
            )
    except (KeyError, TypeError, ValueError) as error:
        raise Failure(f"the prompt makes no sense: {error}", code="INVALID_ARGUMENT") from None
    kind = generate.WhichOneof("input")
    assert kind is not None
    return tokenizer_pb2.EncodeRequest(
        tenant=arguments.tenant,
        cache_salt=arguments.cache_salt,
        **{kind: getattr(generate, kind)},
    )


def _keys(members: Sequence[control_pb2.Member], prefix_keys: Sequence[bytes]) -> list[Keys]:
    """For each kind of worker: blocks of one are of no use to another."""
    workers = {m.worker.fingerprint: m.worker.engine for m in members if m.worker.fingerprint}
    if not workers:
        raise Failure(
            "no worker in this mesh has said yet how it names its blocks",
            code="FAILED_PRECONDITION",
        )
    return [
        Keys(
            engine=engine,
            fingerprint=fingerprint,
            chain=join_keys([storage_key(key, bytes.fromhex(fingerprint)) for key in prefix_keys]),
        )
        for fingerprint, engine in sorted(workers.items())
    ]


async def _match_one(
    stub: kvstore_pb2_grpc.KvStoreServiceStub, keys: Keys, block_tokens: int
) -> dict[str, Any]:
    found = await stub.Match(kvstore_pb2.MatchRequest(chain=keys.chain), timeout=ANSWER_TIMEOUT_S)
    return {
        "engine": keys.engine,
        "fingerprint": keys.fingerprint,
        "l1_blocks": found.num_l1,
        "l1_tokens": found.num_l1 * block_tokens,
        "blocks": found.num_all,
        "tokens": found.num_all * block_tokens,
    }


def _stats_document(stats: kvstore_pb2.GetStatsResponse, *, has_l2: bool) -> dict[str, Any]:
    l2 = {
        **rpc.plain(stats.l2),
        "connected": stats.l2_connected,
        "num_pending_writes": stats.num_pending_writes,
        "num_dropped_writes": stats.num_dropped_writes,
    }
    return {
        "l1": {**rpc.plain(stats.l1), "num_reserved": stats.num_reserved},
        "l2": l2 if has_l2 else None,
        "tenants": [rpc.plain(tenant) for tenant in stats.tenants],
        "rejected": dict(stats.rejected),
    }


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError("must be whole numbers: 1,2,3") from None
