"""A whole mesh on this machine: its processes, started, kept running and stopped in order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from services.cli.failures import Failure
from services.cli.logs import RunLogs
from services.cli.process import Service
from services.cli.progress import watch_until_ready
from services.cli.restarts import RestartPolicy
from services.cli.supervisor import Supervisor
from services.runtime.tls import Tls

T = TypeVar("T")

ANY_PORT = "127.0.0.1:0"
CONTROL, TOKENIZER, WORKER, ROUTER = "services.control", "services.tokenizer", "worker", "router"
KVSTORE, REDIS, GATEWAY = "kvstore", "services.cli.local_redis", "services.gateway"
OBSERVER = "services.observer"
# Nothing new comes in, then what is running ends, then what it needed. The observer hears
# the last of all of them.
STOP_ORDER = (GATEWAY, ROUTER, WORKER, KVSTORE, REDIS, TOKENIZER, OBSERVER, CONTROL)
# The mesh goes on without these: it computes what it cannot load, and is not observed.
OPTIONAL = (KVSTORE, REDIS, OBSERVER)


class Report(Protocol):
    def __call__(self, name: str, text: str) -> None:
        """Show one line about a service."""


class Listens(NamedTuple):
    """Where those listen that others call: host:port, with port 0 for any.

    `http`: the gateway, `page`: the observer; "" starts none. `mtls`: the router's port for
    certificates, if any.
    """

    router: str = ANY_PORT
    control: str = ANY_PORT
    http: str = ""
    page: str = ""
    mtls: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """What to start. `config_file` is TOML.

    `redis_socket`: run a Redis of our own that listens there. `tls_dir`: certificates of
    all; without it nothing is encrypted.
    """

    config_file: Path
    num_workers: int
    num_prefill_workers: int = 0
    with_kvstore: bool = True
    redis_socket: Path | None = None
    redis_max_mb: int = 0
    listens: Listens
    tls_dir: Path | None = None


class LocalMesh:
    """An async context manager: entered, every member is ready; left, every process is gone.

    Raises Failure when a service cannot start. When this process is killed, the
    services see the end of their lifeline and stop by themselves. `restarts` makes a
    policy for each service.
    """

    def __init__(
        self,
        plan: MeshPlan,
        *,
        logs: RunLogs,
        report: Report,
        restarts: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self.stopping = False
        self._plan = plan
        self._logs = logs
        self._report = report
        self._restarts = restarts
        self._lifeline_fds = os.pipe()
        self.tls: Tls | None = None
        self._supervisors: list[Supervisor] = []
        self._ready = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def router(self) -> str:
        return self._address(ROUTER)

    @property
    def control(self) -> str:
        return self._address(CONTROL)

    @property
    def http(self) -> str:
        """The gateway's URL; "" where there is none."""
        return self._url(GATEWAY) if self._plan.listens.http else ""

    @property
    def page(self) -> str:
        """The observer's URL; "" where there is none."""
        return self._url(OBSERVER) if self._plan.listens.page else ""

    async def __aenter__(self) -> LocalMesh:
        self._running = asyncio.create_task(self._run(), name="mesh")
        try:
            await self.run_beside(self._ready.wait())
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    async def run_beside(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, done while the mesh runs.

        Raises Failure, and cancels the work, when the mesh cannot go on.
        """
        assert self._running is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._running.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return task.result()

    def kill(self) -> None:
        """End every process at once; what waits for them to stop then returns."""
        for supervisor in self._supervisors:
            supervisor.kill()

    async def _run(self) -> None:
        if self._plan.tls_dir is not None:
            self.tls = Tls(self._plan.tls_dir)
        control = self._supervise(_control(self._plan))
        await control.start()
        control.report(f"ready on {control.address}")
        redis = [self._supervise(each) for each in _redis(self._plan)]
        members = [self._supervise(each) for each in _members(self._plan, control.address)]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(control.keep_running())
                for service in (*redis, *members):
                    group.create_task(_start_and_keep(service))
                await watch_until_ready(control.address, members, self.tls)
                self._ready.set()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _supervise(self, service: Service) -> Supervisor:
        def report(text: str) -> None:
            self._report(service.name, text)

        log = self._logs.open(service.name, report)
        supervisor = Supervisor(
            service,
            lifeline_fd=self._lifeline_fds[0],
            log=log,
            report=report,
            policy=self._restarts(),
        )
        self._supervisors.append(supervisor)
        return supervisor

    async def _stop(self) -> None:
        self.stopping = True
        if self._running is not None:
            self._running.cancel()
            # Whoever waited has heard how it ended.
            await asyncio.gather(self._running, return_exceptions=True)
        for module in STOP_ORDER:
            stopped = [s for s in self._supervisors if s.service.module == module and s.pid]
            await asyncio.gather(*(supervisor.stop() for supervisor in stopped))
            for supervisor in stopped:
                supervisor.report("stopped")
        for fd in self._lifeline_fds:
            os.close(fd)

    def _url(self, module: str) -> str:
        return f"{'https' if self.tls else 'http'}://{self._address(module)}"

    def _address(self, module: str) -> str:
        return next(s.address for s in self._supervisors if s.service.module == module)


async def _start_and_keep(supervisor: Supervisor) -> None:
    await supervisor.start()
    if supervisor.service.module == REDIS:  # it is no member that would say so itself
        supervisor.report(f"started on {supervisor.address}")
    try:
        await supervisor.keep_running()
    except Failure as failure:
        if supervisor.service.module not in OPTIONAL:
            raise
        supervisor.report(f"{failure}; the mesh goes on without it")


def _control(plan: MeshPlan) -> Service:
    return Service(
        name="control",
        module=CONTROL,
        arguments=("--config", str(plan.config_file), *_tls(plan)),
        listen=plan.listens.control,
        keeps_address=True,
    )


def _redis(plan: MeshPlan) -> list[Service]:
    if plan.redis_socket is None:
        return []
    place = ("--socket", str(plan.redis_socket), "--max-mb", str(plan.redis_max_mb))
    arguments = (*place, "--parent", str(os.getpid()))
    return [Service(name="redis", module=REDIS, arguments=arguments)]


def _members(plan: MeshPlan, control: str) -> list[Service]:
    joined = ("--control", control, *_tls(plan))
    mtls = ("--mtls-listen", plan.listens.mtls) if plan.listens.mtls else ()
    return [
        *([Service(name="kvstore", module=KVSTORE, arguments=joined)] * plan.with_kvstore),
        Service(name="tokenizer", module=TOKENIZER, arguments=joined),
        *_workers(plan, joined),
        Service(
            name="router",
            module=ROUTER,
            arguments=(*joined, *mtls),
            listen=plan.listens.router,
            keeps_address=True,
        ),
        *_http("gateway", GATEWAY, plan.listens.http, joined),
        *_http("observer", OBSERVER, plan.listens.page, joined),
    ]


def _http(name: str, module: str, listen: str, joined: tuple[str, ...]) -> list[Service]:
    if not listen:
        return []
    service = Service(name=name, module=module, arguments=joined, listen=listen, keeps_address=True)
    return [service]


def _tls(plan: MeshPlan) -> tuple[str, ...]:
    return ("--tls-dir", str(plan.tls_dir)) if plan.tls_dir is not None else ()


def _workers(plan: MeshPlan, joined: tuple[str, ...]) -> list[Service]:
    """Those that answer, then those that only compute prompts for them."""
    num_all = plan.num_workers + plan.num_prefill_workers
    shared = (*joined, "--cores-shared-by", str(num_all))
    answering = (*shared, "--role", "decode" if plan.num_prefill_workers else "both")
    prefilling = (*shared, "--role", "prefill")
    return [
        *_numbered("worker", plan.num_workers, answering),
        *_numbered("prefill", plan.num_prefill_workers, prefilling),
    ]


def _numbered(name: str, count: int, arguments: tuple[str, ...]) -> list[Service]:
    return [
        Service(name=f"{name}-{number}", module=WORKER, arguments=arguments)
        for number in range(1, count + 1)
    ]
