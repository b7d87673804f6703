"""Workers whose engine core is the adapter's, over a double of TensorRT-LLM, for real RPCs."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2, worker_pb2_grpc
from services.core import config as mesh_config
from services.core.settings import MeshConfig
from services.core.tokens import unpack
from services.runtime.channels import open_channel
from tests.runtime.waiting import eventually
from tests.worker.test_handoff import Pair, ask, run_pair
from tests.worker.trtllm.double import VERSION


def config_of(**engine: Any) -> MeshConfig:
    return mesh_config.parse(
        {
            "mesh": {"block_tokens": 16},
            "worker": {
                "engine": "tensorrt_llm",
                "num_slots": 4,
                "max_context_tokens": 1024,
                "handoff_min_tokens": 64,
                "tensorrt_llm": {
                    "weights": "none",
                    "tokens_per_block": 8,
                    "transport": "nixl",
                    **engine,
                },
            },
        }
    )


async def answer(stub: Any, request: worker_pb2.GenerateRequest) -> tuple[list[int], Any]:
    ids: list[int] = []
    finished = None
    async for response in stub.Generate(request):
        if response.HasField("finished"):
            finished = response.finished
        else:
            ids += unpack(response.chunk.token_ids, field="token_ids").tolist()
    assert finished is not None
    return ids, finished


async def test_a_mesh_of_doubles_answers_hands_off_and_reports_what_it_holds() -> None:
    config = config_of(chunked_prefill=False, max_num_tokens=512)
    async with run_pair(config) as pair:
        await _whole_answers(pair)
        await _hand_off(pair)
        await _keys_of_what_is_held(pair)
        await _a_cancelled_call_leaves_nothing(pair)
        await _unreadable_kv_is_not_asked_for(pair)
        await _too_long_a_prompt_does_not_reach_the_engine(pair)


async def _whole_answers(pair: Pair) -> None:
    ids, finished = await answer(pair.stub, ask(pair, 1, handed_off=False))
    again, _ = await answer(pair.stub, ask(pair, 1, handed_off=False))

    assert ids == again
    assert len(ids) == 8
    assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert finished.engine == VERSION  # never the name of what it stands in for
    assert finished.usage.evaluated_prompt_tokens == 300


async def _hand_off(pair: Pair) -> None:
    handed, finished = await answer(pair.stub, ask(pair, 2))
    whole, _ = await answer(pair.stub, ask(pair, 2, handed_off=False))

    assert finished.kv_path.handed_off
    assert not finished.kv_path.prefill_failed, finished.kv_path.reason
    assert finished.kv_path.transport == "engine"
    assert finished.kv_path.prefill_worker_id == pair.prefill.id
    assert handed == whole
    await eventually(lambda: pair.prefill.is_idle and pair.decode.is_idle, "idle workers")
    await eventually(lambda: pair.prefill.load.num_blocks_reserved == 0, "no orphan")


async def _keys_of_what_is_held(pair: Pair) -> None:
    request = ask(pair, 3, handed_off=False)
    await answer(pair.stub, request)
    keys = request.prefix_keys[32:]
    async with open_channel(pair.decode.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        held = b""
        async for response in stub.Watch(worker_pb2.WatchRequest()):
            held += response.snapshot.prefix_keys + response.stored.prefix_keys
            if keys in held:
                break


async def _a_cancelled_call_leaves_nothing(pair: Pair) -> None:
    call = pair.stub.Generate(ask(pair, 4, max_tokens=500, handed_off=False))
    await call.read()
    call.cancel()
    await eventually(lambda: pair.decode.is_idle, "an idle worker")

    assert pair.decode.load.num_running == 0


async def _unreadable_kv_is_not_asked_for(pair: Pair) -> None:
    start = worker_pb2.PrefillStart(
        request=ask(pair, 5, handed_off=False),
        transport=worker_pb2.KV_TRANSPORT_GRPC,
        credit_blocks=1,
        fingerprint=pair.prefill.fingerprint,
    )
    async with open_channel(pair.prefill.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        call = stub.Prefill(iter([worker_pb2.PrefillRequest(start=start)]))
        with pytest.raises(grpc.aio.AioRpcError, match="can move its KV") as caught:
            await call.read()

        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def _too_long_a_prompt_does_not_reach_the_engine(pair: Pair) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="must be 1 to 512 tokens; got 600") as caught:
        await answer(pair.stub, ask(pair, 6, num_tokens=600, handed_off=False))

    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    request = ask(pair, 6, num_tokens=510, handed_off=False)
    request.answer_ids = request.token_ids[:20]
    with pytest.raises(grpc.aio.AioRpcError, match="answer_ids: must fit into 512 tokens"):
        await answer(pair.stub, request)
