"""A gateway before several routers, some of which are not there."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio

from firsttoken._workers import WorkerChannels
from firsttoken.control.v1 import control_pb2
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from router.node import RouterNode
from services.control.node import ControlNode
from services.gateway.node import GatewayNode
from services.gateway.upstream import MeshAnswer, Response, Routers, merge, read_members
from services.runtime.channels import Channels
from services.runtime.membership import ControlClient
from tests.gateway.edges import CHAT, Edge, chat_body, open_http, refusal, run_edge
from tests.router.meshes import configure, simulated
from tests.runtime.ports import free_port
from tests.runtime.processes import running
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = chat_body(max_tokens=2)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[Edge]:
    async with run_edge(simulated(timing={"decode_step_ms": 2.0})) as edge:
        yield edge


def router_member(address: str) -> control_pb2.Member:
    return control_pb2.Member(
        id="router-that-is-not",
        role=control_pb2.MEMBER_ROLE_ROUTER,
        state=control_pb2.MEMBER_STATE_READY,
        address=address,
    )


def has_tokenizer(router: RouterNode) -> bool:
    return bool(router.mesh.roster.tokenizers)


async def test_routers_take_turns(edge: Edge) -> None:
    async with RouterNode(control=edge.mesh.control.address) as second:
        await eventually(lambda: len(edge.node.gateway.members.routers) == 2)
        await eventually(lambda: any(each.ready for each in second.mesh.dispatcher.workers))
        await eventually(lambda: second.mesh.roster.tokenizers)
        body = {**chat_body(max_tokens=1000), "ignore_eos": True}
        asking = [asyncio.ensure_future(edge.http.post(CHAT, json=body)) for _ in range(4)]

        dispatchers = [router.mesh.dispatcher for router in (edge.mesh.router, second)]
        await eventually(lambda: [each.num_in_flight for each in dispatchers] == [2, 2])
        for each in asking:
            each.cancel()
        await edge.idle()


async def test_a_router_that_cannot_be_reached_is_passed_over(edge: Edge) -> None:
    gone = f"127.0.0.1:{free_port()}"
    async with ControlClient(edge.mesh.control.address, router_member(gone)):
        await eventually(lambda: gone in edge.node.gateway.members.routers)

        for _ in range(4):
            assert (await edge.http.post(CHAT, json=BODY)).status_code == 200
    await eventually(lambda: gone not in edge.node.gateway.members.routers)
    await edge.idle()


async def test_answers_from_workers_outlive_their_router(edge: Edge) -> None:
    body = chat_body(max_tokens=1000, ignore_eos=True, stream=True)
    texts = await under_the_death_of_a_router(edge, body)

    assert all("[DONE]" in text for text in texts)


async def test_a_router_that_dies_in_an_answer_it_forwards_is_named(edge: Edge) -> None:
    body = chat_body(max_tokens=1000, ignore_eos=True, stream=True)
    await configure(edge.mesh.control.address, {"gateway.direct": "false"})
    await eventually(lambda: not edge.node.gateway.settings.direct)
    texts = await under_the_death_of_a_router(edge, body)
    await configure(edge.mesh.control.address, {"gateway.direct": "true"})

    lost = [text for text in texts if "[DONE]" not in text]
    assert len(lost) == 1
    assert "the router was lost in the middle of the answer" in lost[0]
    assert '"code":"router_lost"' in lost[0]


async def under_the_death_of_a_router(edge: Edge, body: dict[str, Any]) -> list[str]:
    """Two answers, each begun with another router, of which one is killed."""
    async with (
        running("router", "--control", edge.mesh.control.address) as second,
        AsyncExitStack() as stack,
    ):
        await eventually(lambda: len(edge.node.gateway.members.routers) == 2)
        asking = [edge.http.stream("POST", CHAT, json=body) for _ in range(2)]
        # Each has begun to answer.
        answers = [await stack.enter_async_context(each) for each in asking]
        second.send(signal.SIGKILL)
        texts = [(await each.aread()).decode() for each in answers]
    await edge.idle()
    return texts


async def test_a_router_that_comes_back_at_its_address_is_met_at_once(edge: Edge) -> None:
    address = f"127.0.0.1:{free_port()}"
    for _ in range(2):
        async with RouterNode(control=edge.mesh.control.address, listen=address) as second:
            await eventually(lambda: address in edge.node.gateway.members.routers)
            await eventually(partial(has_tokenizer, second))
            for _ in range(2):
                assert (await edge.http.post(CHAT, json=BODY)).status_code == 200
        await eventually(lambda: address not in edge.node.gateway.members.routers)


async def test_a_mesh_without_a_router_is_not_ready_and_says_so() -> None:
    async with (
        ControlNode(config=simulated()) as control,
        GatewayNode(control=control.address) as node,
        open_http(node) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        ready = await http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "no router is ready"
        error = refusal(await http.post(CHAT, json=BODY))
        assert (error.status, error.type, error.code) == (503, "server_error", "no_router")
        assert error.headers["retry-after"] == "1"

        async with RouterNode(control=control.address):
            await eventually(lambda: node.gateway.members.routers)
            assert (await http.get("/ready")).json()["reason"] == "no worker is ready"


async def test_a_mesh_without_routers_that_answer_says_so() -> None:
    gone = f"127.0.0.1:{free_port()}"
    async with (
        ControlNode(config=simulated()) as control,
        GatewayNode(control=control.address) as node,
        ControlClient(control.address, router_member(gone)),
        open_http(node) as http,
    ):
        await eventually(lambda: node.gateway.members.routers)
        for stream in (False, True):
            error = refusal(await http.post(CHAT, json={**BODY, "stream": stream}))
            assert (error.status, error.code) == (503, "router_unavailable")
        assert not node.gateway.routers.num_calls


def workers_of(channels: Channels) -> WorkerChannels:
    return WorkerChannels(lambda address, _: channels.get(address), encrypted=False)


class StuckRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Its answers are whole, and never get a status."""

    async def Generate(self, request: object, context: object) -> AsyncIterator[Response]:
        response = Response()
        response.finished.SetInParent()
        yield response
        await asyncio.Event().wait()

    async def Plan(self, request: object, context: object) -> inference_pb2.PlanResponse:
        raise NotImplementedError


