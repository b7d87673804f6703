from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import sys
from pathlib import Path

import pytest

from services.bench import overhead, overhead_figures
from services.bench.overhead_command import COMMAND, Foreign, open_foreign
from services.bench.overhead_load import Turn, due_times_s
from services.bench.overhead_prompts import LOADS, texts
from services.bench.overhead_rows import GATEWAY, PASSED_ON, PROXIED, UNARY, WORKER, Heard
from services.cli import overhead_tables
from services.cli.plans import run_quiet_mesh
from services.core.errors import InvalidArgument
from services.runtime.startup import StartupError
from tests.runtime.ports import free_port


@pytest.fixture
def port() -> int:
    return free_port()


SERVER = """
import asyncio
HEAD = b"HTTP/1.1 %s\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
async def serve(reader, writer):
    while head := await reader.readuntil(b"\\r\\n\\r\\n"):
        size = int(head.lower().split(b"content-length: ")[1].split()[0])
        await reader.readexactly(size)
        writer.write(HEAD + b"8\\r\\ndata: {}\\r\\n0\\r\\n\\r\\n")
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", %d):
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_a_run_compares_all_ways_and_shows_them(tmp_path: Path, port: int) -> None:
    (tmp_path / "server.py").write_text(SERVER % ("200 OK", port))
    plan = overhead.Plan(
        loads=LOADS[:1],
        num_turns=1,
        num_requests=4,
        concurrency=2,
        rate_per_s=100.0,
        seconds=0.04,
        num_streams=2,
        answer_tokens=4,
        long_answers=2,
    )
    foreign = Foreign(
        shlex.join([sys.executable, str(tmp_path / "server.py")]),
        url=f"http://127.0.0.1:{port}",
    )
    mesh = run_quiet_mesh(overhead.CONFIG, num_workers=1, with_kvstore=False, with_gateway=True)
    async with mesh as running:
        document = await overhead.measure(
            running.router, running.control, running.http, plan, foreign=foreign
        )

    assert json.loads(json.dumps(document)) == document
    [load] = document["loads"]
    for pace in ("alone", "closed", "open"):
        rows = {row["row"]: row for row in load[pace]}
        assert {UNARY, WORKER, PROXIED, GATEWAY, COMMAND} <= rows.keys()
        assert all(row["requests"] == 4 for row in rows.values())
        assert rows[WORKER]["added_p50_ms"] == 0
        assert {"router", "tokenizer", "worker", "engine", "gateway", "floor", "command"} <= set(
            rows[PROXIED]["cpu_us_per_request"]
        )
    answers = {row["row"]: row for row in document["long_answers"]["rows"]}
    assert answers["floor, passed on"]["messages_per_answer"] == round(
        document["long_answers"]["proxied_messages_per_answer"]
    )
    lines = [*overhead_tables.lines_of(document)]
    assert sum(line.strip().startswith("proxied ") for line in lines) == 8
    assert "<td>proxied</td>" in overhead_tables.page(document)


def turn(ttft_s: float, **cpu_s: float) -> Turn:
    return Turn([Heard(ttft_s, 3)] * 4, [], 2.0, cpu_s)


def test_what_is_spent_when_nobody_asks_is_taken_off() -> None:
    idle = Turn([], [], 1.0, {"router": 0.01, "engine": 0.5, "client": 0.0})
    turns = {WORKER: [turn(0.1, router=0.02, engine=2.0, client=1.0)]}

    [row] = overhead_figures.compare(turns, [idle])
    assert row["cpu_us_per_request"] == pytest.approx(
        {"router": 0.0, "engine": 250_000.0, "client": 250_000.0}
    )
    assert row["service_cpu_us"] == pytest.approx(0.0)


def test_a_row_stands_beside_the_worker_and_the_unary_floor() -> None:
    turns = {
        UNARY: [turn(0.5, router=0.0)],
        WORKER: [turn(1.0, router=0.0)],
        PROXIED: [turn(1.5, router=4.0)],
    }

    rows = {row["row"]: row for row in overhead_figures.compare(turns, [])}
    assert rows[PROXIED]["added_p50_ms"] == pytest.approx(500.0)
    assert rows[PROXIED]["of_unary_p99"] == pytest.approx(3.0)
    assert rows[PROXIED]["service_cpu_us"] == pytest.approx(1e6)


def test_a_token_s_cost_counts_no_client_and_no_engine() -> None:
    turns = {PROXIED: [turn(1.0, router=0.4, engine=9.0, client=9.0)]}

    [row] = overhead_figures.per_token(turns, [], answer_tokens=10)
    assert row["tokens_per_message"] == pytest.approx(10 / 3)
    assert row["service_cpu_us"] == pytest.approx(10_000.0)
    assert row["service_cpu_us_per_message"] == pytest.approx(0.4e6 / 12)


def test_the_router_s_part_of_a_message_is_told_apart_from_that_of_a_request() -> None:
    answers = [
        {
            "row": PROXIED,
            "messages_per_answer": 102.0,
            "cpu_us_per_answer": {"router": 5_500.0},
        },
        {
            "row": PASSED_ON,
            "messages_per_answer": 100.0,
            "cpu_us_per_answer": {"passing": 2_500.0},
        },
    ]
    short = [{"row": PROXIED, "messages": 2.0, "cpu_us_per_request": {"router": 500.0}}]

    beside = overhead_figures.beside_the_floor(answers, short)
    assert beside["router_us_per_further_message"] == pytest.approx(50.0)
    assert beside["passing_us_per_message"] == pytest.approx(25.0)
    assert beside["further_of_passing"] == pytest.approx(2.0)
    assert overhead_figures.beside_the_floor(answers, []) == {}


def test_prompts_share_their_beginning_and_nothing_else() -> None:
    for load in LOADS:
        first, second = itertools.islice(texts(load), 2)
        shared, _, own = first.rpartition("0-0: ")
        assert second.startswith(f"{shared}0-1: ")
        assert bool(shared) == bool(load.shared_tokens)
        assert own not in second
        assert next(texts(load, seed=1)) != first


def test_an_open_loop_comes_at_its_rate() -> None:
    times_s = due_times_s(1000, 50.0, seed=1)
    assert times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(20.0, rel=0.2)


@pytest.mark.parametrize(
    ("foreign", "problem"),
    [
        (Foreign("serve"), "--command: needs --command-url or --command-grpc"),
        (Foreign("", url="http://127.0.0.1:1"), "--command: is missing"),
        (Foreign("serve 'x", url="http://127.0.0.1:1"), "--command: cannot be split"),
        (Foreign("serve", url="127.0.0.1:8000"), "--command-url: must be http://HOST:PORT"),
        (Foreign("serve", url="https://host:1"), "--command-url: must be http://HOST:PORT"),
        (Foreign("serve", address="host"), "--command-grpc: must be HOST:PORT"),
    ],
)
def test_a_command_that_cannot_be_asked_is_refused(foreign: Foreign, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        foreign.check()


async def test_a_command_that_cannot_start_is_told() -> None:
    with pytest.raises(StartupError, match="cannot start /nowhere/server: No such file"):
        async with open_foreign(Foreign("/nowhere/server", url="http://127.0.0.1:1")):
            pass


async def test_a_command_that_ends_is_told_with_its_last_words(port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    foreign = Foreign("sh -c 'echo no such model; exit 7'", url=url)
    with pytest.raises(StartupError, match="exit status 7: no such model"):
        async with open_foreign(foreign):
            pass


async def test_a_command_that_refuses_is_told_and_stopped(tmp_path: Path, port: int) -> None:
    (tmp_path / "server.py").write_text(SERVER % ("404 Not Found", port))
    line = shlex.join([sys.executable, str(tmp_path / "server.py")])
    with pytest.raises(StartupError, match="refuses what it is asked: HTTP"):
        async with open_foreign(Foreign(line, url=f"http://127.0.0.1:{port}")):
            pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
