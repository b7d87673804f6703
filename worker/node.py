"""A worker as a process: control stream, engine, gRPC server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from firsttoken.control.v1 import control_pb2
from services.core.metrics import Sample
from services.models.catalog import find_model
from services.models.loading import load_vocabulary
from services.runtime.channel_pool import PoolSize
from services.runtime.channels import Channels
from services.runtime.identity import CallerInterceptor
from services.runtime.local_sockets import local_address_for
from services.runtime.membership import ControlClient
from services.runtime.reporter import Reporter
from services.runtime.resource import Resource
from services.runtime.server import MeshServer
from services.runtime.sharing import MemoryServer
from services.runtime.startup import parse_listen, require_named
from services.runtime.tls import Tls
from worker import direct, metrics
from worker.copying import Copier
from worker.engines.contract import EngineInfo
from worker.front import EngineFront
from worker.handoff import Handoffs
from worker.messages import CoreLoad
from worker.own_settings import with_own
from worker.peers import PeerMemory, describe
from worker.plan_reports import PlanReports
from worker.planned import PlannedAnswers
from worker.roles import Role as Role
from worker.service import WorkerServicer
from worker.sources import KvSources
from worker.tickets import TicketDesk
from worker.tier import KvTier, TierStats
from worker.wire import SERVICE_NAME

DRAIN_GRACE_S = 5.0
STOP_GRACE_S = 1.0


class WorkerNode(Resource):
    """Enter it: the engine is loaded, the server answers, the mesh may send requests.

    Leave it: what runs is finished, for DRAIN_GRACE_S at most. `cores_shared_by`:
    how many workers share this machine's cores. `own_settings`: as in `with_own`.
    """

    def __init__(
        self,
        *,
        control: str,
        listen: str = "127.0.0.1:0",
        cores_shared_by: int = 1,
        role: Role = Role.BOTH,
        tls: Tls | None = None,
        direct_listen: str = "",
        own_settings: Mapping[str, Any] | None = None,
    ) -> None:
        require_named("--listen", listen)
        if direct_listen:
            require_named("--direct-listen", direct_listen)
        self._own_settings = own_settings or {}
        self.role = role
        self._direct_listen = direct_listen
        self._tls = tls
        self._control_address = control
        self._listen = listen
        self._cores_shared_by = cores_shared_by
        self.id = f"worker-{uuid.uuid4().hex[:8]}"
        self.address = ""
        self._desk = TicketDesk(self.id)
        self._plans = PlannedAnswers(
            self._desk, PlanReports(), keys=lambda: self._control.ticket_keys
        )
        self._draining = False

    async def _open(self, stack: AsyncExitStack) -> None:
        self._control = await stack.enter_async_context(
            ControlClient(
                self._control_address,
                control_pb2.Member(
                    id=self.id,
                    role=control_pb2.MEMBER_ROLE_WORKER,
                    state=control_pb2.MEMBER_STATE_STARTING,
                    detail="loading the model",
                    pid=os.getpid(),
                ),
                tls=self._tls,
            )
        )
        config = with_own(self._control.snapshot.config, self._own_settings)
        self._front = await stack.enter_async_context(
            EngineFront(config, cores_shared_by=self._cores_shared_by, role=self.role)
        )
        reporter = await stack.enter_async_context(
            Reporter(service="worker", member_id=self.id, tls=self._tls)
        )
        reporter.follow(self._control)
        self._front.hub.on_evicted = lambda keys: reporter.evicted(self.id, keys)
        self._tier = await stack.enter_async_context(KvTier(self._front, self._control))
        copier = await stack.enter_async_context(Copier())
        sources = KvSources(await self._open_handoffs(stack, copier), self._tier)
        memory = MemoryServer(self._front.memory_fd, describe(self._front.arena.layout))
        await stack.enter_async_context(memory)
        servicer = self._servicer = self._make_servicer(reporter, sources, copier)
        self._server = MeshServer(
            self._listen,
            service_names=[SERVICE_NAME],
            tls=self._tls,
            local_address=local_address_for(self._control.snapshot.config.mesh),
        )
        servicer.add_to(self._server.server)
        await stack.enter_async_context(self._server)
        self._direct_server = self._make_direct_server(servicer)
        await stack.enter_async_context(self._direct_server)
        self._control.on_config(self._front.configure)
        self._front.on_core(self._report_core)
        self._front.on_bubble(reporter.bubble)
        reporter.watch(metrics.METRICS, self._read_metrics)
        self.address = self._server.address
        self._control.update(
            address=self.address,
            local_address=self._server.local_address,
            model=self._front.info.model,
            worker=_capacity(self._front.info, self.role),
            memory_socket=memory.name,
            direct_address=self._direct_server.address,
        )
        await self._server.set_serving(True)
        await self._direct_server.set_serving(True)
        self._control.update(state=control_pb2.MEMBER_STATE_READY, detail="")

    @property
    def load(self) -> CoreLoad:
        return self._front.hub.load

    @property
    def num_streams(self) -> int:
        return self._front.num_streams

    @property
    def tier(self) -> TierStats:
        return self._tier.stats

    @property
    def fingerprint(self) -> str:
        return self._front.info.fingerprint.hex()

    @property
    def is_idle(self) -> bool:
        """No request is here, and no block is on its way in."""
        inbox = self._front.inbox
        return not (self._front.num_streams or self._front.num_held) and (
            inbox.num_free == inbox.num_slots
        )

    async def close(self) -> None:
        # 1. Take nothing new; the routers hear it from control.
        self._report_draining()
        # 2. Finish what runs.
        await self._front.drain(DRAIN_GRACE_S)
        # 3. Stop the callers' server while the routers can still hear of it.
        await self._direct_server.stop(STOP_GRACE_S)
        # 4. End the streams of those who follow, which would otherwise hold the server open.
        self._front.hub.close()
        await self._plans.close()
        # 5. Stop the server, the engine and the control stream, in this order.
        await self._server.stop(STOP_GRACE_S)
        await super().close()

    async def _open_handoffs(self, stack: AsyncExitStack, copier: Copier) -> Handoffs:
        size = PoolSize.of(self._control.snapshot.config.mesh)
        channels = await stack.enter_async_context(Channels(self._tls, size=size))
        self._control.on_members(channels.learn)
        memory = PeerMemory()
        stack.callback(memory.close)
        return Handoffs(
            self._front,
            channels,
            memory,
            copier,
            find_member=self._find_member,
            settings=lambda: self._control.snapshot.config.worker,
            delays=lambda: self._control.snapshot.config.debug.delay_ms,
        )

    def _find_member(self, address: str) -> control_pb2.Member | None:
        found = (member for member in self._control.members if member.address == address)
        return next(found, None)

    def _make_direct_server(self, servicer: WorkerServicer) -> MeshServer:
        """For callers: on a free port of the same host, with one service."""
        server = MeshServer(
            self._direct_listen or f"{parse_listen(self._listen).host}:0",
            service_names=[direct.SERVICE_NAME],
            interceptors=[CallerInterceptor(direct.DirectEdge(lambda: self._control.snapshot))],
            reflection=False,
            tls=self._tls,
            for_callers=True,
        )
        direct.DirectServicer(servicer, self._plans).add_to(server.server)
        return server

    def _make_servicer(
        self, reporter: Reporter, sources: KvSources, copier: Copier
    ) -> WorkerServicer:
        config = self._control.snapshot.config
        return WorkerServicer(
            self._front,
            load_vocabulary(find_model(config.mesh.model)),
            worker_id=self.id,
            reporter=reporter,
            sources=sources,
            copier=copier,
            settings=lambda: self._control.snapshot.config.worker,
            delays=lambda: self._control.snapshot.config.debug.delay_ms,
            plans=self._plans,
            on_drain=self._report_draining,
        )

    def _read_metrics(self) -> Iterable[Sample]:
        front, inbox = self._front, self._front.inbox
        return metrics.read(
            metrics.Readings(
                load=front.hub.load,
                info=front.info,
                tier=self._tier.stats,
                read_costs=self._tier.read_costs,
                num_streams=front.num_streams,
                num_held=front.num_held,
                num_inbox_blocks=inbox.num_slots - inbox.num_free,
                handoffs_taken=self._servicer.handoffs.taken,
                handoffs_given=self._servicer.handoffs.given,
                num_plans=self._plans.reports.num_running,
                tickets_refused=self._desk.refused,
            )
        )

    def _report_draining(self) -> None:
        self._draining = True
        self._control.update(state=control_pb2.MEMBER_STATE_DRAINING, detail="draining")

    def _report_core(self, up: bool) -> None:
        """The engine core has died, or a new one has loaded its engine."""
        if self._draining:
            return
        state = control_pb2.MEMBER_STATE_READY if up else control_pb2.MEMBER_STATE_STARTING
        self._control.update(state=state, detail="" if up else "engine core restarting")


def _capacity(info: EngineInfo, role: Role) -> control_pb2.WorkerCapacity:
    return control_pb2.WorkerCapacity(
        engine=info.name,
        num_slots=info.num_slots,
        max_context_tokens=info.max_context_tokens,
        num_blocks=info.num_blocks,
        block_tokens=info.block_tokens,
        fingerprint=info.fingerprint.hex(),
        role=control_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.upper()}"),
        engine_transport=info.transport,
    )