@pytest.mark.parametrize("num_answers", [1, 4])
async def test_an_answer_that_is_whole_is_told_though_its_router_is_stuck(num_answers: int) -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(StuckRouter(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with Channels() as channels, AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        routers = Routers(channels, workers_of(channels))
        routers.update({address: "stuck"})
        request = inference_pb2.GenerateRequest()
        answers = [MeshAnswer(routers, request, (), timeout_s=600.0) for _ in range(num_answers)]
        async with asyncio.timeout(60), aclosing(merge(answers)) as messages:
            told = [index async for index, response in messages if response.HasField("finished")]
        for answer in answers:
            answer.close()

        assert sorted(told) == list(range(num_answers))
        assert not routers.num_calls


async def test_only_who_is_ready_counts() -> None:
    worker = control_pb2.Member(
        role=control_pb2.MEMBER_ROLE_WORKER,
        state=control_pb2.MEMBER_STATE_READY,
        model="m",
        worker=control_pb2.WorkerCapacity(max_context_tokens=100),
    )
    larger, starting, prefill, foreign = (control_pb2.Member() for _ in range(4))
    for each in (larger, starting, prefill, foreign):
        each.CopyFrom(worker)
    larger.worker.max_context_tokens = 200
    starting.state = control_pb2.MEMBER_STATE_STARTING
    prefill.worker.role = control_pb2.WORKER_ROLE_PREFILL
    foreign.model = "other"

    found = read_members([larger, worker, starting, prefill, foreign, router_member("a:1")], "m")

    assert found == ({"a:1": "router-that-is-not"}, 2, 100)
