"""How much of the time to first token has an owner: requests of all kinds, by both ways in.

A ledger is closed when its residual, which no segment owns, is within 1 ms or 1 %.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import orjson

from firsttoken.client import MeshClient, MeshError, Prompt
from services.bench.reuse import WORDS
from services.core.config import parse
from services.core.settings import MeshConfig

# For a mesh with one worker that answers, and one that prefills what is long.
CONFIG: MeshConfig = parse({"worker": {"num_slots": 4, "handoff_min_tokens": 150}})
CLOSED_MS, CLOSED_SHARE = 1.0, 0.01
NUM_PREFIXES, PREFIX_WORDS = 4, 120
SHORT_WORDS, LONG_WORDS = 12, 60
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 120.0


class Place(NamedTuple):
    client: MeshClient
    # The gateway's.
    url: str


class Seen(NamedTuple):
    """Of one request, until its first token or its refusal, in milliseconds."""

    total_ms: float
    residual_ms: float
    handed_off: bool = False

    @property
    def is_closed(self) -> bool:
        return abs(self.residual_ms) <= max(CLOSED_MS, CLOSED_SHARE * self.total_ms)


Ask: TypeAlias = Callable[[Place, random.Random], Awaitable[Seen]]


async def measure(
    place: Place, *, num_requests: int, concurrency: int, seed: int = 1
) -> dict[str, Any]:
    """Kinds take turns, `concurrency` requests at a time."""
    turns = itertools.islice(itertools.cycle(KINDS.items()), num_requests)
    seen: dict[str, list[Seen]] = defaultdict(list)

    async def work(number: int) -> None:
        for kind, ask in turns:
            chance = random.Random(f"{seed} {number} {len(seen[kind])} {kind}")
            found = await ask(place, chance)
            seen[f"{kind}, handed off" if found.handed_off else kind].append(found)

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(work(number))
    everything = [each for kind in seen.values() for each in kind]
    return {
        "requests": num_requests,
        "concurrency": concurrency,
        "closed_ms": CLOSED_MS,
        "closed_share": CLOSED_SHARE,
        "kinds": [summarise(kind, found) for kind, found in sorted(seen.items()) if found],
        "all": summarise("all", everything),
    }


def summarise(kind: str, seen: Sequence[Seen]) -> dict[str, Any]:
    residuals_ms = sorted(abs(each.residual_ms) for each in seen)
    worst = max(seen, key=lambda each: abs(each.residual_ms))
    return {
        "kind": kind,
        "requests": len(seen),
        "closed": sum(each.is_closed for each in seen) / len(seen),
        "total_p50_ms": statistics.median(each.total_ms for each in seen),
        "residual_p50_ms": statistics.median(residuals_ms),
        "residual_p99_ms": residuals_ms[math.ceil(0.99 * len(residuals_ms)) - 1],
        "residual_worst_ms": worst.residual_ms,
    }


def _prompt(chance: random.Random) -> str:
    """It begins as one in four others do; one in four is long enough to be handed off."""
    prefix = random.Random(f"prefix {chance.randrange(NUM_PREFIXES)}")
    is_long = chance.random() < 0.25
    words = prefix.choices(WORDS, k=PREFIX_WORDS if chance.random() < 0.5 else 0)
    own = chance.choices(WORDS, k=4 * LONG_WORDS if is_long else chance.choice((12, 60)))
    return " ".join([*words, *own])


def _chat(chance: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": _prompt(chance)}]


def _ids(chance: random.Random) -> list[int]:
    return [chance.randrange(100, 40_000) for _ in range(chance.choice((20, 90, 300)))]


async def _complete(place: Place, prompt: Prompt, max_tokens: int) -> Seen:
    answer = await place.client.complete(prompt, max_tokens=max_tokens)
    return Seen(answer.ttft_ms, answer.residual_ms, answer.kv_path.handed_off)


async def _refused(place: Place, prompt: Prompt, **options: Any) -> Seen:
    try:
        await place.client.complete(prompt, **options)
    except MeshError as error:
        if error.ledger:
            return Seen(error.elapsed_ms, error.residual_ms)
        raise
    raise AssertionError("it was to be refused")


async def _post(
    place: Place, path: str, *, stream: bool, is_refused: bool = False, **body: Any
) -> Seen:
    options = {"stream_options": {"include_ledger": True}} if stream else {}
    body |= {"stream": stream, "include_ledger": True, **options}
    status, headers, answer = await asyncio.to_thread(_exchange, place.url, path, body)
    if status != (400 if is_refused else 200):
        raise AssertionError(f"HTTP {status}: {answer[:200]!r}")
    if is_refused:
        return from_timing(headers["server-timing"])
    if stream:
        *_, last, _, _ = answer.split(b"\n\n")
        answer = last.removeprefix(b"data: ")
    [journey] = orjson.loads(answer)["firsttoken"]
    ledger = journey["ledger"]
    handed_off = "long enough" in journey["kv_path"]
    return Seen(ledger["total_ms"], ledger["residual_ms"], handed_off)


def _exchange(url: str, path: str, body: Any) -> tuple[int, http.client.HTTPMessage, bytes]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", path, orjson.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def from_timing(header: str) -> Seen:
    timings = dict(part.split(";dur=") for part in header.split(", "))
    return Seen(float(timings["total"]), float(timings["residual"]))


KINDS: dict[str, Ask] = {
    "gRPC text": lambda place, chance: _complete(place, _prompt(chance), 4),
    "gRPC chat": lambda place, chance: _complete(place, _chat(chance), 4),
    "gRPC ids": lambda place, chance: _complete(place, _ids(chance), 1),
    "HTTP chat, streamed": lambda place, chance: _post(
        place, CHAT, stream=True, messages=_chat(chance), max_tokens=4
    ),
    "HTTP chat, whole": lambda place, chance: _post(
        place, CHAT, stream=False, messages=_chat(chance), max_tokens=4
    ),
    "HTTP text, streamed": lambda place, chance: _post(
        place, COMPLETION, stream=True, prompt=_prompt(chance), max_tokens=4
    ),
    "HTTP ids, whole": lambda place, chance: _post(
        place, COMPLETION, stream=False, prompt=_ids(chance), max_tokens=1
    ),
    "gRPC refused": lambda place, chance: _refused(place, "word " * 9000),
    "HTTP refused": lambda place, chance: _post(
        place, COMPLETION, stream=bool(chance.getrandbits(1)), is_refused=True, prompt=[7] * 9000
    ),
}
