"""What telling the observer costs the processes that serve: with it and without, by turns."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import orjson

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.bench.http_stream import HttpStream, open_stream, post
from services.bench.processes import cpu_s, family, list_members
from services.bench.reuse import WORDS
from services.bench.settings import configure
from services.core.config import parse
from services.core.ledger import Ledger, Segment
from services.runtime.channels import open_channel
from services.runtime.garbage import spare_what_is_there
from services.runtime.reporter import Reporter
from services.runtime.telemetry import TraceContext

CONFIG = parse({"worker": {"engine": "simulated", "num_slots": 32}})
SETTING = "observer.enabled"
OBSERVER = "observer"
CONCURRENCY = 16
NUM_PROMPTS, PROMPT_WORDS, ANSWER_TOKENS = 32, 150, 8
NUM_WARM_UP = 200
# After a turn: what is left to be told is told in it, and belongs to it.
SETTLE_S = 1.0
IDLE_S = 5.0
PROBE_INTERVAL_S = 0.002
PACE_S = 0.01
FEED_RATE = 1000
# Warm: streams are open, and what is done once is done.
FEED_WARM_UP_S = 1.0


class Turn(NamedTuple):
    """CPU by process, and how many requests it was spent on."""

    cpu_s: Mapping[str, float]
    num_requests: int
    took_s: float


class Feed(NamedTuple):
    lags_s: list[float]
    cpu_s: float
    num_recorded: int


async def measure(
    url: str, control: str, *, num_turns: int, requests_per_turn: int, feed_s: float
) -> dict[str, Any]:
    """Of a mesh of CONFIG on this host with a gateway at `url`, and an observer.

    Raises StartupError.
    """
    pids = await _find_processes(control)
    await _load(url, NUM_WARM_UP)
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    for turn in range(num_turns):
        # Whichever comes first in one turn comes last in the next.
        for enabled in (True, False) if turn % 2 else (False, True):
            await configure(control, {SETTING: enabled})
            await asyncio.sleep(SETTLE_S)
            turns[enabled].append(await _turn(url, pids, requests_per_turn))
    idle_s = {}
    for enabled in (False, True):
        await configure(control, {SETTING: enabled})
        await asyncio.sleep(SETTLE_S)
        idle_s[enabled] = await _spend(pids, asyncio.sleep(IDLE_S))
    idle = {name: (idle_s[True][name] - idle_s[False][name]) / IDLE_S for name in pids}
    return {
        "requests": 2 * num_turns * requests_per_turn,
        "requests_per_s": {"off": _rate(turns[False]), "on": _rate(turns[True])},
        "cpu_us_per_request": _rows(turns),
        "request_processes": _serving(turns, idle),
        "observer_us_per_request": _mean([_us(turn, OBSERVER) for turn in turns[True]]),
        "added_when_idle_us_per_s": {name: added * 1e6 for name, added in idle.items()},
        "loop": await _compare_feeds(control, feed_s),
    }


async def _find_processes(control: str) -> dict[str, int]:
    """By name; an engine is what its worker has started."""
    roles = {
        "gateway": control_pb2.MEMBER_ROLE_GATEWAY,
        "router": control_pb2.MEMBER_ROLE_ROUTER,
        "tokenizer": control_pb2.MEMBER_ROLE_TOKENIZER,
        "worker": control_pb2.MEMBER_ROLE_WORKER,
        OBSERVER: control_pb2.MEMBER_ROLE_OBSERVER,
    }
    found = {}
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        for name, role in roles.items():
            [member] = await list_members(stub, role)
            own, *started = family(member, control)
            found[name] = own
            if started:
                found["engine"] = started[0]
    return found


async def _turn(url: str, pids: Mapping[str, int], num_requests: int) -> Turn:
    began_s = time.perf_counter()
    took_s = 0.0

    async def work() -> None:
        nonlocal took_s
        await _load(url, num_requests)
        took_s = time.perf_counter() - began_s
        await asyncio.sleep(SETTLE_S)

    return Turn(await _spend(pids, work()), num_requests, took_s)


async def _spend(pids: Mapping[str, int], work: Any) -> dict[str, float]:
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    await work
    return {name: cpu_s(pid) - before[name] for name, pid in pids.items()}


async def _load(url: str, num_requests: int) -> None:
    bodies = iter([_request(url, number) for number in range(num_requests)])

    async def keep_asking(stream: HttpStream) -> None:
        for body in bodies:
            await stream.ask(body)

    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(open_stream(url)) for _ in range(CONCURRENCY)]
        await asyncio.gather(*map(keep_asking, streams))


def _request(url: str, number: int) -> bytes:
    start = number % NUM_PROMPTS
    words = [WORDS[(start + place * 7) % len(WORDS)] for place in range(PROMPT_WORDS)]
    body = {
        "model": "",
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
    }
    return post(url, "/v1/chat/completions", orjson.dumps(body))


def _rows(turns: Mapping[bool, Sequence[Turn]]) -> list[dict[str, Any]]:
    rows = []
    for name in turns[True][0].cpu_s:
        off, on = ([_us(turn, name) for turn in turns[enabled]] for enabled in (False, True))
        rows.append({"process": name, "off": _mean(off), "on": _mean(on), **_difference(on, off)})
    return rows


def _serving(turns: Mapping[bool, Sequence[Turn]], idle: Mapping[str, float]) -> dict[str, float]:
    """Of all but the observer, together. What is told once a second, whatever comes, is spread
    over the requests of that second: it is also told apart.
    """
    off, on = (
        [sum(_us(turn, name) for name in turn.cpu_s if name != OBSERVER) for turn in turns[enabled]]
        for enabled in (False, True)
    )
    each_second = sum(added for name, added in idle.items() if name != OBSERVER)
    seconds = [(turn.took_s + SETTLE_S) / turn.num_requests for turn in turns[True]]
    found = _difference(on, off)
    each_second_us = each_second * _mean(seconds) * 1e6
    return {
        **found,
        "of_which_each_second_us": each_second_us,
        "of_which_each_request_us": found["added_us"] - each_second_us,
    }


def _difference(on: Sequence[float], off: Sequence[float]) -> dict[str, float]:
    """Of turns beside each other, with its standard error."""
    differences = [one - other for one, other in zip(on, off, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {"added_us": _mean(differences), "standard_error_us": error}


def _us(turn: Turn, name: str) -> float:
    return turn.cpu_s[name] / turn.num_requests * 1e6


def _rate(turns: Sequence[Turn]) -> float:
    return sum(turn.num_requests for turn in turns) / sum(turn.took_s for turn in turns)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


async def _compare_feeds(control: str, feed_s: float) -> dict[str, Any]:
    """This process records requests itself, more a second than the mesh may manage."""
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        observers = await list_members(stub, control_pb2.MEMBER_ROLE_OBSERVER)
    # As in every process that serves.
    spare_what_is_there()
    feeds = {}
    for enabled in (False, True):
        async with Reporter(service="bench", member_id="bench") as reporter:
            reporter.update_members(observers if enabled else ())
            await _feed(reporter, FEED_WARM_UP_S)
            feeds[enabled] = await _feed(reporter, feed_s)
    off, on = feeds[False], feeds[True]
    added_s = on.cpu_s - off.cpu_s
    return {
        "requests_per_s": on.num_recorded / feed_s,
        "lag_ms": [_lag_row("off", off), _lag_row("on", on)],
        "added_us_per_request_in_one_process": added_s / on.num_recorded * 1e6,
    }


def _lag_row(name: str, feed: Feed) -> dict[str, Any]:
    cuts = statistics.quantiles(feed.lags_s, n=1000)
    return {
        "telemetry": name,
        "p50": cuts[499] * 1e3,
        "p99": cuts[989] * 1e3,
        "p99.9": cuts[998] * 1e3,
        "longest": max(feed.lags_s) * 1e3,
    }


async def _feed(reporter: Reporter, duration_s: float) -> Feed:
    """FEED_RATE requests a second, as a router records them."""
    loop = asyncio.get_running_loop()
    lags_s: list[float] = []
    until_s = time.monotonic() + duration_s

    def probe(due_s: float) -> None:
        now_s = time.monotonic()
        lags_s.append(max(0.0, now_s - due_s))
        if now_s < until_s:
            loop.call_later(PROBE_INTERVAL_S, probe, now_s + PROBE_INTERVAL_S)

    before_s, began_s, num_recorded = time.process_time(), time.monotonic(), 0
    probe(began_s)
    while time.monotonic() < until_s:
        while num_recorded < (time.monotonic() - began_s) * FEED_RATE:
            num_recorded += 1
            _record(reporter)
        await asyncio.sleep(PACE_S)
    return Feed(lags_s, time.process_time() - before_s, num_recorded)


def _record(reporter: Reporter) -> None:
    now_s = time.monotonic()
    ledger = Ledger(now_s - 0.1)
    for place, segment in enumerate(Segment):
        ledger.record(segment, now_s - 0.1 + place * 0.01, now_s - 0.095 + place * 0.01)
    ledger.mark_first_token(now_s - 0.02)
    attributes = {f"firsttoken.bench.attribute_{number}": number for number in range(16)}
    context = TraceContext.new().child(sampled=True)
    reporter.record_request("router.generate", context, "", ledger, attributes, end_s=now_s)
