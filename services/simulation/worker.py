"""A worker under virtual time, and what can befall it."""

from __future__ import annotations

import asyncio

from router.fleet import Announced, Role
from services.core.settings import MeshConfig
from services.simulation.calls import Call, Fate
from services.simulation.core import Totals, VirtualCore
from services.simulation.feeds import Hub
from services.simulation.store import VirtualStore
from worker.engines.contract import EngineInfo
from worker.pool import BlockPool


class VirtualWorker:
    """Use it from a virtual loop. It lives until `die`, and again after `live`."""

    core_class = VirtualCore

    def __init__(
        self,
        name: str,
        config: MeshConfig,
        *,
        hop_s: float,
        role: Role = Role.BOTH,
        store: VirtualStore | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.store = store
        self.address = f"{name}:7000" if store is None else f"{store.host}:{name}"
        self.totals = Totals()
        self._config = config
        self._hop_s = hop_s
        self._loop = asyncio.get_running_loop()
        self._slowness = 1.0
        self._num_lives = 0
        self.live()

    @property
    def info(self) -> EngineInfo:
        return self._core.info

    @property
    def hub(self) -> Hub:
        """What it tells, in this life."""
        return self._core.hub

    @property
    def announced(self) -> Announced:
        """As membership tells of it."""
        return Announced(
            id=self.hub.holder_id,
            address=self.address,
            ready=self.is_alive,
            num_slots=self.info.num_slots,
            max_context_tokens=self.info.max_context_tokens,
            role=self.role,
            fingerprint=self.info.fingerprint.hex(),
            num_blocks=self.info.num_blocks,
        )

    @property
    def pool(self) -> BlockPool:
        """Of this life."""
        return self._core.pool

    def live(self) -> None:
        """Start, with an empty cache, as somebody else at the same address."""
        self._num_lives += 1
        self.is_alive = True
        self._core = self.core_class(
            self._config,
            self.totals,
            holder_id=f"{self.name}-{self._num_lives}",
            store=self.store,
            hop_s=self._hop_s,
        )
        self._core.slow_down(self._slowness)

    def die(self) -> None:
        """Who called hears it a hop later."""
        self.is_alive = False
        self._core.stop()

    def slow_down(self, factor: float) -> None:
        """Steps that begin from now on last so many times as long."""
        self._slowness = factor
        self._core.slow_down(factor)

    def submit(self, call: Call) -> None:
        """A request arrives."""
        if call.is_cancelled:
            return
        most = self.info.num_slots + self._config.worker.max_waiting
        if not self.is_alive:
            self._loop.call_later(self._hop_s, call.end, Fate.LOST)
        elif self._core.num_calls >= most:
            self._loop.call_later(self._hop_s, call.end, Fate.REFUSED)
        else:
            self._core.submit(call)

    def cancel(self, call: Call) -> None:
        """Its caller is gone."""
        call.is_cancelled = True
        self._core.cancel(call)

    def check_idle(self) -> None:
        """For when no request is left: every count is zero."""
        if self.is_alive:
            self._core.check_idle()
