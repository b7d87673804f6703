"""Keeps one service running."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import NoReturn

from services.cli.failures import CANNOT_START, Failure
from services.cli.logs import ServiceLog
from services.cli.process import STOP_TIMEOUT_S, NotReady, Process, Service
from services.cli.restarts import RestartPolicy


class Supervisor:
    """Starts a service, starts it again when it ends by itself, and stops it."""

    def __init__(
        self,
        service: Service,
        *,
        lifeline_fd: int,
        log: ServiceLog,
        report: Callable[[str], None],
        policy: RestartPolicy,
    ) -> None:
        self.service = service
        self.report = report
        self.address = ""
        # It has ended too often: nobody starts it again.
        self.given_up = False
        self._lifeline_fd = lifeline_fd
        self._log = log
        self._policy = policy
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Returns once the service serves. Raises Failure with the reason it gave itself."""
        try:
            await self._start()
        except NotReady as problem:
            # A service that cannot start says why, and begins with its own name.
            words = self._log.last_words
            if words.startswith(f"{self.service.module.rpartition('.')[2]}: "):
                raise Failure(words, exit_status=CANNOT_START) from None
            raise self._failure(str(problem)) from None

    async def keep_running(self) -> NoReturn:
        """Raises Failure when the service has ended too often."""
        while True:
            assert self._process is not None
            ending = await self._process.wait()
            delay_s = self._policy.crashed(time.monotonic())
            if delay_s is None:
                self.given_up = True
                raise self._failure(f"ended too often ({ending})")
            self.report(f"ended ({ending}); starts again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            with contextlib.suppress(NotReady):  # the next turn counts it
                await self._start()
                self.report(f"is back on {self.address}")

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """May be called twice. What has not ended after `timeout_s` is killed."""
        if self._process is not None:
            await self._process.stop(timeout_s)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _start(self) -> None:
        service = self.service
        if self.address and service.keeps_address:
            service = dataclasses.replace(service, listen=self.address)
        self._process = await Process.start(
            service, lifeline_fd=self._lifeline_fd, on_line=self._log.write
        )
        self.address = await self._process.ready()

    def _failure(self, problem: str) -> Failure:
        words = self._log.last_words
        said = f"; it said: {words}" if words else ""
        return Failure(f"{self.service.name}: {problem}{said}", exit_status=CANNOT_START)
