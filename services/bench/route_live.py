"""Routing strategies over real processes: an open-loop load through the HTTP edge.

Each request is sent at its time, whether those before it are answered or not. Prompts
are token ids that share what the workload says, so that a hit here is a hit there. With
each strategy comes another salt: nothing that was cached before is found again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import orjson

from services.bench.http_stream import Heard, HttpStream, open_stream, post
from services.bench.route import Result, RoutePlan, add_strategy, describe, percentile
from services.bench.settings import configure
from services.bench.workloads import SharedPrefix, make, token_ids
from services.core.workload import Arrival, Workload

PATH = "/v1/completions"
# Before each strategy is measured, so that workers have measured themselves, and what is
# cached no more has been evicted.
WARM_UP = SharedPrefix(num_requests=32, rate_per_s=20.0, num_prefixes=8, prefix_tokens=1_000)


class Sent(NamedTuple):
    result: Result
    # How much later than it should have been sent.
    late_s: float


async def measure(
    url: str,
    control: str,
    workload: Workload,
    plan: RoutePlan,
    *,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Of a mesh with the gateway at `url`, started with the plan's configuration."""
    document = describe(workload, plan, clock="live")
    arrivals = list(workload.arrivals)
    prompts = _prompts(arrivals, workload.block_tokens)
    warm_up = list(make(WARM_UP).arrivals)
    warm_up_prompts = _prompts(warm_up, WARM_UP.block_tokens)
    for strategy in plan.strategies:
        tell(f"{strategy} …")
        await configure(control, {"router.routing_strategy": strategy})
        salt = f"{strategy} {time.time_ns()}"
        await send_all(url, warm_up, warm_up_prompts, f"{salt} before")
        began_s = time.perf_counter()
        sent = await send_all(url, arrivals, prompts, salt)
        duration_s = time.perf_counter() - began_s
        results = [each.result for each in sent]
        add_strategy(document, strategy, results, _work(results, plan.num_workers), duration_s)
        late_ms = sorted(each.late_s * 1e3 for each in sent)
        document["strategies"][-1]["late_p99_ms"] = percentile(late_ms, 99)
    return document


class _Connections:
    """One for each request under way; opened when there is none left."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stack = AsyncExitStack()
        self._idle: list[HttpStream] = []

    async def __aenter__(self) -> _Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[HttpStream]:
        # Not those that the other side has closed meanwhile.
        self._idle = [each for each in self._idle if each.is_open]
        if self._idle:
            stream = self._idle.pop()
        else:
            stream = await self._stack.enter_async_context(open_stream(self._url))
        yield stream
        # Not one that failed.
        self._idle.append(stream)


async def send_all(
    url: str, arrivals: Sequence[Arrival], prompts: Sequence[bytes], salt: str
) -> list[Sent]:
    async with _Connections(url) as connections, asyncio.TaskGroup() as group:
        start_s = time.perf_counter() - (arrivals[0].at_s if arrivals else 0.0)
        tasks = []
        for arrival, prompt in zip(arrivals, prompts, strict=True):
            request = post(url, PATH, _body(arrival, prompt, salt))
            due_s = start_s + arrival.at_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(_send(connections, arrival, request, due_s)))
        return list(await asyncio.gather(*tasks))


async def _send(connections: _Connections, arrival: Arrival, request: bytes, due_s: float) -> Sent:
    late_s = time.perf_counter() - due_s
    try:
        async with connections.lend() as stream:
            return Sent(_result(arrival, await stream.ask(request)), late_s)
    except OSError as error:
        return Sent(_failure(arrival, str(error)), late_s)


def _result(arrival: Arrival, heard: Heard) -> Result:
    last = _last_event(heard.answer)
    if "error" in last:
        return _failure(arrival, last["error"]["message"])
    [journey] = last["firsttoken"]
    usage = last["usage"]
    return Result(
        ttft_s=heard.ttft_s,
        tpot_s=(heard.took_s - heard.ttft_s) / max(1, usage["completion_tokens"] - 1),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        predicted_tokens=journey["routing"]["predicted_cached_tokens"],
        worker=journey["worker_id"],
        error="",
    )


def _failure(arrival: Arrival, answer: str) -> Result:
    """`answer`: of HTTP, or what became of it or of the connection."""
    reason = answer.splitlines()[0].removeprefix("HTTP/1.1 ") if answer else "no connection"
    nan = float("nan")
    return Result(nan, nan, arrival.prompt_tokens, arrival.output_tokens, 0, None, "", reason)


def _last_event(answer: bytes) -> dict[str, Any]:
    """The one before [DONE], which says what the answer was made of; or the error that broke
    it off."""
    *_, before, last = (event.split(b"\n\n")[0] for event in answer.split(b"data: "))
    found: dict[str, Any] = json.loads(before if last == b"[DONE]" else last)
    return found


def _work(results: Sequence[Result], num_workers: int) -> list[int]:
    """Uncached tokens of each worker, those that had none included."""
    work: Counter[str] = Counter()
    for each in results:
        if not each.error:
            work[each.worker] += each.prompt_tokens - each.cached_tokens
    return [*work.values(), *[0] * (num_workers - len(work))]


def _prompts(arrivals: Sequence[Arrival], block_tokens: int) -> list[bytes]:
    """As JSON, made before the first is sent: it takes the load's own time."""
    return [
        orjson.dumps(token_ids(arrival, number, block_tokens))
        for number, arrival in enumerate(arrivals)
    ]


def _body(arrival: Arrival, prompt: bytes, salt: str) -> bytes:
    asked = {
        "max_tokens": arrival.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "include_ledger": True},
        "cache_salt": salt,
    }
    return orjson.dumps(asked)[:-1] + b',"prompt":' + prompt + b"}"
