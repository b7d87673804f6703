from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
import numpy as np
import pytest

from firsttoken.control.v1 import control_pb2
from firsttoken.kvstore.v1 import kvstore_pb2
from kvstore import node as node_module
from kvstore.node import KvStoreNode
from services.control.node import ControlNode
from services.core import config as mesh_config
from services.core.kvblocks import Block, Bytes, copy_block
from services.observer.node import ObserverNode
from services.runtime import reporter
from services.runtime.membership import ControlClient
from services.runtime.sharing import open_shared
from services.runtime.startup import StartupError
from tests.control.mesh import operating
from tests.kvstore.blocks import (
    NUM_BYTES,
    Chain,
    Client,
    as_arena,
    client_of,
    make_chain,
    nothing_reserved,
    place_of,
)
from tests.runtime.processes import running
from tests.runtime.waiting import eventually


@pytest.fixture
async def control() -> AsyncIterator[ControlNode]:
    async with ControlNode(config=mesh_config.parse({"kvstore": {"capacity_mb": 4}})) as node:
        yield node


@pytest.fixture
async def watcher(control: ControlNode) -> AsyncIterator[ControlClient]:
    member = control_pb2.Member(id="w", role=control_pb2.MEMBER_ROLE_WORKER, address="127.0.0.1:1")
    async with ControlClient(control.address, member) as client:
        yield client


def stores(watcher: ControlClient) -> list[control_pb2.Member]:
    return [m for m in watcher.members if m.role == control_pb2.MEMBER_ROLE_KVSTORE]


def ready_stores(watcher: ControlClient) -> list[control_pb2.Member]:
    return [m for m in stores(watcher) if m.state == control_pb2.MEMBER_STATE_READY]


async def test_a_store_is_a_member_that_hands_out_its_memory(
    control: ControlNode, watcher: ControlClient
) -> None:
    async with KvStoreNode(control=control.address) as node:
        await eventually(lambda: ready_stores(watcher))
        [member] = ready_stores(watcher)
        shared = await open_shared(member.memory_socket)
        assert member.address == node.address
        assert len(shared.array) == 4 << 20
        async with client_of(member.address) as client:
            chain = make_chain("a", 3)
            assert await client.put(chain, arena=as_arena(shared.array)) == 3
            assert await client.datas(chain) == list(chain.datas)
        shared.close()
    await eventually(lambda: not stores(watcher))

    with pytest.raises(ConnectionRefusedError):
        await open_shared(member.memory_socket)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process, memory that is shared included, may be larger than 1 MiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
async def test_a_store_that_cannot_have_its_memory_does_not_start(control: ControlNode) -> None:
    with pytest.raises(StartupError, match="cannot have 4 MiB of memory"):
        await KvStoreNode(control=control.address).__aenter__()


async def test_a_tenants_share_may_be_changed_at_any_time(control: ControlNode) -> None:
    async with KvStoreNode(control=control.address) as node:
        assert node.store.tier1.index.max_tenant_share == 1.0
        async with operating(control.address) as operator:
            await operator.set_config({"kvstore.max_tenant_share": "0.25"})
        await eventually(lambda: node.store.tier1.index.max_tenant_share == 0.25)
        async with client_of(node.address) as client:
            await client.put(make_chain("a", 1))

        assert node.store.tier1.index.max_tenant_share == 0.25


async def test_streams_of_watchers_end_with_the_store(control: ControlNode) -> None:
    async with KvStoreNode(control=control.address) as node, client_of(node.address) as client:
        call = client.stub.Watch(kvstore_pb2.WatchRequest())
        await call.read()
        await node.close()
        assert await call.read() is grpc.aio.EOF


async def test_books_that_do_not_balance_are_reported(
    control: ControlNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "CHECK_INTERVAL_S", 0.01)
    async with KvStoreNode(control=control.address) as node:
        async with client_of(node.address) as client:
            await client.put(make_chain("a", 1))
        with caplog.at_level(logging.ERROR):
            node.store.tier1.index._given_back.append(0)
            await eventually(lambda: "do not balance" in caplog.text)


