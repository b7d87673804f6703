from __future__ import annotations

import argparse
from collections.abc import AsyncIterator

import pytest

from firsttoken.worker.v1 import worker_pb2_grpc
from services.cli import drain
from services.cli.failures import Failure
from services.control.node import ControlNode
from services.runtime.channels import open_channel
from tests.worker.test_service import CONFIG, request
from worker.node import WorkerNode


@pytest.fixture
async def worker() -> AsyncIterator[WorkerNode]:
    async with (
        ControlNode(config=CONFIG) as control,
        WorkerNode(control=control.address) as node,
    ):
        yield node


async def test_a_worker_finishes_what_it_has(worker: WorkerNode) -> None:
    async with open_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        running = aiter(stub.Generate(request(max_tokens=60)))
        await anext(running)

        left = await drain.drain(worker.address, 0.15, None)
        drained = await drain.drain(worker.address, 20.0, None)
        rest = [response async for response in running]

        assert (left, drained) == (1, 0)
        assert rest[-1].HasField("finished")
        assert worker.is_idle


async def test_where_no_worker_is_it_says_so() -> None:
    with pytest.raises(Failure, match=r"no worker answers at 127\.0\.0\.1:9"):
        await drain.drain("127.0.0.1:9", 2.0, None)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9", "soon"])
def test_a_wait_is_bounded(seconds: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    drain.add_arguments(parser)

    with pytest.raises(argparse.ArgumentError, match="--seconds"):
        parser.parse_args(["127.0.0.1:1", "--seconds", seconds])
