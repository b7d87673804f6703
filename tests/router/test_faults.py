"""Peers that are killed, frozen, full, or not there."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest

from firsttoken.client import MeshClient, MeshError
from router.node import RouterNode
from services.tokenizer.node import TokenizerNode
from tests.router.meshes import endless, idle, run_mesh, run_process, run_workers, simulated
from tests.runtime.waiting import eventually
from worker.node import Role, WorkerNode

ROUND_ROBIN = {"routing_strategy": "round_robin"}


@pytest.mark.parametrize("victim", ["front", "core"])
async def test_a_worker_killed_before_the_first_token_costs_no_request(victim: str) -> None:
    async with run_mesh(simulated(router=ROUND_ROBIN)) as mesh, run_workers(mesh, 2) as workers:
        pids = {address: worker.pid_of(victim) for address, worker in workers.items()}
        for pid in pids.values():  # whichever gets the request does not answer it
            os.kill(pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(mesh.client.complete("hi", max_tokens=2))
        await eventually(mesh.at_work)
        [address] = mesh.at_work()
        os.kill(pids.pop(address), signal.SIGKILL)
        [other] = pids.values()
        os.kill(other, signal.SIGCONT)
        answer = await asked

        assert answer.attempts == 2
        assert answer.ledger["route"] > 0


async def test_a_worker_just_killed_costs_none_of_many_requests() -> None:
    async with run_mesh(simulated(router=ROUND_ROBIN)) as mesh, run_workers(mesh, 2) as workers:
        next(iter(workers.values())).kill()
        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(mesh.complete())


async def test_a_worker_that_leaves_in_order_costs_no_request() -> None:
    done = asyncio.Event()
    async with run_mesh(simulated(router=ROUND_ROBIN)) as mesh, run_workers(mesh, 1):

        async def keep_asking() -> None:
            while not done.is_set():
                await mesh.complete()

        async with asyncio.TaskGroup() as group:
            async with WorkerNode(control=mesh.control) as leaving:
                await mesh.ready(2)
                for _ in range(4):
                    group.create_task(keep_asking())
                await eventually(lambda: leaving.address in mesh.at_work())
            await mesh.complete()
            done.set()


async def test_a_full_worker_is_passed_over() -> None:
    config = simulated(
        router=ROUND_ROBIN, num_slots=1, max_waiting=0, timing={"decode_step_ms": 2.0}
    )
    async with (
        run_mesh(config) as mesh,
        TokenizerNode(control=mesh.control),
        WorkerNode(control=mesh.control),
        WorkerNode(control=mesh.control),
        RouterNode(control=mesh.control) as other_router,
        MeshClient(other_router.address) as other_client,
    ):
        await mesh.ready(2)
        async with endless(other_client) as one:
            await anext(one)
            answers = [await mesh.client.complete("hi", max_tokens=2) for _ in range(2)]
            assert max(answer.attempts for answer in answers) == 2
            assert len({answer.worker_id for answer in answers}) == 1

            async with endless(other_client) as two:
                await anext(two)
                with pytest.raises(MeshError) as refusal:
                    await mesh.complete()
        assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.value.reason
        await idle(other_router)


async def test_says_that_there_is_no_worker() -> None:
    config = simulated(router={"worker_wait_s": 0.05})
    async with run_mesh(config) as mesh, TokenizerNode(control=mesh.control):
        await mesh.ready(0)
        with pytest.raises(MeshError, match=r"no worker was ready for 0.05 s") as failure:
            await mesh.complete()

    assert failure.value.code is grpc.StatusCode.UNAVAILABLE
    assert failure.value.reason == "NO_WORKER"


async def test_says_where_the_time_of_a_request_went_that_lasts_too_long() -> None:
    config = simulated(router={"worker_wait_s": 9.0, "max_deadline_s": 1.0})
    async with run_mesh(config) as mesh, TokenizerNode(control=mesh.control):
        await mesh.ready(0)
        with pytest.raises(MeshError, match="lasts at most 1 s") as failure:
            await mesh.complete()

    assert failure.value.reason == "MAX_DEADLINE"
    assert failure.value.ledger["queue"] > 500


async def test_says_that_only_prefill_workers_are_left() -> None:
    config = simulated(router={"worker_wait_s": 0.05})
    async with (
        run_mesh(config) as mesh,
        TokenizerNode(control=mesh.control),
        WorkerNode(control=mesh.control, role=Role.PREFILL) as prefill,
    ):
        await eventually(lambda: mesh.router.mesh.dispatcher.prefill_workers)
        with pytest.raises(MeshError, match=f"answer nothing: {prefill.id}") as failure:
            await mesh.complete()

    assert failure.value.code is grpc.StatusCode.UNAVAILABLE
    assert failure.value.reason == "NO_WORKER"


async def test_requests_go_to_workers_that_answer() -> None:
    async with (
        run_mesh(simulated(router=ROUND_ROBIN)) as mesh,
        TokenizerNode(control=mesh.control),
        WorkerNode(control=mesh.control, role=Role.PREFILL),
        WorkerNode(control=mesh.control, role=Role.DECODE) as decode,
        WorkerNode(control=mesh.control) as both,
    ):
        await mesh.ready(2)
        await eventually(lambda: mesh.router.mesh.dispatcher.prefill_workers)
        answers = [await mesh.client.complete("hi", max_tokens=2) for _ in range(4)]

    assert {answer.worker_id for answer in answers} == {decode.id, both.id}


async def test_says_that_there_is_no_tokenizer() -> None:
    async with run_mesh(simulated(router={"worker_wait_s": 0.05})) as mesh:
        with pytest.raises(MeshError, match=r"no tokenizer answered.*none is ready") as failure:
            await mesh.complete()

    assert failure.value.code is grpc.StatusCode.UNAVAILABLE
    assert failure.value.reason == "NO_TOKENIZER"


async def test_waits_for_a_tokenizer_and_a_worker_that_come_later() -> None:
    async with run_mesh(simulated()) as mesh:
        asked = asyncio.ensure_future(mesh.complete())
        async with TokenizerNode(control=mesh.control), WorkerNode(control=mesh.control):
            await asked


async def test_a_tokenizer_just_killed_costs_no_request() -> None:
    async with (
        run_mesh(simulated()) as mesh,
        run_process("services.tokenizer", mesh.control) as victim,
        TokenizerNode(control=mesh.control),
        WorkerNode(control=mesh.control),
    ):
        await mesh.ready(1)
        await eventually(lambda: len(mesh.router.mesh.roster.tokenizers) == 2)
        victim.kill()
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(mesh.complete())


async def test_a_worker_that_answers_again_is_trusted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.fleet.FIRST_SUSPICION_S", 0.02)
    async with (
        run_mesh(simulated()) as mesh,
        TokenizerNode(control=mesh.control),
        WorkerNode(control=mesh.control),
    ):
        await mesh.ready(1)
        [worker] = mesh.workers
        mesh.router.mesh.dispatcher.failed(worker)
        await mesh.complete()

        assert worker.num_failures == 0


async def test_a_worker_back_at_its_address_is_used_at_once() -> None:
    config = simulated(router={"worker_wait_s": 30.0})
    async with run_mesh(config) as mesh, TokenizerNode(control=mesh.control):
        async with run_process("worker", mesh.control) as first:
            await mesh.ready(1)
            await mesh.complete()
        async with WorkerNode(control=mesh.control, listen=first.address) as second:
            answer = await mesh.client.complete("hi", max_tokens=2)

    assert answer.worker_id == second.id
