"""A mesh's control service and KV store, for workers of tests/worker/tiers.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvstore.node import KvStoreNode
from services.control.node import ControlNode
from tests.runtime.processes import Running, running
from tests.worker.tiers import CONFIG, until


@pytest.fixture
async def control() -> AsyncIterator[ControlNode]:
    async with ControlNode(config=CONFIG) as node:
        yield node


@pytest.fixture
async def store(control: ControlNode) -> AsyncIterator[KvStoreNode]:
    async with KvStoreNode(control=control.address) as node:
        yield node
        await until(lambda: node.store.tier1.index.num_reserved == 0)
        node.store.check_integrity()


@pytest.fixture
async def store_process(control: ControlNode) -> AsyncIterator[Running]:
    """In a process of its own, to be killed and stopped."""
    async with running("kvstore", "--control", control.address) as process:
        yield process
