"""The real model with a KV store: what was computed once comes out of it, bit for bit."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from firsttoken.client import Answer
from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.core import config as mesh_config
from services.core.settings import MeshConfig
from services.core.tokens import unpack
from services.runtime.channels import open_channel
from tests.conftest import Mesh, MeshFactory
from tests.runtime.waiting import eventually
from worker.node import WorkerNode

DATA = Path(__file__).parent.parent / "data"
MAX_TOKENS = 8
NUM_CHATS = 12
BLOCK_TOKENS = 16
# A pool of 16 blocks: a few prompts push the others out. Through the inbox of 6 a long
# prompt comes in several imports.
WORKER = {
    "num_slots": 8,
    "max_context_tokens": 512,
    "num_cache_blocks": 16,
    "num_inbox_blocks": 6,
    "threads": 1,
}
Chat = list[dict[str, str]]

pytestmark = pytest.mark.asyncio(loop_scope="module")


def config_of(kv_load: str) -> MeshConfig:
    return mesh_config.parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "worker": {**WORKER, "kv_load": kv_load, "kv_load_timeout_ms": 60_000},
        }
    )


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    lines = (DATA / "mtbench_prompts.jsonl").read_text().splitlines()[:NUM_CHATS]
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(mesh_of: MeshFactory, chats: list[Chat]) -> list[tuple[int, ...]]:
    """The answers without a KV store, nothing reused."""
    async with mesh_of(config_of("never")) as mesh:
        answers = [await ask(mesh, chat, salt=str(n)) for n, chat in enumerate(chats)]
    assert all(answer.usage.cached_tokens == 0 for answer in answers)
    return [answer.token_ids for answer in answers]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(mesh_of: MeshFactory, chats: list[Chat]) -> AsyncIterator[Mesh]:
    """It has answered all chats, and what it computed is in the store."""
    async with mesh_of(config_of("always"), with_kvstore=True) as mesh:
        for chat in chats:
            await ask(mesh, chat)
        await written(mesh)
        yield mesh
        await written(mesh)
        assert mesh.kvstore is not None
        mesh.kvstore.store.check_integrity()


async def ask(mesh: Mesh, chat: Chat, *, salt: str = "") -> Answer:
    return await mesh.client.complete(chat, max_tokens=MAX_TOKENS, cache_salt=salt)


async def written(mesh: Mesh) -> None:
    [worker] = mesh.workers

    def done() -> bool:
        tier = worker.tier
        return worker.is_idle and tier.num_loads == tier.num_slots == tier.num_writing == 0

    await eventually(done, "the worker to be idle")
    assert not worker.tier.dropped


def assert_only_the_rest_was_computed(answer: Answer) -> None:
    usage = answer.usage
    assert usage.cached_tokens == (usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert usage.evaluated_prompt_tokens == usage.prompt_tokens - usage.cached_tokens


async def test_prompts_loaded_alone_are_answered_as_computed(
    mesh: Mesh, chats: list[Chat], plain: list[tuple[int, ...]]
) -> None:
    answers = [await ask(mesh, chat) for chat in chats]

    assert [answer.token_ids for answer in answers] == plain
    for answer in answers:
        assert_only_the_rest_was_computed(answer)
    loaded = [answer for answer in answers if answer.kv_path.loaded_blocks]
    assert len(loaded) >= NUM_CHATS // 2
    for answer in loaded:
        assert answer.ledger["kv_load"] > 0
        assert answer.kv_path.load_ms > 0
        assert "blocks in L1 loaded: worker.kv_load is always" in answer.kv_path.reason


async def test_prompts_loaded_eight_at_once_are_answered_as_computed(
    mesh: Mesh, chats: list[Chat], plain: list[tuple[int, ...]]
) -> None:
    eight = asyncio.Semaphore(8)

    async def ask_in_turn(chat: Chat) -> Answer:
        async with eight:
            return await ask(mesh, chat)

    answers = await asyncio.gather(*map(ask_in_turn, chats))

    assert [answer.token_ids for answer in answers] == plain
    # What lay in the pool when a request came may have been pushed out when it began.
    assert sum(answer.kv_path.loaded_blocks for answer in answers) >= NUM_CHATS
    for answer in answers:
        usage = answer.usage
        assert usage.cached_tokens + usage.evaluated_prompt_tokens == usage.prompt_tokens


async def test_what_one_worker_computed_another_one_loads(
    mesh: Mesh, chats: list[Chat], plain: list[tuple[int, ...]]
) -> None:
    async with WorkerNode(control=mesh.control.address, cores_shared_by=2) as other:
        assert other.fingerprint == mesh.workers[0].fingerprint
        for chat, expected in list(zip(chats, plain, strict=True))[:4]:
            token_ids, finished = await generate(other, await encode(mesh, chat))
            usage, path = finished.usage, finished.kv_path

            assert token_ids == expected
            assert path.loaded_blocks > 0
            assert usage.cached_tokens == (usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert usage.evaluated_prompt_tokens == usage.prompt_tokens - usage.cached_tokens
        traffic = (await read_load(other)).kv

    assert traffic.num_loaded == 4
    assert traffic.blocks_loaded >= 4
    assert traffic.spent_ms > 0
    assert not traffic.failed
    assert not traffic.rejected


async def read_load(worker: WorkerNode) -> worker_pb2.Load:
    async with open_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        async for response in stub.Watch(worker_pb2.WatchRequest(load_only=True)):
            return response.snapshot.load
    raise AssertionError("the worker says nothing")


async def test_loading_what_takes_seconds_to_compute_is_decided_and_explained(mesh: Mesh) -> None:
    first, second = ([{"role": "user", "content": f"{word} " * 180}] for word in ("moss", "fern"))
    await configure(mesh, {"worker.kv_load": "auto"})
    try:
        computed = await ask(mesh, first)
        await ask(mesh, second)  # pushes the first out of the pool
        await written(mesh)
        loaded = await ask(mesh, first)
    finally:
        await configure(mesh, {"worker.kv_load": "always"})

    path = loaded.kv_path
    assert loaded.token_ids == computed.token_ids
    assert_only_the_rest_was_computed(loaded)
    assert re.search(
        r"\d+ blocks in L1 loaded: [\d.e+]+ ms to load, [\d.e+]+ ms to compute$", path.reason
    )
    assert 0 < path.expected_load_ms < path.expected_compute_ms
    assert loaded.ledger["kv_load"] >= path.load_ms * 0.5
    assert loaded.ledger["prefill"] < computed.ledger["prefill"]


async def configure(mesh: Mesh, changes: dict[str, str]) -> None:
    """Returns when every member has applied them."""
    async with open_channel(mesh.control.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        response = await stub.SetConfig(control_pb2.SetConfigRequest(changes=changes))
        generation = response.configuration.generation
        while True:
            listed = await stub.ListMembers(control_pb2.ListMembersRequest())
            if all(member.generation == generation for member in listed.members):
                return


async def encode(mesh: Mesh, chat: Chat) -> tokenizer_pb2.EncodeResponse:
    messages = [
        common_pb2.ChatMessage(role=message["role"], content=message["content"]) for message in chat
    ]
    async with open_channel(mesh.tokenizer.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        request = tokenizer_pb2.EncodeRequest(chat=common_pb2.Chat(messages=messages))
        encoded: tokenizer_pb2.EncodeResponse = await stub.Encode(request)
    return encoded


async def generate(
    worker: WorkerNode, encoded: tokenizer_pb2.EncodeResponse
) -> tuple[tuple[int, ...], common_pb2.Finished]:
    request = worker_pb2.GenerateRequest(
        token_ids=encoded.token_ids,
        prefix_keys=encoded.prefix_keys,
        sampling=common_pb2.SamplingParams(max_tokens=MAX_TOKENS),
    )
    async with open_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        responses = [response async for response in stub.Generate(request)]
    token_ids = b"".join(response.chunk.token_ids for response in responses[:-1])
    return tuple(unpack(token_ids, field="token_ids").tolist()), responses[-1].finished


async def test_blocks_written_before_the_first_token_are_hidden_work(mesh_of: MeshFactory) -> None:
    config = mesh_config.parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "worker": {
                "engine": "simulated",
                "max_context_tokens": 2048,
                # A prompt takes many steps, and its blocks are kept after each.
                "simulated": {"prefill_tokens_per_s": 2000, "num_blocks": 400},
            },
        }
    )
    prompt = "count to ten " * 200
    async with mesh_of(config, with_kvstore=True) as mesh:
        [worker] = mesh.workers
        first = await mesh.client.complete(prompt, max_tokens=4)
        await written(mesh)
        assert worker.tier.blocks_stored > 10
        again = await mesh.client.complete(prompt, max_tokens=4)

    assert 0 < first.hidden["write_behind"] < first.ttft_ms
    assert again.usage.cached_tokens > 400
    assert "write_behind" not in again.hidden
