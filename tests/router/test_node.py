"""A router among real nodes, in a mesh where nothing breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from firsttoken.client import MeshClient, MeshError
from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from router.node import RouterNode
from services.core.ledger import Segment
from services.core.tokens import pack
from services.runtime.startup import StartupError
from tests.conftest import Mesh, MeshFactory
from tests.router.meshes import configure, endless, idle, simulated
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_WORKERS, NUM_SLOTS = 2, 2


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mesh(mesh_of: MeshFactory) -> AsyncIterator[Mesh]:
    # Slow enough for a prefix to be worth more than the 2 ms that routing takes for a tie.
    timing = {"decode_step_ms": 5.0, "prefill_tokens_per_s": 20_000}
    config = simulated(num_slots=NUM_SLOTS, timing=timing)
    async with mesh_of(config, num_workers=NUM_WORKERS) as mesh:
        yield mesh
        await idle(mesh.router)


async def fill(mesh: Mesh, client: MeshClient) -> list[Any]:
    """Requests that hold every slot of every worker."""
    streams = [endless(client) for _ in range(NUM_WORKERS * NUM_SLOTS)]
    for stream in streams:
        await anext(stream)
    return streams


@pytest.mark.parametrize(
    "prompt",
    ["Once upon a time", [{"role": "user", "content": "hi"}], [1, 2, 3, 4]],
    ids=["text", "chat", "ids"],
)
async def test_answers_every_form_of_a_prompt(mesh: Mesh, prompt: Any) -> None:
    answer = await mesh.client.complete(prompt, max_tokens=5, ignore_eos=True)

    assert len(answer.token_ids) == answer.usage.completion_tokens == 5
    assert answer.text
    assert answer.finish_reason == "length"
    assert answer.engine == "simulated"
    assert answer.worker_id in {worker.id for worker in mesh.workers}
    assert answer.attempts == 1
    assert answer.generation == mesh.router.mesh.snapshot.generation


async def test_closes_the_ledger_over_what_the_client_saw(mesh: Mesh) -> None:
    answer = await mesh.client.complete("Once upon a time", max_tokens=2)

    assert list(answer.ledger) == list(Segment)
    assert sum(answer.ledger.values()) + answer.residual_ms == pytest.approx(answer.ttft_ms)
    assert answer.ledger["transfer"] > 0
    assert answer.ledger["preprocess"] > 0


async def test_goes_on_with_the_trace_of_the_caller(mesh: Mesh) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    answer = await mesh.client.complete(
        "hi", max_tokens=1, traceparent=f"00-{trace_id}-b7ad6b7169203331-01"
    )

    assert answer.trace_id == trace_id


async def test_begins_a_trace_where_there_is_none(mesh: Mesh) -> None:
    first = await mesh.client.complete("hi", max_tokens=1)
    second = await mesh.client.complete("hi", max_tokens=1, traceparent="nonsense")

    assert len(first.trace_id) == len(second.trace_id) == 32
    assert first.trace_id != second.trace_id


async def test_reuses_a_prefix_only_within_tenant_and_salt(mesh: Mesh) -> None:
    ids = list(range(100, 300))

    async def cached_tokens(tenant: str, salt: str) -> int:
        async with MeshClient(mesh.router.address, tenant=tenant) as client:
            answer = await client.complete(ids, max_tokens=1, cache_salt=salt)
            return answer.usage.cached_tokens

    assert await cached_tokens("a", "") == 0
    assert await cached_tokens("a", "") == 192
    assert await cached_tokens("b", "") == 0
    assert await cached_tokens("a", "x") == 0


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "text"),
        ("x" * 5_000_000, {}, "text"),
        ("long " * 3000, {}, "text"),
        ([{"role": "user", "content": "long " * 3000}], {}, "chat"),
        ([1] * 3000, {}, "token_ids"),
        ([1 << 31], {}, "token_ids"),
        ([], {}, "token_ids"),
        ([{"content": "hi"}], {}, "chat.messages[0].role"),
        ("hi", {"model": "other"}, "model"),
        ("hi", {"max_tokens": 0}, "sampling.max_tokens"),
        ("hi", {"max_tokens": 100_000}, "sampling.max_tokens"),
        ("hi", {"temperature": float("nan")}, "sampling.temperature"),
        ("hi", {"stop": [""]}, "sampling.stop[0]"),
        ("hi", {"stop_token_ids": [2**32 - 1]}, "sampling.stop_token_ids[0]"),
    ],
)
async def test_names_the_field_that_breaks_a_rule(
    mesh: Mesh, prompt: Any, options: Any, field: str
) -> None:
    with pytest.raises(MeshError) as refusal:
        await mesh.client.complete(prompt, **options)

    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in refusal.value.violations] == [field]


async def test_says_how_long_a_prompt_is_and_may_be(mesh: Mesh) -> None:
    with pytest.raises(MeshError, match=r"at most 2047 tokens.*2048.*got \d{4}"):
        await mesh.client.complete("long " * 3000)


async def test_passes_on_what_a_tokenizer_refuses_with_its_details(mesh: Mesh) -> None:
    with pytest.raises(MeshError) as refusal:
        await mesh.client.complete(
            [{"role": "user", "content": "hi"}], template_args={"messages": "broken"}
        )

    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.violations


async def test_serves_as_many_as_there_are_slots_and_queues_the_rest(mesh: Mesh) -> None:
    dispatcher = mesh.router.mesh.dispatcher
    running = await fill(mesh, mesh.client)
    waiting = asyncio.ensure_future(mesh.client.complete("hi", max_tokens=1))
    await eventually(lambda: dispatcher.num_waiting == 1)

    assert [worker.in_flight for worker in dispatcher.workers] == [NUM_SLOTS] * NUM_WORKERS
    running.pop().cancel()
    answer = await waiting
    assert answer.ledger["queue"] > 0
    for stream in running:
        stream.cancel()
    await idle(mesh.router)


async def test_refuses_more_than_the_queue_holds_and_says_when_to_come_back(mesh: Mesh) -> None:
    dispatcher = mesh.router.mesh.dispatcher
    generation = await configure(mesh.control.address, {"router.max_queue": "1"})
    await eventually(lambda: mesh.router.mesh.snapshot.generation == generation)
    running = await fill(mesh, mesh.client)
    waiting = asyncio.ensure_future(mesh.client.complete("hi", max_tokens=1))
    await eventually(lambda: dispatcher.num_waiting == 1)
    with pytest.raises(MeshError) as refusal:
        await mesh.client.complete("hi", max_tokens=1)

    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.value.reason == "QUEUE_FULL"
    assert refusal.value.retry_delay_s is not None
    assert refusal.value.retry_delay_s > 0
    for stream in running:
        stream.cancel()
    await waiting
    await configure(mesh.control.address, {"router.max_queue": "1024"})


async def test_a_deadline_that_passes_in_the_queue_frees_the_place(mesh: Mesh) -> None:
    running = await fill(mesh, mesh.client)
    with pytest.raises(MeshError) as failure:
        await mesh.client.complete("hi", deadline_s=0.1)

    assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: mesh.router.mesh.dispatcher.num_pending == 0)
    for stream in running:
        stream.cancel()
    await idle(mesh.router)


async def test_a_deadline_that_passes_while_generating_frees_the_slot(mesh: Mesh) -> None:
    stream = endless(mesh.client, deadline_s=0.3)
    with pytest.raises(MeshError) as failure:
        async for _ in stream:
            pass

    assert failure.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await idle(mesh.router)


async def test_cancels_at_random_moments_leave_nothing_behind(mesh: Mesh) -> None:
    rng = random.Random(1)

    async def ask_and_leave(delay_s: float) -> None:
        async with endless(mesh.client, f"prompt {delay_s}") as stream:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.wait({task}, timeout=delay_s)
            if rng.random() < 0.5:
                task.cancel()
            else:
                stream.cancel()
            await asyncio.gather(task, return_exceptions=True)

    for _ in range(10):
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(ask_and_leave(rng.uniform(0, 0.05)))
    await idle(mesh.router)

    # The workers are free again too: they take a full load.
    for stream in await fill(mesh, mesh.client):
        stream.cancel()


async def test_changes_the_strategy_under_load_without_failing_a_request(mesh: Mesh) -> None:
    done = asyncio.Event()
    generations: set[int] = set()

    async def keep_asking(number: int) -> None:
        while not done.is_set():
            answer = await mesh.client.complete(f"Client {number}", max_tokens=2)
            generations.add(answer.generation)

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(keep_asking(number))
        for strategy in ("round_robin", "random", "least_outstanding", "prefix_aware"):
            generation = await configure(
                mesh.control.address, {"router.routing_strategy": f'"{strategy}"'}
            )
            await eventually(partial(generations.__contains__, generation))
        done.set()


async def test_is_healthy_once_it_has_joined(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.router.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "firsttoken.router.v1.InferenceService"):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=service))

            assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_plain_stub_understands_the_forwarded_bytes(mesh: Mesh) -> None:
    async with grpc.aio.insecure_channel(mesh.router.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            token_ids=pack([1, 2, 3]), sampling=common_pb2.SamplingParams(max_tokens=3)
        )
        events = [event async for event in stub.Generate(request)]

    assert [event.WhichOneof("event") for event in events[-2:]] == ["chunk", "finished"]


async def test_two_routers_share_the_workers(mesh: Mesh) -> None:
    async with (
        RouterNode(control=mesh.control.address) as router,
        MeshClient(router.address) as client,
    ):
        running = await fill(mesh, mesh.client)
        # This router knows of no request but its own: the worker lets it wait.
        waiting = asyncio.ensure_future(client.complete("hi", max_tokens=1))
        await eventually(lambda: router.mesh.dispatcher.num_in_flight == 1)
        for stream in running:
            stream.cancel()
        answer = await waiting
        await idle(router)

    assert answer.attempts == 1


async def test_cannot_start_at_an_address_in_use(mesh: Mesh) -> None:
    second = RouterNode(control=mesh.control.address, listen=mesh.router.address)
    with pytest.raises(StartupError, match=r"cannot listen on .*in use"):
        await second.__aenter__()


async def test_encodes_itself_what_a_tokenizer_would(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    embedded = mesh.router.mesh.tokenizers.embedded
    chat = [{"role": "user", "content": "Caf\u00e9 42 " * 30}]
    long = "A long one, word by word. " * 60

    async def usages() -> list[int]:
        prompts: list[Any] = ["Once upon a time", chat, [1, 2, 3, 4], long]
        answers = [await mesh.client.complete(prompt, max_tokens=1) for prompt in prompts]
        return [answer.usage.prompt_tokens for answer in answers]

    async def refusal() -> tuple[Any, ...]:
        with pytest.raises(MeshError) as failure:
            await mesh.client.complete("\x04\x06", max_tokens=1)
        error = failure.value
        return error.code, error.reason, error.message, error.violations

    by_service = await usages(), await refusal()
    assert list(embedded.read_metrics()) == []
    await configure(mesh.control.address, {"router.tokenize": '"embedded"'})
    await eventually(lambda: embedded.ready, "the vocabulary to be loaded")

    assert (await usages(), await refusal()) == by_service
    answer = await mesh.client.complete(chat, max_tokens=1)
    counted = {sample.name.rpartition(".")[2]: sample.value for sample in embedded.read_metrics()}
    assert (counted["prompts"], counted["failed"], counted["running"]) == (5, 1, 0)
    assert counted["hit"] > 0
    assert answer.ledger["preprocess"] > 0
    delay = "debug.delay_ms.tokenizer_encode"
    generation = await configure(mesh.control.address, {delay: "60"})
    await eventually(lambda: mesh.router.mesh.snapshot.generation == generation)
    answer = await mesh.client.complete(chat, max_tokens=1)
    # An event loop's timers may be a tick early.
    assert answer.ledger["preprocess"] > 55
    await configure(mesh.control.address, {"router.tokenize": '"service"', delay: "0"})
    await eventually(lambda: not embedded.ready)
    assert await usages() == by_service[0]
    assert not caplog.records
