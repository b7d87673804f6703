"""Answers whose workers die under them."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import grpc
import pytest

from firsttoken.client import MeshError, Options
from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2
from router.peers import Hop
from router.workers import WorkerCall, open_call
from tests.router.meshes import (
    collect,
    endless,
    idle,
    run_mesh,
    run_process,
    run_workers,
    simulated,
)
from tests.router.victims import PARTS, num_tokens, read, run_victims, said
from tests.runtime.waiting import eventually

SLOW = {"decode_step_ms": 3.0}
ROUND_ROBIN = {"routing_strategy": "round_robin", "max_migrations": 16}

GREEDY: Options = {"ignore_eos": True, "max_tokens": 120}
DRAWN: Options = {**GREEDY, "temperature": 0.8, "top_p": 0.95, "seed": 7}
PENALIZED: Options = {
    **DRAWN,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logprobs": 2,
}

OPTIONS = (GREEDY, DRAWN, PENALIZED)


@pytest.mark.parametrize("part", PARTS)
async def test_answers_go_on_elsewhere_as_if_nothing_had_happened(part: str) -> None:
    rng = random.Random(part)
    asked = [(f"Tale {number}", options) for number in range(2) for options in OPTIONS]
    num_migrations = 0
    # Slow enough that no answer ends before its worker is killed, also on a busy machine.
    config = simulated(router=ROUND_ROBIN, timing={"decode_step_ms": 12.0})
    async with run_mesh(config) as mesh, run_victims(mesh) as victims:
        undisturbed = [await mesh.client.complete(prompt, **options) for prompt, options in asked]
        for _ in range(4):
            answers = await victims.disturb(asked, part, rng=rng, after=rng.randrange(1, 100))
            assert list(map(said, answers)) == list(map(said, undisturbed))
            num_migrations += sum(answer.migrations for answer in answers)
    assert num_migrations >= 10


@pytest.mark.parametrize("part", PARTS)
async def test_answers_fetched_from_a_worker_that_dies_go_on_through_the_router(part: str) -> None:
    rng = random.Random(part)
    asked = [(f"Tale {number}", options) for number in range(2) for options in OPTIONS]
    config = simulated(router=ROUND_ROBIN, timing={"decode_step_ms": 12.0})
    async with run_mesh(config, direct=True) as mesh, run_victims(mesh) as victims:
        plans = mesh.router.mesh.plans
        await eventually(lambda: all(plans.address_of(each.announced.id) for each in mesh.workers))
        before = plans.counts.planned
        undisturbed = [await mesh.client.complete(prompt, **options) for prompt, options in asked]
        assert plans.counts.planned == before + len(asked)
        answers = await victims.disturb(asked, part, rng=rng, after=50)

        assert list(map(said, answers)) == list(map(said, undisturbed))
        assert {answer.migrations for answer in answers} == {0, 1}
        await eventually(lambda: not plans.num_open)
        assert plans.counts.failed + plans.counts.lost >= 1


async def test_the_next_worker_is_told_only_of_the_way_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[common_pb2.Ledger] = []

    def open_and_note(
        channel: grpc.aio.Channel, request: worker_pb2.GenerateRequest, hop: Hop
    ) -> WorkerCall:
        told.append(common_pb2.Ledger.FromString(request.before.SerializeToString()))
        return open_call(channel, request, hop)

    config = simulated(router=ROUND_ROBIN, timing={"decode_step_ms": 12.0})
    async with run_mesh(config) as mesh, run_victims(mesh) as victims:
        await victims.ready()
        monkeypatch.setattr("router.proxied.open_call", open_and_note)
        [answer] = await victims.disturb([("Tale", GREEDY)], "core", rng=random.Random(1), after=20)

    assert answer.migrations == 1
    assert told[0].preprocess_ms > 0
    assert (told[-1].preprocess_ms, told[-1].route_ms > 0) == (0, True)


@pytest.mark.parametrize("part", PARTS)
async def test_a_stop_string_is_found_across_the_break(part: str) -> None:
    rng = random.Random(part)
    config = simulated(router=ROUND_ROBIN, timing=SLOW)
    async with run_mesh(config) as mesh, run_victims(mesh) as victims:
        for number in range(3):
            await victims.ready()
            undisturbed = await mesh.client.complete(f"Stop {number}", **GREEDY)
            # Of several tokens, so that a break may fall into it.
            where = rng.randrange(60, 90)
            text_before, stop = undisturbed.text[:where], undisturbed.text[where : where + 12]
            assert stop not in text_before
            break_at = len(undisturbed.token_ids) * where // len(undisturbed.text)
            options: Options = {**GREEDY, "stop": [stop]}
            async with mesh.client.generate(f"Stop {number}", **options) as stream:
                await read(stream, max(1, break_at - rng.randrange(4)))
                if mesh.at_work():
                    victims.kill_at_work(part)
                async for _ in stream:
                    pass

            assert stream.answer.text == text_before
            assert stream.answer.stop_string == stop


async def test_what_a_prefill_worker_began_goes_on_at_another_decode_worker() -> None:
    config = simulated(router=ROUND_ROBIN, timing=SLOW, handoff_min_tokens=1)
    prompt = "So long a prompt that it has several blocks. " * 20
    async with (
        run_mesh(config) as mesh,
        run_victims(mesh, "--role", "decode") as victims,
        run_process("worker", mesh.control, "--role", "prefill"),
    ):
        dispatcher = mesh.router.mesh.dispatcher
        await eventually(lambda: any(each.ready for each in dispatcher.prefill_workers))
        salted: Options = {**DRAWN, "cache_salt": "undisturbed"}
        undisturbed = await mesh.client.complete(prompt, **salted)
        async with mesh.client.generate(prompt, **DRAWN) as stream:
            await read(stream, 20)
            victims.kill_at_work("front")
            async for _ in stream:
                pass
    usage = stream.answer.usage

    assert undisturbed.kv_path.handed_off
    assert said(stream.answer) == said(undisturbed)
    assert stream.answer.migrations == 1
    assert usage.cached_tokens <= usage.prompt_tokens


async def test_an_answer_survives_the_death_of_one_worker_after_the_other() -> None:
    config = simulated(router=ROUND_ROBIN, timing=SLOW)
    options: Options = {**PENALIZED, "max_tokens": 600}  # no worker is to end it before it dies
    async with run_mesh(config) as mesh, run_victims(mesh) as victims:
        undisturbed = await mesh.client.complete("Again", **options)
        async with mesh.client.generate("Again", **options) as stream:
            for _ in range(4):
                await read(stream, 20)
                victims.kill_at_work("core")
                await eventually(lambda: len(mesh.at_work()) == 1)
            async for _ in stream:
                pass

    assert said(stream.answer) == said(undisturbed)
    assert stream.answer.migrations == 4
    # The other worker has it all, the beginning of the answer included.
    assert stream.answer.usage.cached_tokens <= stream.answer.usage.prompt_tokens


async def test_without_another_worker_it_goes_on_at_its_own_once_that_is_back() -> None:
    async with (
        run_mesh(simulated(timing=SLOW)) as mesh,
        run_workers(mesh, 1) as workers,
        mesh.client.generate("Alone", **GREEDY) as stream,
    ):
        await read(stream, 10)
        os.kill(next(iter(workers.values())).pid_of("core"), signal.SIGKILL)
        async for _ in stream:
            pass
        undisturbed = await mesh.client.complete("Alone", **GREEDY)

    assert said(stream.answer) == said(undisturbed)
    assert stream.answer.migrations == 1


@pytest.mark.parametrize("part", PARTS)
async def test_where_nobody_can_go_on_the_client_is_told_with_what_came(part: str) -> None:
    config = simulated(router={"worker_wait_s": 0.05}, timing=SLOW)
    async with run_mesh(config) as mesh, run_workers(mesh, 1) as workers:
        stream = endless(mesh.client)
        pieces = [await anext(stream)]
        os.kill(next(iter(workers.values())).pid_of(part), signal.SIGKILL)
        with pytest.raises(MeshError) as failure:
            await collect(stream, pieces)

        assert failure.value.code is grpc.StatusCode.UNAVAILABLE
        assert failure.value.reason == "WORKER_DIED"
        assert failure.value.message.startswith(
            f"the worker died after {num_tokens(pieces)} tokens;"
            " it could not go on elsewhere: no worker was ready"
        )


async def test_migrates_no_more_often_than_configured() -> None:
    config = simulated(router={**ROUND_ROBIN, "max_migrations": 1}, timing=SLOW)
    async with (
        run_mesh(config) as mesh,
        run_victims(mesh) as victims,
        endless(mesh.client) as stream,
    ):
        await read(stream, 5)
        victims.kill_at_work("core")
        await read(stream, 5)
        victims.kill_at_work("core")
        with pytest.raises(MeshError, match="at most 1 times") as failure:
            await collect(stream, [])

    assert failure.value.reason == "WORKER_DIED"


async def test_a_deadline_holds_while_an_answer_looks_for_a_worker() -> None:
    config = simulated(router={"worker_wait_s": 60.0}, timing=SLOW)
    async with run_mesh(config) as mesh, run_workers(mesh, 1) as workers:
        stream = endless(mesh.client, deadline_s=2.0)
        await read(stream, 5)
        next(iter(workers.values())).kill()
        with pytest.raises(MeshError) as failure:
            await collect(stream, [])

    assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_leaves_while_its_answer_moves_frees_everything() -> None:
    config = simulated(router={**ROUND_ROBIN, "worker_wait_s": 60.0}, timing=SLOW)
    async with run_mesh(config) as mesh, run_workers(mesh, 2) as workers:
        dispatcher = mesh.router.mesh.dispatcher
        stream = endless(mesh.client)
        await read(stream, 5)
        [first] = mesh.at_work()
        [second] = workers.keys() - {first}
        os.kill(workers[second].pid_of("front"), signal.SIGSTOP)  # it takes the call, no more
        workers[first].kill()
        await eventually(lambda: mesh.at_work() == [second])
        stream.cancel()
        await idle(mesh.router)

        os.kill(workers[second].pid_of("front"), signal.SIGCONT)
        stream = endless(mesh.client)
        await read(stream, 5)
        workers[second].kill()
        await eventually(lambda: dispatcher.num_waiting == 1)
        stream.cancel()
        await idle(mesh.router)


async def test_the_ledger_stays_that_of_the_first_token() -> None:
    config = simulated(router=ROUND_ROBIN, timing=SLOW)
    async with run_mesh(config) as mesh, run_workers(mesh, 2) as workers:
        async with mesh.client.generate("Time", **GREEDY) as stream:
            await read(stream, 5)
            [first] = mesh.at_work()
            [second] = workers.keys() - {first}
            os.kill(workers[second].pid_of("front"), signal.SIGSTOP)
            workers[first].kill()
            await eventually(lambda: mesh.at_work() == [second])
            await asyncio.sleep(0.5)  # a break that would show
            os.kill(workers[second].pid_of("front"), signal.SIGCONT)
            async for _ in stream:
                pass
        answer = stream.answer

    assert all(spent_ms >= 0 for spent_ms in answer.ledger.values())
    assert answer.ledger["prefill"] > 0
    # The break would be more.
    assert abs(answer.residual_ms) < 500
