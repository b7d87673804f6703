"""`docker compose up`, for real: `make test-compose`.

The tests run in order, and the last one stops the stack.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.compose.stack import ROOT, Stack, running_stack

# Where docker-compose and hadolint are.
TOOLS = os.environ.get("FIRSTTOKEN_COMPOSE", "")
PATIENCE_S = 120.0
SEGMENTS = ("queue", "preprocess", "route", "prefill_queue", "kv_load", "prefill", "transfer")

pytestmark = [
    pytest.mark.skipif(not TOOLS, reason="make test-compose"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(Path(TOOLS)) as running:
        yield running


def wait_until(holds: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come to be"
        time.sleep(0.5)


async def ask(stack: Stack, text: str, max_tokens: int = 8) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "include_ledger": True,
    }
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        response = await client.post(f"{stack.http}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_hadolint_finds_nothing() -> None:
    subprocess.run([Path(TOOLS) / "hadolint", ROOT / "Dockerfile"], check=True)


def test_every_container_with_a_check_is_healthy(stack: Stack) -> None:
    containers = stack.containers()

    assert {each.status for each in containers} == {"running"}
    assert {each.health for each in containers} <= {"healthy", ""}
    assert {each.num_restarts for each in containers} == {0}


async def test_a_prompt_is_answered_and_its_ledger_adds_up(stack: Stack) -> None:
    answer = await ask(stack, "Why is the sky blue?")
    ledger = answer["firsttoken"][0]["ledger"]
    total_ms = sum(ledger[f"{name}_ms"] for name in (*SEGMENTS, "residual"))

    assert answer["choices"][0]["message"]["content"]
    assert ledger["prefill_ms"] > 0
    assert total_ms == pytest.approx(ledger["total_ms"], abs=0.1)


def test_the_command_line_is_in_the_image(stack: Stack) -> None:
    assert "worker" in stack.inside("observer", "firsttoken", "status")
    # 1: it has found something.
    assert stack.inside("observer", "sh", "-c", "firsttoken doctor || test $? = 1")


def test_workers_and_kv_store_share_memory(stack: Stack) -> None:
    def found() -> list[str]:
        return re.findall(r'"using kv store".*"through":"(.+?)"', stack.compose("logs", "worker"))

    wait_until(lambda: len(found()) == 2)
    assert set(found()) == {"shared memory"}


@pytest.mark.parametrize("service", ["control", "router", "worker", "kvstore", "observer"])
def test_a_process_is_nobody_and_can_write_nothing_but_tmp(stack: Stack, service: str) -> None:
    assert stack.inside(service, "id", "-u").strip() == "10001"
    tried = "touch /tmp/x && ! touch /opt/x 2>/dev/null && ! touch /x 2>/dev/null"
    stack.inside(service, "sh", "-c", tried)


async def test_the_observer_has_seen_the_requests(stack: Stack) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        state = (await client.get(f"{stack.page}/api/state")).json()
        page = await client.get(stack.page)

    assert state["num_requests"] >= 1
    assert page.status_code == 200
    assert "text/html" in page.headers["content-type"]


def test_prometheus_reads_the_observer(stack: Stack) -> None:
    url = "http://127.0.0.1:9090/api/v1/query?query=up"

    wait_until(lambda: '"1"]' in stack.inside("prometheus", "wget", "-q", "-O", "-", url))


async def test_a_worker_that_dies_costs_no_request(stack: Stack) -> None:
    numbers = itertools.count()
    killed = asyncio.Event()

    async def keep_asking() -> int:
        """Until some have been asked after the death."""
        num_after = 0
        while num_after < 3:
            number = next(numbers)
            answer = await ask(stack, f"What comes after the number {number}?", max_tokens=24)
            assert answer["choices"][0]["finish_reason"] in ("stop", "length")
            num_after += killed.is_set()
        return num_after

    asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
    await ask(stack, "Wait for the first of them.")
    dead = stack.containers("worker")[0]
    stack.crash(dead)
    killed.set()
    assert await asyncio.gather(*asking) == [3, 3, 3, 3]

    def is_back() -> bool:
        found = next(each for each in stack.containers("worker") if each.id == dead.id)
        return found.num_restarts == 1 and found.health == "healthy"

    await asyncio.to_thread(wait_until, is_back)


def test_everything_stops_when_asked(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    begin_s = time.monotonic()
    stack.compose("stop")
    duration_s = time.monotonic() - begin_s
    containers = stack.containers()
    with capsys.disabled():
        print(f"\n{len(containers)} containers stopped in {duration_s:.1f} s")

    # One that does not stop within 10 s is killed: 137.
    assert {each.service: each.exit_code for each in containers if each.exit_code} == {}
