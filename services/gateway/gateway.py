"""All that a gateway has of the mesh, at the service of its requests."""

from __future__ import annotations

import time
from collections.abc import Iterable

from firsttoken._workers import WorkerChannels
from firsttoken.control.v1 import control_pb2
from services.core.config import Snapshot
from services.core.errors import MeshError
from services.core.settings import GatewaySettings
from services.core.tenants import ANYBODY, Tenant, Tenants
from services.gateway.errors import from_core
from services.gateway.exchange import Exchange
from services.gateway.metrics import Metrics
from services.gateway.served import Served
from services.gateway.server import HttpServer
from services.gateway.upstream import Routers, read_members
from services.runtime.channels import Channels
from services.runtime.identity import identify
from services.runtime.reporter import Reporter
from services.runtime.telemetry import TraceContext


class Gateway:
    """Configuration and membership, each swapped whole when control pushes another."""

    def __init__(
        self,
        snapshot: Snapshot,
        served: Served,
        channels: Channels,
        workers: WorkerChannels,
        reporter: Reporter,
    ) -> None:
        self.served = served
        self.started_unix_s = int(time.time())
        self.reporter = reporter
        self.routers = Routers(channels, workers)
        self.members = read_members((), served.model)
        self.metrics = Metrics()
        self.metrics.watch("mesh_calls_in_flight", lambda: self.routers.num_calls)
        self.metrics.watch("ready", lambda: not self.problem)
        # It takes no new requests.
        self.is_draining = False
        self.configure(snapshot)

    def configure(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._tenants = Tenants(snapshot.config)

    def update_members(self, members: Iterable[control_pb2.Member]) -> None:
        self.members = read_members(members, self.served.model)
        self.routers.update(self.members.routers)
        # While there is no worker, what was true of the last ones.
        if most := self.members.max_context_tokens:
            self.served = self.served._replace(max_context_tokens=most)

    def watch_server(self, server: HttpServer) -> None:
        self.metrics.watch("connections", lambda: server.num_connections)

    def drain(self) -> None:
        """From now on it is not ready."""
        self.is_draining = True

    @property
    def settings(self) -> GatewaySettings:
        return self.snapshot.config.gateway

    @property
    def problem(self) -> str:
        """Why it cannot serve; "" when it can."""
        if self.is_draining:
            return "the gateway is stopping"
        if not self.members.routers:
            return "no router is ready"
        return "" if self.members.num_workers else "no worker is ready"

    def samples(self, caller: TraceContext) -> bool:
        return self.reporter.decide(caller, self.snapshot.config.telemetry.sample_ratio)

    def may_fetch(self, tenant: Tenant) -> bool:
        """Answers past the router. Where a tenant has limits, that one counts."""
        limited = tenant.settings.max_concurrent or tenant.settings.requests_per_s
        return self.settings.direct and not limited

    def authorize(self, exchange: Exchange) -> Tenant:
        """Raises ApiError for a caller that is nobody's. The router asks once more."""
        if not self._tenants.required:
            return ANYBODY
        try:
            return identify(self._tenants, exchange.credentials(), ())
        except MeshError as error:
            raise from_core(error) from None
