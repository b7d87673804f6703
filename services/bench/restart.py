"""What is left when all workers and the KV store of a mesh are killed: what lies in Redis."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from firsttoken.client import Answer, MeshClient
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from services.bench.processes import kill, until
from services.bench.reuse import WORDS
from services.core.keys import join_keys, split_keys, storage_key
from services.runtime.channels import open_channel
from services.runtime.startup import StartupError

WORKER, KVSTORE = control_pb2.MEMBER_ROLE_WORKER, control_pb2.MEMBER_ROLE_KVSTORE
TOKENIZER = control_pb2.MEMBER_ROLE_TOKENIZER
WRITTEN_TIMEOUT_S = 60.0
READY_TIMEOUT_S = 180.0


class Prompt(NamedTuple):
    """`salt`: keeps a run from what earlier runs left in the caches."""

    text: str
    salt: str


class Pair(NamedTuple):
    """After the restart: a prompt that nobody asked before, and one from before."""

    fresh: Answer
    known: Answer


async def measure(
    client: MeshClient, control: str, *, prompt_tokens: int = 500, num_prompts: int = 5
) -> dict[str, Any]:
    """Kills processes of the mesh: one that runs on this machine and starts them again, as
    `firsttoken up` does. Raises StartupError where that cannot be, or there is no Redis.
    """
    prompts = [_make_prompt(prompt_tokens) for _ in range(num_prompts)]
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        before = [await _ask(client, prompt) for prompt in prompts]
        members = await _members(stub)
        await _wait_until_written(members, prompts)
        victims = [member for member in members if member.role in (WORKER, KVSTORE)]
        began_s = asyncio.get_running_loop().time()
        kill(victims, control)
        members = await _wait_until_replaced(stub, victims)
        ready_s = asyncio.get_running_loop().time() - began_s
        # A process that has answered nothing yet is slow in itself.
        num_workers = sum(member.role == WORKER for member in members)
        await asyncio.gather(*(_ask(client, _make_prompt(32)) for _ in range(num_workers)))
        pairs = [
            Pair(await _ask(client, _make_prompt(prompt_tokens)), await _ask(client, prompt))
            for prompt in prompts
        ]
        stats = await _stats(_only(members, KVSTORE))
    return {**_compare(before, pairs), "ready_s": ready_s, **_of_redis(stats)}


def _compare(before: Sequence[Answer], pairs: Sequence[Pair]) -> dict[str, Any]:
    fresh_ms = statistics.median(pair.fresh.ttft_ms for pair in pairs)
    known_ms = statistics.median(pair.known.ttft_ms for pair in pairs)
    return {
        "benchmark": "restart",
        "engine": pairs[0].known.engine,
        "prompts": len(pairs),
        "prompt_tokens": sum(pair.known.usage.prompt_tokens for pair in pairs),
        "cached_tokens": sum(pair.known.usage.cached_tokens for pair in pairs),
        "loaded_blocks": sum(pair.known.kv_path.loaded_blocks for pair in pairs),
        "same_answers": [each.token_ids for each in before]
        == [pair.known.token_ids for pair in pairs],
        "fresh_ttft_ms": fresh_ms,
        "known_ttft_ms": known_ms,
        "ttft_ratio": known_ms / fresh_ms,
    }


def _of_redis(stats: kvstore_pb2.GetStatsResponse) -> dict[str, Any]:
    return {
        "redis_blocks_read": stats.l2.num_hits,
        "redis_bytes_read": stats.l2.bytes_read,
        "redis_bytes_per_s": stats.l2.read_bytes_per_s,
    }


def _make_prompt(num_tokens: int) -> Prompt:
    salt = f"bench restart {random.getrandbits(64):x}"
    return Prompt(" ".join(random.choices(WORDS, k=num_tokens)), salt)


async def _ask(client: MeshClient, prompt: Prompt) -> Answer:
    """Greedy."""
    return await client.complete(
        prompt.text, max_tokens=8, temperature=0.0, ignore_eos=True, cache_salt=prompt.salt
    )


async def _members(stub: control_pb2_grpc.ControlServiceStub) -> Sequence[control_pb2.Member]:
    return (await stub.ListMembers(control_pb2.ListMembersRequest())).members


def _only(
    members: Sequence[control_pb2.Member], role: control_pb2.MemberRole.ValueType
) -> control_pb2.Member:
    found = [member for member in members if member.role == role]
    if len(found) != 1:
        name = control_pb2.MemberRole.Name(role).removeprefix("MEMBER_ROLE_").lower()
        raise StartupError(f"there must be one {name} in the mesh; there are {len(found)}")
    return found[0]


async def _stats(kvstore: control_pb2.Member) -> kvstore_pb2.GetStatsResponse:
    async with open_channel(kvstore.address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        return await stub.GetStats(kvstore_pb2.GetStatsRequest())


async def _wait_until_written(
    members: Sequence[control_pb2.Member], prompts: Sequence[Prompt]
) -> None:
    """Every full block of the prompts is in Redis, or given up."""
    kvstore = _only(members, KVSTORE)
    if not (await _stats(kvstore)).l2_connected:
        raise StartupError("the KV store of the mesh has no Redis, or it does not answer")
    fingerprint = next(m.worker.fingerprint for m in members if m.role == WORKER)
    chains = await _chains(_only(members, TOKENIZER), prompts, bytes.fromhex(fingerprint))
    async with open_channel(kvstore.address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)

        async def written() -> bool:
            matched = [
                await stub.Match(kvstore_pb2.MatchRequest(chain=join_keys(chain)))
                for chain in chains
            ]
            all_here = all(
                found.num_all == len(chain) for found, chain in zip(matched, chains, strict=True)
            )
            stats = await stub.GetStats(kvstore_pb2.GetStatsRequest())
            return all_here and not stats.num_pending_writes

        await until(written, WRITTEN_TIMEOUT_S)


async def _chains(
    tokenizer: control_pb2.Member, prompts: Sequence[Prompt], fingerprint: bytes
) -> list[list[bytes]]:
    """The storage keys of each prompt's full blocks."""
    async with open_channel(tokenizer.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        encoded = [
            await stub.Encode(tokenizer_pb2.EncodeRequest(text=prompt.text, cache_salt=prompt.salt))
            for prompt in prompts
        ]
    return [
        [storage_key(key, fingerprint) for key in split_keys(each.prefix_keys)[1:]]
        for each in encoded
    ]


async def _wait_until_replaced(
    stub: control_pb2_grpc.ControlServiceStub, victims: Sequence[control_pb2.Member]
) -> Sequence[control_pb2.Member]:
    """Others are ready in their place."""
    gone = {member.id for member in victims}
    roles = sorted(member.role for member in victims)

    async def replaced() -> bool:
        ready = [
            member.role
            for member in await _members(stub)
            if member.role in (WORKER, KVSTORE)
            and member.state == control_pb2.MEMBER_STATE_READY
            and member.id not in gone
        ]
        return sorted(ready) == roles

    await until(replaced, READY_TIMEOUT_S)
    return await _members(stub)
