"""Does the engine ever wait for the service layer?

The engine is simulated, with steps as a GPU has them. What is measured is the time in
which it had nothing to do though there was work for it anywhere in the mesh, gaps between
two steps included: the worker charges each gap to what held the work.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.router.v1 import inference_pb2
from services.bench.grpc_stream import Call, RawGrpc, connect
from services.bench.processes import list_members
from services.bench.worker_load import Engine, LoadWatch, watch_load
from services.core.config import parse
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel
from services.runtime.startup import StartupError

STEPS_MS = (5.0, 10.0, 20.0)
NUM_STREAMS = 64
SHARE = 0.8
CONFIG: MeshConfig = parse(
    {
        "router": {"max_queue": 1024},
        "worker": {
            "engine": "simulated",
            "num_slots": NUM_STREAMS,
            "max_context_tokens": 1 << 15,
            "simulated": {
                "prefill_tokens_per_s": 20_000,
                "decode_step_ms_per_seq": 0,
                "num_blocks": 1 << 15,
                "kv_bytes_per_token": 256,
            },
        },
    }
)
PATH = "/firsttoken.router.v1.InferenceService/Generate"
PROMPT_TOKENS, ANSWER_TOKENS = 200, 40
# Two minutes of the shortest steps.
ENDLESS_TOKENS = 24_000
START_TIMEOUT_S = 60.0
NUM_WARM_UP = 8
SETTLE_S = 1.0


class Place(NamedTuple):
    router: RawGrpc
    watch: LoadWatch


def capacity(step_ms: float) -> float:
    """Requests a second that the engine can do when all its slots are taken."""
    prompt_s = PROMPT_TOKENS / CONFIG.worker.simulated.prefill_tokens_per_s
    return 1 / (prompt_s + ANSWER_TOKENS * step_ms / 1e3 / NUM_STREAMS)


def config_of(step_ms: float) -> MeshConfig:
    simulated = replace(CONFIG.worker.simulated, decode_step_ms=step_ms)
    return replace(CONFIG, worker=replace(CONFIG.worker, simulated=simulated))


async def measure(router: str, control: str, *, step_ms: float, window_s: float) -> dict[str, Any]:
    """Of a mesh of `config_of(step_ms)` with one worker."""
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        [worker] = await list_members(stub, control_pb2.MEMBER_ROLE_WORKER)
    async with watch_load(worker.address) as watch:
        place = Place(await connect(router), watch)
        try:
            await _answer_all(place, NUM_WARM_UP)
            steady = await _steady(place, window_s)
            loaded = await _loaded(place, capacity(step_ms) * SHARE, window_s)
        finally:
            place.router.close()
    return {"step_ms": step_ms, "streams": steady, "load": loaded}


async def _steady(place: Place, window_s: float) -> dict[str, Any]:
    """Streams that all go on from beginning to end."""
    calls = [_ask(place, ENDLESS_TOKENS) for _ in range(NUM_STREAMS)]
    async with asyncio.timeout(START_TIMEOUT_S):
        while (await place.watch.fresh()).num_running < NUM_STREAMS:
            if any(call.ended.done() for call in calls):
                raise StartupError("the mesh did not take a request")
    await asyncio.sleep(SETTLE_S)
    engine = await _look(place, window_s)
    for call in calls:
        place.router.cancel(call)
    async with asyncio.timeout(START_TIMEOUT_S):
        while (await place.watch.fresh()).num_running:
            pass
    return {"at_once": NUM_STREAMS, **engine.describe()}


async def _loaded(place: Place, requests_per_s: float, window_s: float) -> dict[str, Any]:
    """Requests that come and go, at random times."""
    chance = random.Random(0)
    asking = asyncio.create_task(_keep_asking(place, chance, requests_per_s))
    await asyncio.sleep(SETTLE_S)
    began_s = time.monotonic()
    engine = await _look(place, window_s)
    took_s = time.monotonic() - began_s
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return {
        "requests_per_s": requests_per_s,
        "busy_share": engine.busy_s / took_s,
        **engine.describe(),
    }


async def _keep_asking(place: Place, chance: random.Random, requests_per_s: float) -> None:
    due_s = time.monotonic()
    while True:
        due_s += chance.expovariate(requests_per_s)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        _ask(place, ANSWER_TOKENS)


async def _look(place: Place, window_s: float) -> Engine:
    before = await place.watch.fresh()
    await asyncio.sleep(window_s)
    return Engine.between(before, await place.watch.fresh())


async def _answer_all(place: Place, count: int) -> None:
    calls: Sequence[Call] = [_ask(place, ANSWER_TOKENS) for _ in range(count)]
    await asyncio.gather(*(call.ended for call in calls))


def _ask(place: Place, most_tokens: int) -> Call:
    """A prompt that nobody has asked before."""
    ids = np.random.default_rng(time.monotonic_ns()).integers(1000, 2000, PROMPT_TOKENS)
    request = inference_pb2.GenerateRequest(
        token_ids=ids.astype("<u4").tobytes(),
        sampling=common_pb2.SamplingParams(max_tokens=most_tokens, ignore_eos=True),
    )
    return place.router.call(PATH, request.SerializeToString())
