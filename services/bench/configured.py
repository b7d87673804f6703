"""What a long configuration costs: requests of one of its tenants, and a change of it.

Only tenants can be many: each has six settings here. The meshes are measured by turns.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
import orjson
from grpc_health.v1 import health_pb2, health_pb2_grpc

from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.router.v1 import inference_pb2, inference_pb2_grpc
from services.bench.edge import ENGINES
from services.bench.http_stream import open_stream, post
from services.bench.processes import cpu_s
from services.core.config import parse
from services.core.settings import MeshConfig
from services.core.tenants import hash_key
from services.runtime.channels import open_channel

SETTINGS: Mapping[str, Any] = {
    "salt": "pepper",
    "max_class": "interactive",
    "weight": 2.0,
    "requests_per_s": 1e5,
    "max_concurrent": 1000,
}
PATH = "/v1/chat/completions"
TEXT = "The sea is wide and the sky above it is grey today. " * 6
CONCURRENCY = 4
PROBE_PAUSE_S = 0.002
WATCHED_S = 0.5  # of each push, and as long without one
PUSH_TIMEOUT_S = 60.0


class Place(NamedTuple):
    """A mesh. `api_key`: of a tenant of it, if there is one."""

    name: str
    control: str
    router: str
    http: str
    api_key: str = ""


class Figures(NamedTuple):
    ttft_ms: list[float]
    router_cpu_us: list[float]
    gateway_cpu_us: list[float]
    all_cpu_us: list[float]


def configuration(num_keys: int) -> tuple[MeshConfig, str]:
    """With so many keys configured, at least; and the last tenant's API key."""
    num_tenants = -(-num_keys // (len(SETTINGS) + 1))
    tenants = {f"tenant-{number}": _tenant(number) for number in range(num_tenants)}
    config = parse({"tenants": tenants})
    engine = ENGINES["simulated"].config
    return replace(engine, tenants=config.tenants), _api_key(num_tenants - 1)


async def measure(
    places: Sequence[Place], *, num_requests: int, num_turns: int, num_pushes: int
) -> dict[str, Any]:
    return {
        "requests": num_requests * num_turns,
        "load": await compare(places, num_requests=num_requests, num_turns=num_turns),
        "push": [await _measure_pushes(place, num_pushes) for place in places],
    }


async def compare(
    places: Sequence[Place], *, num_requests: int, num_turns: int
) -> list[dict[str, Any]]:
    """First tokens and CPU of each mesh, by turns."""
    found: dict[str, dict[str, Figures]] = {place.name: {} for place in places}
    ways: dict[str, Callable[[Place, int], Awaitable[list[float]]]] = {
        "proxied": _ask_router,
        "http": _ask_gateway,
    }
    for turn in range(num_turns + 1):  # the first is to warm up
        for place in places if turn % 2 else reversed(places):
            for way, ask in ways.items():
                figures = await _look(place, ask, num_requests)
                if turn:
                    kept = found[place.name].setdefault(way, Figures([], [], [], []))
                    for all_of_it, more in zip(kept, figures, strict=True):
                        all_of_it += more
    return [
        {"mesh": name, "way": way, **_describe(figures)}
        for name, by_way in found.items()
        for way, figures in by_way.items()
    ]


def _describe(figures: Figures) -> dict[str, float]:
    return {
        "ttft_p50_ms": statistics.median(figures.ttft_ms),
        "ttft_p99_ms": statistics.quantiles(figures.ttft_ms, n=100, method="inclusive")[98],
        "router_cpu_us": statistics.median(figures.router_cpu_us),
        "gateway_cpu_us": statistics.median(figures.gateway_cpu_us),
        "all_cpu_us": statistics.median(figures.all_cpu_us),
    }


async def _look(
    place: Place, ask: Callable[[Place, int], Awaitable[list[float]]], num_requests: int
) -> Figures:
    members = await _members(place.control)
    pids = {each.role: each.pid for each in members}

    def spent() -> list[float]:
        each_s = {role: cpu_s(pid) for role, pid in pids.items()}
        router_s = each_s[control_pb2.MEMBER_ROLE_ROUTER]
        return [router_s, each_s[control_pb2.MEMBER_ROLE_GATEWAY], sum(each_s.values())]

    before_s = spent()
    asking = (ask(place, num_requests // CONCURRENCY) for _ in range(CONCURRENCY))
    ttfts_s = [each for many in await asyncio.gather(*asking) for each in many]
    spent_us = [
        (now_s - then_s) / len(ttfts_s) * 1e6
        for now_s, then_s in zip(spent(), before_s, strict=True)
    ]
    return Figures([each * 1e3 for each in ttfts_s], *([each] for each in spent_us))


async def _ask_router(place: Place, number: int) -> list[float]:
    sampling = common_pb2.SamplingParams(max_tokens=1, temperature=0.0)
    request = inference_pb2.GenerateRequest(text=TEXT, sampling=sampling)
    metadata = (("authorization", f"Bearer {place.api_key}"),) if place.api_key else ()
    found = []
    async with open_channel(place.router) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(number):
            began_s = time.perf_counter()
            call = stub.Generate(request, metadata=metadata)
            message = await call.read()
            found.append(time.perf_counter() - began_s)
            while message is not grpc.aio.EOF:
                message = await call.read()
    return found


async def _ask_gateway(place: Place, number: int) -> list[float]:
    body = {
        "messages": [{"role": "user", "content": TEXT}],
        "stream": True,
        "max_tokens": 1,
        "temperature": 0,
    }
    request = post(place.http, PATH, orjson.dumps(body), api_key=place.api_key)
    async with open_stream(place.http) as stream:
        return [(await stream.ask(request)).ttft_s for _ in range(number)]


async def _measure_pushes(place: Place, num_pushes: int) -> dict[str, Any]:
    """Of a change of one setting: how long until all have it, and the longest time that each
    process took to answer a health check meanwhile; and as long without a push. Medians.
    """
    took_s: list[float] = []
    quiet: dict[str, list[float]] = defaultdict(list)
    pushing: dict[str, list[float]] = defaultdict(list)
    async with _probes(place) as probe, open_channel(place.control) as channel:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        for number in range(num_pushes):
            for name, longest_s in (await probe(asyncio.sleep(WATCHED_S))).items():
                quiet[name].append(longest_s)
            push = _push(stub, place.control, {"tenants.tenant-0.weight": 3.0 + number}, took_s)
            for name, longest_s in (await probe(push)).items():
                pushing[name].append(longest_s)
    return {
        "mesh": place.name,
        "until_all_have_it_ms": statistics.median(took_s) * 1e3,
        **{f"{name}_quiet_ms": statistics.median(each) * 1e3 for name, each in quiet.items()},
        **{f"{name}_push_ms": statistics.median(each) * 1e3 for name, each in pushing.items()},
    }


async def _push(stub: Any, control: str, changes: Mapping[str, Any], took_s: list[float]) -> None:
    began_s = time.perf_counter()
    request = control_pb2.SetConfigRequest(
        changes={key: json.dumps(value) for key, value in changes.items()}
    )
    generation = (await stub.SetConfig(request)).configuration.generation
    async with asyncio.timeout(PUSH_TIMEOUT_S):
        while any(  # noqa: ASYNC110  # other processes tell no event
            each.generation < generation for each in await _members(control)
        ):
            await asyncio.sleep(PROBE_PAUSE_S)
    took_s.append(time.perf_counter() - began_s)
    await asyncio.sleep(max(0.0, began_s + WATCHED_S - time.perf_counter()))


@asynccontextmanager
async def _probes(
    place: Place,
) -> AsyncIterator[Callable[[Awaitable[None]], Awaitable[dict[str, float]]]]:
    """What it gives awaits something, and says by process the longest that a health check
    took meanwhile."""
    async with AsyncExitStack() as stack:
        checks: dict[str, Callable[[], Awaitable[object]]] = {}
        addresses = {"control": place.control}
        for member in await _members(place.control):
            name = control_pb2.MemberRole.Name(member.role).removeprefix("MEMBER_ROLE_").lower()
            if member.role != control_pb2.MEMBER_ROLE_GATEWAY:
                addresses[name] = member.address
        for name, address in addresses.items():
            channel = await stack.enter_async_context(open_channel(address))
            checks[name] = _health_check(channel)
        reader, writer = await asyncio.open_connection(*_host_port(place.http))
        stack.callback(writer.close)
        checks["gateway"] = _http_check(reader, writer)

        async def probe(work: Awaitable[None]) -> dict[str, float]:
            longest_s = dict.fromkeys(checks, 0.0)
            is_over = False

            async def keep_checking(name: str) -> None:
                while not is_over:
                    began_s = time.perf_counter()
                    await checks[name]()
                    longest_s[name] = max(longest_s[name], time.perf_counter() - began_s)
                    await asyncio.sleep(PROBE_PAUSE_S)

            async with asyncio.TaskGroup() as group:
                for name in checks:
                    group.create_task(keep_checking(name))
                await work
                is_over = True
            return longest_s

        yield probe


def _health_check(channel: grpc.aio.Channel) -> Callable[[], Awaitable[object]]:
    stub = health_pb2_grpc.HealthStub(channel)
    return lambda: stub.Check(health_pb2.HealthCheckRequest())


def _http_check(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Callable[[], Awaitable[object]]:
    async def check() -> None:
        writer.write(b"GET /health HTTP/1.1\r\nhost: mesh\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))

    return check


async def _members(control: str) -> Sequence[control_pb2.Member]:
    async with open_channel(control) as channel:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        return (await stub.ListMembers(control_pb2.ListMembersRequest())).members  # type: ignore[no-any-return]


def _tenant(number: int) -> dict[str, Any]:
    return {"key_hashes": hash_key(_api_key(number)), **SETTINGS}


def _api_key(number: int) -> str:
    return f"ft-of-the-benchmark-{number}"


def _host_port(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)
