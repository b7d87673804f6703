"""The supervised service is a real one: control, which needs nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from services.cli.failures import CANNOT_START, Failure
from services.cli.logs import RunLogs
from services.cli.process import Service
from services.cli.restarts import RestartPolicy
from services.cli.supervisor import Supervisor

Supervise = Callable[..., Supervisor]


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def lifeline() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with suppress(OSError):  # a test may have closed it
            os.close(end)


@pytest.fixture
async def supervise(
    tmp_path: Path, reports: list[str], lifeline: tuple[int, int]
) -> AsyncIterator[Supervise]:
    """Makes supervisors of a control service; all are stopped at the end."""
    async with AsyncExitStack() as stack:
        logs = stack.enter_context(RunLogs(tmp_path, least_level=0))

        def make(
            *arguments: str, policy: RestartPolicy | None = None, keeps_address: bool = False
        ) -> Supervisor:
            supervisor = Supervisor(
                Service(
                    name="control",
                    module="services.control",
                    arguments=arguments,
                    keeps_address=keeps_address,
                ),
                lifeline_fd=lifeline[0],
                log=logs.open("control", lambda _: None),
                report=reports.append,
                policy=policy or RestartPolicy(),
            )
            stack.push_async_callback(supervisor.stop)
            return supervisor

        yield make


def pid_of(supervisor: Supervisor) -> int:
    assert supervisor.pid is not None
    return supervisor.pid


async def test_a_killed_service_is_started_again_on_its_address(
    supervise: Supervise, reports: list[str]
) -> None:
    control = supervise(keeps_address=True)
    await control.start()
    address, pid = control.address, pid_of(control)
    keeping = asyncio.ensure_future(control.keep_running())

    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while len(reports) < 2:
            await asyncio.sleep(0.01)
    keeping.cancel()

    assert reports == ["ended (SIGKILL); starts again in 0.25 s", f"is back on {address}"]
    assert control.address == address
    assert control.pid != pid


async def test_a_service_that_ends_too_often_is_given_up(supervise: Supervise) -> None:
    control = supervise(policy=RestartPolicy(max_crashes=0))
    await control.start()
    os.kill(pid_of(control), signal.SIGKILL)

    with pytest.raises(Failure, match=r"control: ended too often \(SIGKILL\)") as caught:
        await control.keep_running()

    assert caught.value.exit_status == CANNOT_START


async def test_a_service_that_cannot_start_gives_its_own_reason(
    supervise: Supervise, tmp_path: Path
) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[router]\nmax_que = 1\n")

    with pytest.raises(Failure) as caught:
        await supervise("--config", str(file)).start()

    assert str(caught.value).startswith(f"control: {file}: router.max_que: is no setting")
    assert caught.value.exit_status == CANNOT_START


async def test_a_service_stops_when_its_lifeline_ends(
    supervise: Supervise, lifeline: tuple[int, int], reports: list[str]
) -> None:
    control = supervise(policy=RestartPolicy(max_crashes=0))
    await control.start()

    os.close(lifeline[1])

    with pytest.raises(Failure, match=r"\(exit status 0\)"):
        await control.keep_running()


async def test_a_service_that_does_not_stop_is_killed(supervise: Supervise) -> None:
    control = supervise()
    await control.start()
    pid = pid_of(control)
    os.kill(pid, signal.SIGSTOP)

    await control.stop(timeout_s=0.1)

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_stopping_twice_or_before_the_start_is_allowed(supervise: Supervise) -> None:
    control = supervise()
    await control.stop()
    await control.start()

    await control.stop()
    await control.stop()
