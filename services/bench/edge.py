"""What the HTTP edge costs: the time that it adds before the first token, and its CPU."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import grpc
import orjson

from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from services.bench.http_stream import HttpStream, open_stream, post
from services.bench.processes import cpu_s, family
from services.bench.reuse import WORDS
from services.core.config import parse
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel
from services.runtime.startup import StartupError

CONCURRENCY = (1, 32)
NUM_PROMPTS, PROMPT_WORDS = 16, 60
NUM_WARM_UP = 50
PATH = "/v1/chat/completions"


class Engine(NamedTuple):
    """A configuration to measure, and under load: the lengths of the answers asked for, and
    for how long."""

    config: MeshConfig
    num_pairs: int
    num_tokens: tuple[int, int]
    load_s: float


ENGINES = {
    "simulated": Engine(
        parse(
            {
                "worker": {
                    "engine": "simulated",
                    "num_slots": 32,
                    # As good as nothing: what is left is the service layer's.
                    "simulated": {
                        "prefill_tokens_per_s": 1e9,
                        "decode_step_ms": 0,
                        "decode_step_ms_per_seq": 0,
                        "transfer_gb_per_s": 1e6,
                    },
                }
            }
        ),
        num_pairs=500,
        num_tokens=(1, 64),
        load_s=4.0,
    ),
    "real": Engine(MeshConfig(), num_pairs=100, num_tokens=(1, 16), load_s=12.0),
}


class Pids(NamedTuple):
    """`mesh`: all members with what they started; not the control service, which takes no
    part in a request."""

    gateway: int
    mesh: tuple[int, ...]


class Load(NamedTuple):
    """What so many clients at once saw, each asking again when it was answered."""

    ttfts_s: list[float]
    num_events: int
    took_s: float
    gateway_cpu_s: float
    mesh_cpu_s: float
    client_cpu_s: float


async def measure(
    url: str,
    router: str,
    control: str,
    *,
    num_pairs: int,
    num_tokens: tuple[int, int],
    load_s: float,
) -> dict[str, Any]:
    """Of a mesh on this host, with the gateway at `url`. Raises StartupError."""
    engine, pids = await _find_mesh(control)
    chats = [_make_chat(random.Random(number)) for number in range(NUM_PROMPTS)]
    ttft = await _compare_ttft(url, router, chats, num_pairs)
    rows, cpu = [], []
    for concurrency in CONCURRENCY:
        loads = [
            await _load(url, pids, _bodies(url, chats, most), concurrency, load_s)
            for most in num_tokens
        ]
        rows += [
            _row(load, concurrency, most) for load, most in zip(loads, num_tokens, strict=True)
        ]
        cpu.append({"concurrency": concurrency, **_split_cpu(loads, num_tokens)})
    return {"engine": engine, "ttft": ttft, "load": rows, "gateway_cpu": cpu}


async def _compare_ttft(
    url: str, router: str, chats: Sequence[list[dict[str, str]]], num_pairs: int
) -> dict[str, Any]:
    """The same prompts over gRPC and over HTTP, by turns. All were asked before."""
    requests = [_grpc_request(chat) for chat in chats]
    bodies = _bodies(url, chats, 2)
    grpc_s: list[float] = []
    http_s: list[float] = []
    async with open_channel(router) as channel, open_stream(url) as stream:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for number in range(NUM_WARM_UP + num_pairs):
            at = number % len(chats)
            # Which of them finds what the other left warm is not always the same.
            if number % 2:
                over_grpc = await _ttft_over_grpc(stub, requests[at])
                over_http = (await stream.ask(bodies[at])).ttft_s
            else:
                over_http = (await stream.ask(bodies[at])).ttft_s
                over_grpc = await _ttft_over_grpc(stub, requests[at])
            if number >= NUM_WARM_UP:
                grpc_s.append(over_grpc)
                http_s.append(over_http)
    added_s = [http - over for http, over in zip(http_s, grpc_s, strict=True)]
    return {
        "pairs": num_pairs,
        **_percentiles("grpc", grpc_s),
        **_percentiles("http", http_s),
        # Of the pairs, and of the two distributions: a pair's tail is the noise of both.
        "added_p50_ms": statistics.median(added_s) * 1000,
        "added_p99_ms": (_percentile(http_s, 99) - _percentile(grpc_s, 99)) * 1000,
        "ratio_p50": statistics.median(http_s) / statistics.median(grpc_s),
        "ratio_p99": _percentile(http_s, 99) / _percentile(grpc_s, 99),
    }


async def _ttft_over_grpc(
    stub: inference_pb2_grpc.InferenceServiceStub, request: inference_pb2.GenerateRequest
) -> float:
    began_s = time.perf_counter()
    call = stub.Generate(request)
    message = await call.read()
    ttft_s = time.perf_counter() - began_s
    while message is not grpc.aio.EOF:
        message = await call.read()
    return ttft_s


async def _load(
    url: str, pids: Pids, bodies: Sequence[bytes], concurrency: int, load_s: float
) -> Load:
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(open_stream(url)) for _ in range(concurrency)]
        await asyncio.gather(*(stream.ask(bodies[0]) for stream in streams))
        began_s, client_s = time.perf_counter(), time.process_time()
        gateway_s, mesh_s = cpu_s(pids.gateway), sum(map(cpu_s, pids.mesh))
        until_s = began_s + load_s
        heard = await asyncio.gather(*(_ask_until(stream, bodies, until_s) for stream in streams))
        took_s = time.perf_counter() - began_s
        return Load(
            [ttft_s for ttfts_s, _ in heard for ttft_s in ttfts_s],
            sum(num_events for _, num_events in heard),
            took_s,
            cpu_s(pids.gateway) - gateway_s,
            sum(map(cpu_s, pids.mesh)) - mesh_s,
            time.process_time() - client_s,
        )


async def _ask_until(
    stream: HttpStream, bodies: Sequence[bytes], until_s: float
) -> tuple[list[float], int]:
    """TTFT of each answer, and the events of all."""
    ttfts_s: list[float] = []
    num_events = 0
    while time.perf_counter() < until_s:
        heard = await stream.ask(bodies[len(ttfts_s) % len(bodies)])
        ttfts_s.append(heard.ttft_s)
        num_events += heard.num_events
    return ttfts_s, num_events


def _row(load: Load, concurrency: int, most_tokens: int) -> dict[str, Any]:
    num_requests = len(load.ttfts_s)
    return {
        "concurrency": concurrency,
        "tokens": most_tokens,
        "requests": num_requests,
        "requests_per_s": num_requests / load.took_s,
        "requests_per_s_per_mesh_core": num_requests / load.mesh_cpu_s,
        "requests_per_s_per_gateway_core": num_requests / load.gateway_cpu_s,
        "events_per_answer": load.num_events / num_requests,
        "mesh_cpu_us_per_request": load.mesh_cpu_s / num_requests * 1e6,
        "gateway_cpu_us_per_request": load.gateway_cpu_s / num_requests * 1e6,
        "client_cpu_us_per_request": load.client_cpu_s / num_requests * 1e6,
        **_percentiles("ttft", load.ttfts_s),
    }


def _split_cpu(loads: Sequence[Load], num_tokens: tuple[int, int]) -> dict[str, float]:
    """A request of no token at all, and each token, from answers of two lengths."""
    short_us, long_us = (load.gateway_cpu_s / len(load.ttfts_s) * 1e6 for load in loads)
    short, long = num_tokens
    per_token_us = (long_us - short_us) / (long - short)
    return {"us_per_request": short_us - short * per_token_us, "us_per_token": per_token_us}


def _make_chat(chance: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(chance.choices(WORDS, k=PROMPT_WORDS))}]


def _grpc_request(chat: Sequence[dict[str, str]]) -> inference_pb2.GenerateRequest:
    messages = [common_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in chat]
    sampling = common_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    return inference_pb2.GenerateRequest(chat=common_pb2.Chat(messages=messages), sampling=sampling)


def _bodies(url: str, chats: Sequence[list[dict[str, str]]], most_tokens: int) -> list[bytes]:
    asked = {"stream": True, "max_tokens": most_tokens, "temperature": 0, "ignore_eos": True}
    return [post(url, PATH, orjson.dumps({"messages": chat, **asked})) for chat in chats]


async def _find_mesh(control: str) -> tuple[str, Pids]:
    """Its engine, and its processes."""
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        members = (await stub.ListMembers(control_pb2.ListMembersRequest())).members
    gateways = [each.pid for each in members if each.role == control_pb2.MEMBER_ROLE_GATEWAY]
    if len(gateways) != 1:
        raise StartupError(f"there must be one gateway in the mesh; there are {len(gateways)}")
    engines = {each.worker.engine for each in members if each.HasField("worker")}
    mesh = tuple(pid for each in members for pid in family(each, control))
    return ", ".join(sorted(engines)), Pids(gateways[0], mesh)


def _percentiles(name: str, values_s: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_p50_ms": statistics.median(values_s) * 1000,
        f"{name}_p99_ms": _percentile(values_s, 99) * 1000,
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
