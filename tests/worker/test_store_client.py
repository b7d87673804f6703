from __future__ import annotations

import logging
import signal

import pytest

from firsttoken.control.v1 import control_pb2
from kvstore.node import KvStoreNode
from services.control.node import ControlNode
from services.runtime.membership import ControlClient
from tests.runtime.processes import Running
from tests.worker.tiers import until
from worker.store_client import StoreClient

BLOCK_BYTES = 4096
MEMBER = control_pb2.Member(
    id="worker-1",
    role=control_pb2.MEMBER_ROLE_WORKER,
    state=control_pb2.MEMBER_STATE_READY,
    address="127.0.0.1:1",
)


async def test_a_store_that_was_slow_once_is_used_again_at_once_and_without_a_warning(
    control: ControlNode, store: KvStoreNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ControlClient(control.address, MEMBER) as joined,
        StoreClient(joined, block_bytes=BLOCK_BYTES) as client,
    ):
        await until(lambda: client.store is not None)
        assert client.store is not None
        caplog.clear()
        client.suspect(client.store)
        hangs = client.hangs
        await until(lambda: client.store is not None)

        assert hangs
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_store_that_hangs_is_left_alone_until_it_answers(
    control: ControlNode, store_process: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ControlClient(control.address, MEMBER) as joined,
        StoreClient(joined, block_bytes=BLOCK_BYTES) as client,
    ):
        await until(lambda: client.store is not None)
        assert client.store is not None
        store_process.send(signal.SIGSTOP)
        client.suspect(client.store)
        await until(lambda: "kv store does not answer" in caplog.messages)
        answered = client.store
        store_process.send(signal.SIGCONT)
        await until(lambda: client.store is not None, timeout_s=30)

    assert answered is None


async def test_a_store_in_memory_of_this_host_is_mapped(
    control: ControlNode, store: KvStoreNode
) -> None:
    async with (
        ControlClient(control.address, MEMBER) as joined,
        StoreClient(joined, block_bytes=BLOCK_BYTES) as client,
    ):
        await until(lambda: client.store is not None)

        assert client.store is not None
        assert client.store.arena is not None
