from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvloop

from worker.front_link import FrontLink
from worker.link import CoreLink, LinkClosed
from worker.messages import Cancel, Failed


async def test_commands_of_one_turn_arrive_as_one_batch() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        core = CoreLink(theirs)
        async with FrontLink(ours) as front:
            for request_id in range(3):
                front.send(Cancel(request_id))

            commands = await asyncio.to_thread(core.receive, wait_s=None)

    assert commands == [Cancel(0), Cancel(1), Cancel(2)]


async def test_a_core_that_need_not_wait_takes_only_what_is_there() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert CoreLink(theirs).receive(wait_s=0) == []


async def test_reports_arrive_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        core = CoreLink(theirs)
        async with FrontLink(ours) as front:

            def send_all() -> None:
                for index in range(5):
                    core.send(Failed(str(index) * 100_000))

            task = asyncio.ensure_future(asyncio.to_thread(send_all))
            received = [await front.receive() for _ in range(5)]
            await task

    assert received == [Failed(str(index) * 100_000) for index in range(5)]


def test_commands_for_a_core_that_is_gone_are_dropped() -> None:
    """On the loop that workers run on: it raises where asyncio's own is silent."""
    problems: list[dict[str, Any]] = []

    async def send_to_nobody() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, problem: problems.append(problem)
        )
        ours, theirs = socket.socketpair()
        async with FrontLink(ours) as front:
            theirs.close()
            for request_id in range(3):
                front.send(Cancel(request_id))
                await asyncio.sleep(0.02)
        front.send(Cancel(3))
        await asyncio.sleep(0.02)

    uvloop.run(send_to_nobody())

    assert problems == []


async def test_each_end_notices_that_the_other_is_gone() -> None:
    ours, theirs = socket.socketpair()
    core = CoreLink(theirs)
    async with FrontLink(ours):
        pass
    with pytest.raises(LinkClosed):
        await asyncio.to_thread(core.receive, wait_s=None)
    with pytest.raises(LinkClosed):
        core.send(Failed("x" * 10_000_000))
    theirs.close()

    ours, theirs = socket.socketpair()
    async with FrontLink(ours) as front:
        theirs.close()
        with pytest.raises(LinkClosed):
            await front.receive()
