from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import grpc
import pytest

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.core.errors import InvalidArgument
from services.runtime import process
from services.runtime.channels import open_channel
from services.runtime.server import MeshServer
from services.runtime.startup import StartupError
from tests.control.mesh import make_member, operating
from tests.runtime.processes import DEADLINE_S, run, running
from tests.runtime.waiting import eventually

CONTROL = "services.control"


def events(errors: str) -> list[str]:
    return [json.loads(line)["event"] for line in errors.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_it_in_order(number: signal.Signals) -> None:
    async with running(CONTROL) as control:
        control.send(number)
        code, errors = await control.end()

    assert code == 0
    assert events(errors) == [
        f"control listening on {control.address}",
        "control stopping",
        "control stopped",
    ]


async def test_it_is_serving_when_it_says_where() -> None:
    async with running(CONTROL) as control, operating(control.address) as operator:
        assert await operator.generation() == 1


async def test_it_stops_when_its_parent_is_gone() -> None:
    async with running(CONTROL) as control:
        control.cut_lifeline()
        code, errors = await control.end()

    assert code == 0
    assert events(errors)[-1] == "control stopped"


async def test_bytes_on_the_lifeline_mean_nothing() -> None:
    read, write = os.pipe()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CONTROL, "--lifeline-fd", str(read)), pass_fds=[read], stderr=PIPE
    )
    os.close(read)
    assert child.stderr is not None
    first = await asyncio.wait_for(child.stderr.readline(), DEADLINE_S)
    os.write(write, b"still here")
    address = json.loads(first)["address"]
    async with operating(address) as operator:
        generation = await operator.generation()
    os.close(write)
    await asyncio.wait_for(child.communicate(), DEADLINE_S)

    assert generation == 1
    assert child.returncode == 0


async def test_it_stops_with_streams_open() -> None:
    async with running(CONTROL) as control, operating(control.address) as operator:
        join = await operator.join(make_member("a"))
        await join.read()
        control.send(signal.SIGTERM)
        code, _ = await control.end()

    assert code == 0


async def test_it_stops_although_nobody_reads_the_streams() -> None:
    """A member that is stopped, or whose machine hangs, must not hold up the others' control."""
    async with running(CONTROL) as control, operating(control.address) as operator:
        slow = [await operator.join(make_member(f"{n}", detail="x" * 400_000)) for n in range(20)]

        async def all_joined() -> bool:
            return len(await operator.members()) == 20

        await eventually(all_joined)
        control.send(signal.SIGTERM)
        code, _ = await control.end()
        for join in slow:
            join.cancel()

    assert code == 0


async def test_a_second_signal_ends_it_at_once() -> None:
    """The first one waits for a call that does not end."""
    async with running("tests.runtime.stubborn") as node, open_channel(node.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        call = stub.GetConfig(control_pb2.GetConfigRequest())
        assert node.process.stdout is not None
        await asyncio.wait_for(node.process.stdout.readline(), DEADLINE_S)  # the call is in
        node.send(signal.SIGINT)
        await asyncio.wait_for(node.process.stdout.readline(), DEADLINE_S)  # it is stopping
        node.send(signal.SIGINT)
        code, errors = await node.end()
        with pytest.raises(grpc.aio.AioRpcError):
            await call

    assert code == -signal.SIGINT
    assert events(errors)[-1] == "stubborn stopping"


async def test_a_port_in_use_is_one_line_and_exit_code_three() -> None:
    async with MeshServer("127.0.0.1:0", service_names=[]) as other:
        code, output, errors = await run(CONTROL, "--listen", other.address)

    assert (code, output) == (3, "")
    assert errors == (
        f"control: cannot listen on {other.address}: the port is in use; choose another\n"
    )


async def test_a_signal_during_start_up_stops_it(tmp_path: Path) -> None:
    """It waits for a Redis that accepts connections and says nothing."""
    path = tmp_path / "mesh.toml"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        path.write_text(f'[control]\nredis_url = "{url}"\n')
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", CONTROL, "--config", str(path)), stderr=PIPE
        )
        connection, _ = await asyncio.to_thread(silent.accept)
        child.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(child.communicate(), DEADLINE_S)
        connection.close()

    assert child.returncode == 0
    assert events(errors.decode()) == ["control stopped"]


async def test_a_bad_option_is_explained() -> None:
    code, _, errors = await run(CONTROL, "--lisen", "127.0.0.1:0")

    assert code == 2
    assert "--lisen" in errors


def test_the_reason_is_found_in_a_group_and_is_one_line() -> None:
    group = BaseExceptionGroup("", [KeyError("x"), ExceptionGroup("", [StartupError("a\n  b")])])

    assert process.startup_reason(group) == "a b"
    assert process.startup_reason(InvalidArgument.of("mesh.model", "is unknown")) == (
        "mesh.model: is unknown"
    )
    assert process.startup_reason(KeyError("x")) is None
