"""Blocks, chains and calls for the tests of the KV store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import grpc
import numpy as np

from firsttoken.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from services.core.keys import join_keys, storage_key
from services.core.kvblocks import ArenaLayout, Block, Bytes, Place, checksum, payload
from services.runtime.channels import open_channel

FINGERPRINT = b"engine, model, layout"
NUM_BYTES = 10_000
NUM_TOKENS = 64
RESERVED = kvstore_pb2.RESERVATION_STATE_RESERVED
PRESENT = kvstore_pb2.RESERVATION_STATE_PRESENT
REFUSED = kvstore_pb2.RESERVATION_STATE_REFUSED


class Chain(NamedTuple):
    """A prompt's blocks, with bytes that differ from all other chains'."""

    blocks: tuple[Block, ...]
    datas: tuple[bytes, ...]

    @property
    def keys(self) -> list[bytes]:
        return [block.storage_key for block in self.blocks]

    @property
    def joined(self) -> bytes:
        return join_keys(self.keys)


def make_chain(
    name: str,
    length: int,
    *,
    num_bytes: int = NUM_BYTES,
    fingerprint: bytes = FINGERPRINT,
    onto: Chain | None = None,
) -> Chain:
    """`onto`: the chain begins with these blocks."""
    blocks = list(onto.blocks) if onto else []
    datas = list(onto.datas) if onto else []
    for index in range(len(blocks), length):
        prefix_key = hashlib.sha256(f"{name} {index}".encode()).digest()
        key = storage_key(prefix_key, fingerprint)
        blocks.append(Block(key, prefix_key, fingerprint, index, NUM_TOKENS, num_bytes))
        seed = int.from_bytes(prefix_key[:8], "little")
        datas.append(np.random.default_rng(seed).bytes(num_bytes))
    return Chain(tuple(blocks), tuple(datas))


def header_of(block: Block, tenant: str = "") -> kvstore_pb2.BlockHeader:
    return kvstore_pb2.BlockHeader(
        storage_key=block.storage_key,
        prefix_key=block.prefix_key,
        fingerprint=block.fingerprint,
        index=block.index,
        num_tokens=block.num_tokens,
        num_bytes=block.num_bytes,
        tenant=tenant,
    )


def reserve_request(
    chain: Chain, indices: Sequence[int] | None = None, *, mapped: bool = False, tenant: str = ""
) -> kvstore_pb2.PutRequest:
    chosen = range(len(chain.blocks)) if indices is None else indices
    return kvstore_pb2.PutRequest(
        reserve=kvstore_pb2.Reserve(
            headers=[header_of(chain.blocks[index], tenant) for index in chosen],
            chain=chain.joined,
            mapped=mapped,
        )
    )


def commit_request(
    chain: Chain, indices: Sequence[int], *, mapped: bool = False
) -> kvstore_pb2.PutRequest:
    return kvstore_pb2.PutRequest(
        commit=kvstore_pb2.Commit(
            blocks=[
                kvstore_pb2.CommittedBlock(
                    storage_key=chain.blocks[index].storage_key,
                    checksum=checksum(chain.datas[index]),
                    data=b"" if mapped else chain.datas[index],
                )
                for index in indices
            ]
        )
    )


class Client:
    """What a worker does with the store."""

    def __init__(self, stub: kvstore_pb2_grpc.KvStoreServiceStub) -> None:
        self.stub = stub

    async def put(
        self,
        chain: Chain,
        indices: Sequence[int] | None = None,
        *,
        tenant: str = "",
        arena: Bytes | None = None,
    ) -> int:
        """Reserve and commit what is not there; how many were committed.

        `arena`: the mapped memory, to write the bytes there.
        """
        chosen = range(len(chain.blocks)) if indices is None else indices
        call = self.stub.Put()
        await call.write(reserve_request(chain, chosen, mapped=arena is not None, tenant=tenant))
        answer = await call.read()
        assert isinstance(answer, kvstore_pb2.PutResponse)
        pairs = zip(chosen, answer.reserved.reservations, strict=True)
        reserved = {index: each.place.slot for index, each in pairs if each.state == RESERVED}
        if arena is not None:
            for index, slot in reserved.items():
                data = np.frombuffer(chain.datas[index], dtype=np.uint8)
                payload(arena, slot, len(data))[:] = data
        committed = 0
        if reserved:
            await call.write(commit_request(chain, list(reserved), mapped=arena is not None))
            answer = await call.read()
            assert isinstance(answer, kvstore_pb2.PutResponse)
            committed = answer.committed.num_blocks
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        return committed

    async def get(
        self,
        chain: Chain,
        indices: Sequence[int] | None = None,
        *,
        mapped: bool = False,
        fingerprint: bytes = FINGERPRINT,
        num_bytes: int = NUM_BYTES,
    ) -> list[kvstore_pb2.GetResponse]:
        request = kvstore_pb2.GetRequest(
            chain=chain.joined,
            indices=range(len(chain.blocks)) if indices is None else indices,
            mapped=mapped,
            fingerprint=fingerprint,
            num_bytes=num_bytes,
        )
        return [response async for response in self.stub.Get(request)]

    async def datas(self, chain: Chain, indices: Sequence[int] | None = None) -> list[bytes | None]:
        """None for each miss."""
        answers = await self.get(chain, indices)
        return [each.data if each.HasField("data") else None for each in answers]

    async def match(self, chain: Chain) -> tuple[int, int]:
        answer = await self.stub.Match(kvstore_pb2.MatchRequest(chain=chain.joined))
        return answer.num_l1, answer.num_all

    async def stats(self) -> kvstore_pb2.GetStatsResponse:
        return await self.stub.GetStats(kvstore_pb2.GetStatsRequest())


@contextlib.asynccontextmanager
async def client_of(address: str) -> AsyncIterator[Client]:
    async with open_channel(address) as channel:
        yield Client(kvstore_pb2_grpc.KvStoreServiceStub(channel))


def as_arena(memory: Bytes, num_bytes: int = NUM_BYTES) -> Bytes:
    return ArenaLayout.for_blocks(num_bytes, len(memory)).arena(memory)


def place_of(answer: kvstore_pb2.GetResponse) -> Place:
    return Place(answer.mapped.slot, answer.mapped.generation)


async def nothing_reserved(client: Client) -> None:
    """Wait until no call holds a place."""
    async with asyncio.timeout(30):
        while (await client.stats()).num_reserved:
            await asyncio.sleep(0.01)
