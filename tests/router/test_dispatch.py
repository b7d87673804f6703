from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.admission import RequestClass
from router.dispatch import Dispatcher, Grant
from router.prompt import Prompt
from services.core import config
from services.core.config import Snapshot
from services.core.errors import Overloaded, Unavailable
from tests.router.fleets import announce

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
PROMPT = Prompt(b"", bytes(32), 64)


def make_snapshot(generation: int = 1, **router: Any) -> Snapshot:
    return Snapshot(generation, config.parse({"router": router}))


@pytest.fixture
async def dispatcher() -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(make_snapshot(routing_strategy="least_outstanding"))
    yield dispatcher
    dispatcher.close()
    dispatcher.check_idle()


async def hold(
    dispatcher: Dispatcher, done: asyncio.Event, request_class: RequestClass = INTERACTIVE
) -> Grant:
    """A request that keeps its worker until `done`."""
    with dispatcher.enter(request_class) as place:
        grant = await dispatcher.wait_for_worker(place, PROMPT)
        with grant:
            await done.wait()
            return grant


async def turns(count: int = 5) -> None:
    """Let the other tasks run as far as they can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_grants_at_once_while_a_worker_has_room(dispatcher: Dispatcher) -> None:
    dispatcher.update_workers([announce("a", num_slots=2), announce("b", num_slots=1)])
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(hold(dispatcher, done))
        await turns()
        assert [worker.in_flight for worker in dispatcher.workers] == [2, 1]
        assert dispatcher.num_waiting == 1
        done.set()


async def test_a_freed_slot_goes_to_who_waits(dispatcher: Dispatcher) -> None:
    dispatcher.update_workers([announce("a", num_slots=1)])
    first, second = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(hold(dispatcher, first))
        waiting = group.create_task(hold(dispatcher, second))
        await turns()
        first.set()
        await turns()
        assert dispatcher.num_in_flight == 1
        assert dispatcher.num_waiting == 0
        second.set()

    assert waiting.done()


async def test_a_worker_that_joins_serves_those_who_wait(dispatcher: Dispatcher) -> None:
    done = asyncio.Event()
    done.set()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hold(dispatcher, done)) for _ in range(3)]
        await turns()
        assert dispatcher.num_waiting == 3
        dispatcher.update_workers([announce("a")])

    assert {task.result().slot.worker.announced.id for task in tasks} == {"a"}


async def test_gives_up_when_no_worker_comes(dispatcher: Dispatcher) -> None:
    dispatcher.configure(make_snapshot(worker_wait_s=0.02))
    with dispatcher.enter(BATCH) as place, pytest.raises(Unavailable) as refusal:
        await dispatcher.wait_for_worker(place, PROMPT)

    assert refusal.value.reason == "NO_WORKER"


async def test_gives_up_at_once_when_told_not_to_wait(dispatcher: Dispatcher) -> None:
    dispatcher.configure(make_snapshot(worker_wait_s=0))
    with dispatcher.enter(INTERACTIVE) as place, pytest.raises(Unavailable):
        await dispatcher.wait_for_worker(place, PROMPT)


async def test_does_not_give_up_while_workers_are_only_busy(dispatcher: Dispatcher) -> None:
    dispatcher.configure(make_snapshot(worker_wait_s=0))
    dispatcher.update_workers([announce("a", num_slots=1)])
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(hold(dispatcher, done))
        waiting = group.create_task(hold(dispatcher, done))
        await turns(20)
        assert not waiting.done()
        done.set()


async def test_gives_up_those_who_wait_when_the_last_worker_leaves(
    dispatcher: Dispatcher,
) -> None:
    dispatcher.configure(make_snapshot(worker_wait_s=0.02))
    dispatcher.update_workers([announce("a", num_slots=1)])
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(hold(dispatcher, done))
        waiting = group.create_task(hold_and_expect_no_worker(dispatcher))
        await turns()
        dispatcher.update_workers([])
        await waiting
        done.set()


async def hold_and_expect_no_worker(dispatcher: Dispatcher) -> None:
    with pytest.raises(Unavailable, match="no worker was ready"):
        await hold(dispatcher, asyncio.Event())


async def test_avoids_a_failed_worker_and_tries_it_again_later(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.FIRST_SUSPICION_S", 0.02)
    dispatcher.update_workers([announce("a")])
    with dispatcher.enter(INTERACTIVE) as place:
        grant = await dispatcher.wait_for_worker(place, PROMPT)
        with grant:
            dispatcher.failed(grant.slot.worker)
        assert dispatcher.workers[0].room(grant.granted_s) == 0
        again = await dispatcher.wait_for_worker(place, PROMPT)
        again.release()

    assert again.granted_s >= grant.granted_s + 0.02


async def test_refuses_what_exceeds_the_queue(dispatcher: Dispatcher) -> None:
    dispatcher.configure(make_snapshot(max_queue=1))
    with dispatcher.enter(INTERACTIVE), pytest.raises(Overloaded):
        dispatcher.enter(INTERACTIVE)


async def test_a_new_configuration_applies_to_those_who_wait(dispatcher: Dispatcher) -> None:
    done = asyncio.Event()
    done.set()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(hold(dispatcher, done))
        await turns()
        dispatcher.configure(make_snapshot(7, routing_strategy="round_robin"))
        dispatcher.update_workers([announce("a")])

    assert waiting.result().generation == 7


@pytest.mark.parametrize("turns_after_release", range(4))
@pytest.mark.parametrize("turns_before_release", range(4))
async def test_a_cancel_at_any_turn_frees_everything(
    dispatcher: Dispatcher, turns_before_release: int, turns_after_release: int
) -> None:
    dispatcher.update_workers([announce("a", num_slots=1)])
    first = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(hold(dispatcher, first))
        await turns()
        victim = group.create_task(hold(dispatcher, asyncio.Event()))
        await turns(turns_before_release)
        first.set()
        await turns(turns_after_release)
        victim.cancel()
    dispatcher.check_idle()

    assert dispatcher.workers[0].room(0.0) == 1


async def test_a_request_cancelled_in_line_does_not_take_the_slot(
    dispatcher: Dispatcher,
) -> None:
    dispatcher.update_workers([announce("a", num_slots=1)])
    first, last = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(hold(dispatcher, first))
        await turns()
        cancelled = group.create_task(hold(dispatcher, asyncio.Event()))
        served = group.create_task(hold(dispatcher, last))
        await turns()
        cancelled.cancel()
        first.set()
        await turns()
        assert dispatcher.num_in_flight == 1
        last.set()

    assert not served.cancelled()


@pytest.mark.parametrize("seed", range(10))
async def test_nobody_waits_while_a_worker_has_room(dispatcher: Dispatcher, seed: int) -> None:
    rng = random.Random(seed)
    running: list[tuple[asyncio.Task[Grant], asyncio.Event]] = []
    for _ in range(200):
        match rng.randrange(5):
            case 0 | 1:
                done = asyncio.Event()
                request_class = rng.choice([INTERACTIVE, BATCH])
                task = asyncio.ensure_future(hold(dispatcher, done, request_class))
                running.append((task, done))
            case 2 if running:
                running.pop(rng.randrange(len(running)))[1].set()
            case 3 if running:
                running.pop(rng.randrange(len(running)))[0].cancel()
            case 4:
                names = rng.sample("abcd", rng.randrange(1, 5))
                dispatcher.update_workers(
                    announce(name, num_slots=rng.randint(1, 3)) for name in names
                )
        await turns()
        room = sum(worker.room(time.monotonic()) for worker in dispatcher.workers)
        assert not (dispatcher.num_waiting and room)
    for task, _ in running:
        task.cancel()
    await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
