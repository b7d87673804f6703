"""A delay injected at each point of the path grows its own segment, and no other."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import pytest
import pytest_asyncio

from firsttoken.client import Answer, MeshClient, MeshError, Prompt
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.core import config as mesh_config
from services.core.ledger import Segment
from services.runtime.channels import open_channel
from tests.conftest import Mesh, MeshFactory
from tests.gateway.edges import COMPLETION, Edge, read_events, run_gateway

# The longer ones for a machine that has so much else to do that chance adds as much.
DELAYS_MS = (20.0, 100.0, 500.0, 2000.0)
TRIES = 4
BLOCK_TOKENS = 16
HANDOFF_TOKENS = 64
# From there on a prompt takes more than one step.
STEP_TOKENS = 16
CONFIG = mesh_config.parse(
    {
        "mesh": {"block_tokens": BLOCK_TOKENS},
        "worker": {
            "engine": "simulated",
            "max_batch_tokens": STEP_TOKENS,
            "handoff_min_tokens": HANDOFF_TOKENS,
            "simulated": {"prefill_tokens_per_s": 1e5, "decode_step_ms": 0.1},
        },
    }
)

# Segment to milliseconds, the residual among them.
Parts: TypeAlias = Mapping[str, float]
Ask: TypeAlias = Callable[[Edge], Awaitable[Parts]]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(mesh_of: MeshFactory) -> AsyncIterator[Edge]:
    """One worker answers and another one prefills what is long; there is a KV store."""
    async with (
        mesh_of(CONFIG, num_prefill_workers=1, with_kvstore=True) as mesh,
        run_gateway(mesh) as edge,
    ):
        yield edge


async def configure(mesh: Mesh, changes: dict[str, float]) -> None:
    """Returns when every member has applied them."""
    async with open_channel(mesh.control.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        texts = {key: str(value) for key, value in changes.items()}
        response = await stub.SetConfig(control_pb2.SetConfigRequest(changes=texts))
        generation = response.configuration.generation
        while True:
            listed = await stub.ListMembers(control_pb2.ListMembersRequest())
            if all(member.generation == generation for member in listed.members):
                return


def some_ids(num_tokens: int) -> list[int]:
    """That nobody asked for before."""
    return [random.randrange(100, 40_000) for _ in range(num_tokens)]


async def ask(edge: Edge, prompt: Prompt) -> Answer:
    return await edge.mesh.client.complete(prompt, max_tokens=1)


def parts_of(answer: Answer) -> Parts:
    parts = {**answer.ledger, "residual": answer.residual_ms}
    assert sum(parts.values()) == pytest.approx(answer.ttft_ms)
    return parts


async def plain(edge: Edge) -> Parts:
    return parts_of(await ask(edge, "The quick brown fox"))


async def proxied(edge: Edge) -> Parts:
    """Through the router, by a client that has a connection."""
    async with MeshClient(edge.mesh.router.address, direct=False) as client:
        await client.complete("The quick brown fox", max_tokens=1)
        return parts_of(await client.complete("The quick brown fox", max_tokens=1))


async def computed(edge: Edge) -> Parts:
    """In two steps, once the KV store has said that it has nothing."""
    return parts_of(await ask(edge, some_ids(STEP_TOKENS + 4)))


async def handed_off(edge: Edge) -> Parts:
    answer = await ask(edge, some_ids(HANDOFF_TOKENS))
    assert answer.kv_path.handed_off
    return parts_of(answer)


async def streamed(edge: Edge) -> Parts:
    body = {"prompt": "The quick brown fox", "max_tokens": 1, "stream": True}
    options = {"stream_options": {"include_ledger": True}}
    response = await edge.http.post(COMPLETION, json={**body, **options})
    [journey] = read_events(response.content)[-1]["firsttoken"]
    return {name.removesuffix("_ms"): value for name, value in journey["ledger"].items()}


async def least(edge: Edge, kind: Ask, num_tries: int) -> dict[str, float]:
    """Of each segment, in the request that spent least there."""
    return smallest([await kind(edge) for _ in range(num_tries)])


def smallest(several: list[Parts]) -> dict[str, float]:
    return {name: min(parts[name] for parts in several) for name in several[0] if name != "total"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def before(edge: Edge) -> dict[Ask, dict[str, float]]:
    kinds: tuple[Ask, ...] = (plain, proxied, computed, handed_off, streamed)
    return {kind: await least(edge, kind, 6) for kind in kinds}


@pytest.mark.parametrize(
    ("point", "kind", "segment"),
    [
        ("gateway_read", streamed, "transfer"),
        ("gateway_parse", streamed, "preprocess"),
        ("gateway_unowned", streamed, "residual"),
        ("gateway_to_router", streamed, "transfer"),
        ("gateway_to_client", streamed, "transfer"),
        ("router_check", plain, "preprocess"),
        ("router_check", streamed, "preprocess"),
        ("router_unowned", plain, "residual"),
        ("router_unowned", proxied, "residual"),
        ("router_to_tokenizer", plain, "transfer"),
        ("tokenizer_encode", plain, "preprocess"),
        ("tokenizer_unowned", plain, "residual"),
        ("router_queue", plain, "queue"),
        ("router_route", plain, "route"),
        ("router_to_worker", proxied, "transfer"),
        ("router_to_client", proxied, "transfer"),
        ("worker_unowned", plain, "residual"),
        ("worker_prefill_queue", plain, "prefill_queue"),
        ("worker_between_steps", computed, "prefill_queue"),
        ("worker_kv_match", computed, "kv_load"),
        ("worker_kv_load", plain, "kv_load"),
        ("worker_kv_load", handed_off, "kv_load"),
        ("worker_prefill", plain, "prefill"),
        ("worker_prefill", handed_off, "prefill"),
        ("worker_sampling", plain, "prefill"),
        ("worker_from_core", plain, "transfer"),
        ("worker_to_router", plain, "transfer"),
        ("worker_to_router", proxied, "transfer"),
        ("handoff_reserve", handed_off, "kv_load"),
        ("handoff_call", handed_off, "transfer"),
        ("handoff_unowned", handed_off, "residual"),
        ("handoff_first_token", handed_off, "transfer"),
    ],
)
async def test_a_delay_grows_exactly_its_segment(
    edge: Edge, before: dict[Ask, dict[str, float]], point: str, kind: Ask, segment: str
) -> None:
    try:
        for delay_ms in DELAYS_MS:
            await configure(edge.mesh, {f"debug.delay_ms.{point}": delay_ms})
            seen: list[Parts] = []
            while len(seen) < TRIES:
                seen.append(await kind(edge))
                after = smallest(seen)
                assert after[segment] >= delay_ms
                if what_grew(before[kind], after, delay_ms) == {segment}:
                    return
        assert what_grew(before[kind], after, delay_ms) == {segment}
    finally:
        await configure(edge.mesh, {f"debug.delay_ms.{point}": 0.0})


def what_grew(before: Parts, after: Parts, delay_ms: float) -> set[str]:
    return {name for name in after if after[name] - before[name] > delay_ms / 2}


@pytest.mark.parametrize(
    ("point", "stage"),
    [
        ("tokenizer_encode", "preprocess"),
        ("router_queue", "queue"),
        ("router_route", "route"),
        ("worker_prefill_queue", "prefill_queue"),
        ("worker_kv_load", "kv_load"),
    ],
)
async def test_an_idle_engine_is_charged_to_whoever_held_its_work(
    edge: Edge, point: str, stage: str
) -> None:
    [worker, _] = edge.mesh.workers
    await plain(edge)
    before_s = worker.load.bubble_s.get(stage, 0.0)
    await configure(edge.mesh, {f"debug.delay_ms.{point}": DELAYS_MS[0]})
    try:
        await plain(edge)
    finally:
        await configure(edge.mesh, {f"debug.delay_ms.{point}": 0.0})

    assert worker.load.bubble_s[stage] - before_s >= DELAYS_MS[0] / 1e3


async def test_there_is_a_case_for_every_point() -> None:
    [parameters] = [
        mark.args[1]
        for mark in test_a_delay_grows_exactly_its_segment.pytestmark  # type: ignore[attr-defined]
        if mark.name == "parametrize"
    ]
    tried = {f"debug.delay_ms.{point}" for point, _, _ in parameters}

    assert tried == {key for key in mesh_config.flatten(CONFIG) if key.startswith("debug.delay_ms")}


async def refuse(edge: Edge, prompt: Prompt, **options: Any) -> MeshError:
    with pytest.raises(MeshError) as refused:
        await edge.mesh.client.complete(prompt, **options)
    error = refused.value
    assert sum(error.ledger.values()) + error.residual_ms == pytest.approx(error.elapsed_ms)
    return error


TOO_LONG = "word " * 9000


@pytest.mark.parametrize(
    ("prompt", "reason"), [("", "INVALID_ARGUMENT"), (TOO_LONG, "PROMPT_TOO_LONG")]
)
async def test_a_refused_request_has_a_ledger_up_to_there(
    edge: Edge, prompt: str, reason: str
) -> None:
    error = await refuse(edge, prompt)

    assert error.reason == reason
    assert list(error.ledger) == list(Segment)
    assert error.elapsed_ms > 0
    assert error.ledger["preprocess"] > 0
    assert error.ledger["prefill"] == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_over_http_says_where_its_time_went(edge: Edge, stream: bool) -> None:
    for body in ({"prompt": TOO_LONG}, {"prompt": 7}):
        response = await edge.http.post(COMPLETION, json={**body, "stream": stream})
        parts = [part.split(";dur=") for part in response.headers["server-timing"].split(", ")]
        *owned, total = [float(value) for _, value in parts]

        assert response.status_code == 400
        assert [name for name, _ in parts] == [*Segment, "residual", "total"]
        assert sum(owned) == pytest.approx(total, abs=0.01)
        assert total > 0


async def test_what_a_refused_request_waited_for_is_in_its_ledger(edge: Edge) -> None:
    delay_ms = DELAYS_MS[0]
    await configure(edge.mesh, {"debug.delay_ms.tokenizer_encode": delay_ms})
    try:
        error = await refuse(edge, TOO_LONG)
    finally:
        await configure(edge.mesh, {"debug.delay_ms.tokenizer_encode": 0.0})

    assert error.ledger["preprocess"] >= delay_ms