async def test_a_store_that_is_killed_leaves_nothing_behind_and_no_wrong_bytes(
    control: ControlNode, watcher: ControlClient
) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    chains = [make_chain(f"{number}", 8) for number in range(20)]
    async with running("kvstore", "--control", control.address) as process:
        await eventually(lambda: ready_stores(watcher))
        [member] = ready_stores(watcher)
        shared = await open_shared(member.memory_socket)
        arena = as_arena(shared.array)
        async with client_of(member.address) as client:
            for chain in chains:
                await client.put(chain)
            readers = [_Reader(client, arena, mapped=number % 2 == 1) for number in range(4)]
            tasks = [asyncio.create_task(reader.read_on(chains)) for reader in readers]
            tasks.append(asyncio.create_task(_write_on(client)))
            await eventually(lambda: all(reader.num_right > 50 for reader in readers))
            assert not any(task.done() for task in tasks)
            process.send(signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
        shared.close()
        await eventually(lambda: not stores(watcher))

    with pytest.raises(ConnectionRefusedError):
        await open_shared(member.memory_socket)
    assert set(os.listdir("/dev/shm")) <= shm_before


class _Reader:
    """Reads until the store is gone, and sees no wrong bytes."""

    def __init__(self, client: Client, arena: Bytes, *, mapped: bool) -> None:
        self.num_right = 0
        self._client = client
        self._arena = arena
        self._mapped = mapped

    async def read_on(self, chains: Sequence[Chain]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            for chain in itertools.cycle(chains):
                for answer in await self._client.get(chain, mapped=self._mapped):
                    data = self._data_of(answer, chain.blocks[answer.index])
                    assert data in (None, chain.datas[answer.index])
                    self.num_right += data is not None

    def _data_of(self, answer: kvstore_pb2.GetResponse, block: Block) -> bytes | None:
        if not answer.HasField("mapped"):
            return answer.data if answer.HasField("data") else None
        into = np.empty(NUM_BYTES, dtype=np.uint8)
        problem = copy_block(self._arena, place_of(answer), block, into)
        return None if problem else into.tobytes()


async def _write_on(client: Client) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        for number in itertools.count():
            await client.put(make_chain(f"new {number}", 8))


WRITER = """
import asyncio, sys
from tests.kvstore.blocks import client_of, make_chain, reserve_request

async def main():
    async with client_of(sys.argv[1]) as client:
        call = client.stub.Put()
        await call.write(reserve_request(make_chain("a", 5)))
        print(len((await call.read()).reserved.reservations), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_writer_that_is_killed_leaves_nothing_reserved(control: ControlNode) -> None:
    async with KvStoreNode(control=control.address) as node, client_of(node.address) as client:
        writer = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WRITER, node.address), stdout=asyncio.subprocess.PIPE
        )
        assert writer.stdout is not None
        assert await asyncio.wait_for(writer.stdout.readline(), 60) == b"5\n"
        assert (await client.stats()).num_reserved == 5
        writer.kill()
        await writer.communicate()
        await nothing_reserved(client)

        assert await client.put(make_chain("a", 5)) == 5


async def test_the_observer_hears_what_a_store_has_dropped(
    control: ControlNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "INTERVAL_S", 0.05)
    chain = make_chain("a", 3)
    async with (
        ObserverNode(control=control.address) as observer,
        KvStoreNode(control=control.address) as node,
        client_of(node.address) as client,
    ):
        prompts = observer.books.prompts
        async with asyncio.timeout(20):
            # Until a store has seen an observer, it tells nothing.
            while not prompts.snapshot().store_evictions:
                await client.put(chain)
                await client.stub.Evict(kvstore_pb2.EvictRequest(all=True))
                await asyncio.sleep(0.1)
        known = prompts.snapshot()

    assert known.store_evictions.keys() == {(node.id, block.prefix_key) for block in chain.blocks}
    assert not known.evictions
