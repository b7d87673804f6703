"""All that a router has of the mesh, at the service of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from firsttoken.control.v1 import control_pb2
from router.account import HOP_NAME
from router.checks import Bounds
from router.dispatch import Dispatcher
from router.knowledge import AnnouncedStore
from router.limits import Lease, TenantLimits
from router.outcome import Outcome
from router.plan_following import Direct, Following
from router.plans import Plans
from router.recording import Recorder
from router.reports import Tier
from router.roster import Roster, Store, Tokenizer, read_members
from router.telling import Telling
from router.tokenizers import Tokenizers
from router.watching import Holder, Watching
from services.core import attributes as names
from services.core.config import Snapshot
from services.core.errors import Overloaded
from services.core.ledger import Ledger, Segment
from services.core.tenants import Tenant, Tenants
from services.core.tickets import KeyMemory, KeyRing
from services.runtime import tickets
from services.runtime.channels import Channels
from services.runtime.identity import CallBounds
from services.runtime.interceptor import Context
from services.runtime.protocol import tell_ledger
from services.runtime.reporter import Reporter
from services.runtime.telemetry import TraceContext

_lease: ContextVar[Lease] = ContextVar("lease")


class Mesh:
    """Configuration and membership, each swapped whole when control pushes another."""

    def __init__(
        self,
        snapshot: Snapshot,
        channels: Channels,
        reporter: Reporter,
        *,
        router_id: str = "",
        ticket_keys: Callable[[], KeyRing] = KeyRing,
        has_tls: bool = False,
    ) -> None:
        self.snapshot = snapshot
        self.router_id = router_id
        self._told_keys = ticket_keys
        self._key_memory = KeyMemory()
        self.has_tls = has_tls
        self.tenants = Tenants(snapshot.config)
        self.limits = TenantLimits(snapshot.config.tenants, time.monotonic())
        self.channels = channels
        self.reporter = reporter
        self.dispatcher = Dispatcher(snapshot)
        # To be entered by whoever makes this.
        self.watching = Watching(self.dispatcher, channels)
        self.recorder = Recorder(router_id)
        self.recorder.configure(snapshot)
        self.telling = Telling()
        self.tokenizers = Tokenizers(channels)
        self.tokenizers.embedded.configure(snapshot.config)
        self.plans = Plans()
        # To be entered by whoever makes this.
        self.following = Following(self.plans, channels, router_id)
        self.roster = Roster("", (), ())
        # Of every request, as things are.
        self.bounds = self._find_bounds()
        # Ids and addresses of those to whom a channel may be open.
        self._peers: set[tuple[str, str]] = set()

    def configure(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.tenants = Tenants(snapshot.config)
        self.limits.configure(snapshot.config.tenants, time.monotonic())
        self.dispatcher.configure(snapshot)
        self.recorder.configure(snapshot)
        self.tokenizers.embedded.configure(snapshot.config)
        self.bounds = self._find_bounds()
        self._watch()

    def update_members(self, members: Sequence[control_pb2.Member]) -> None:
        self.telling.update_observers(
            member.id for member in members if member.role == control_pb2.MEMBER_ROLE_OBSERVER
        )
        self.roster = read_members(members)
        self.tokenizers.update(self.roster.tokenizers)
        self.dispatcher.update_workers(self.roster.workers)
        self.recorder.update_workers(self.roster.workers)
        self.dispatcher.update_stores(
            AnnouncedStore(store.id, store.host) for store in self.roster.stores
        )
        self.bounds = self._find_bounds()
        self._watch()
        self._follow()
        self._drop_channels()

    @property
    def call_bounds(self) -> CallBounds:
        settings = self.snapshot.config.router
        return CallBounds(settings.max_deadline_s, settings.request_timeout_s)

    def ticket_keys(self) -> KeyRing:
        """Also those of plans that may still come back: control may have been restarted, and has
        other keys since, or changes them more often than answers end.
        """
        kept_s = self.snapshot.config.router.max_deadline_s + tickets.LIFETIME_S
        return self._key_memory.recall(self._told_keys(), time.monotonic(), kept_s)

    def admit(self, tenant: Tenant) -> Lease:
        """To hold while a call of the tenant lasts. Raises Overloaded."""
        lease = self.limits.enter(tenant.name, time.monotonic())
        _lease.set(lease)
        return lease

    def refund(self) -> None:
        """The call that this task serves is none that counts."""
        _lease.get().refund()

    def keep_lease(self) -> Lease:
        """Of the call that this task serves: to hold also when the call has ended."""
        return _lease.get().move()

    def refused(self, context: Context, tenant: Tenant, error: Overloaded, since_s: float) -> None:
        """A request all the same: it has a ledger, and the observer hears of it."""
        ledger, now_s = Ledger(since_s), time.monotonic()
        ledger.spend(Segment.PREPROCESS, now_s - since_s)
        ledger.mark_failure(now_s)
        tell_ledger(context, ledger)
        trace = TraceContext.from_metadata(context.invocation_metadata())
        sampled = self.reporter.decide(trace, self.snapshot.config.telemetry.sample_ratio)
        self.reporter.record_request(
            HOP_NAME,
            trace.child(sampled=sampled),
            trace.span_id,
            ledger,
            {
                names.MODEL: self.roster.model,
                names.GENERATION: self.snapshot.generation,
                names.TENANT: tenant.name,
                names.ERROR_TYPE: error.reason,
            },
            error=error.message,
        )

    def _find_bounds(self) -> Bounds:
        config = self.snapshot.config
        return Bounds(
            model=self.roster.model,
            max_context_tokens=(
                self.dispatcher.max_context_tokens or config.worker.max_context_tokens
            ),
            max_text_bytes=config.tokenizer.max_text_bytes,
        )

    def record(self, outcome: Outcome, ledger: Ledger, error: str) -> None:
        """`error`: its status or reason; empty when all went well."""
        if not self.recorder.active:
            return
        decision = outcome.decision(
            ledger,
            strategy=self.snapshot.config.router.routing_strategy,
            generation=self.snapshot.generation,
            error=error,
        )
        self.recorder.record(decision)

    async def close(self) -> None:
        self.plans.close()
        self.dispatcher.close()
        await self.tokenizers.embedded.close()
        await self.recorder.close()

    def _watch(self) -> None:
        """Those who hold KV blocks, while somebody asks where they are."""
        holders: list[Holder] = []
        if self.snapshot.config.router.routing_strategy == "kv_aware":
            ready = (worker for worker in self.roster.workers if worker.ready)
            holders += (Holder(worker.id, worker.address, Tier.WORKER) for worker in ready)
            holders += (Holder(each.id, each.address, Tier.NODE) for each in self.roster.stores)
        self.watching.follow(holders)

    def _follow(self) -> None:
        """Also those that drain: what they have is still to be told."""
        self.following.follow(
            Direct(worker.id, worker.address, worker.direct_address)
            for worker in self.roster.workers
            if worker.direct_address
        )

    def _drop_channels(self) -> None:
        """Close those whose peer has left, so that a successor at its address starts afresh."""
        # A worker that has left and still answers requests is among the dispatcher's.
        workers = (worker.announced for worker in self.dispatcher.workers)
        peers = {(worker.id, worker.address) for worker in workers}
        others: tuple[Tokenizer | Store, ...] = (*self.roster.tokenizers, *self.roster.stores)
        peers |= {(each.id, each.address) for each in others}
        kept = {address for _, address in self._peers & peers}
        for _, address in self._peers - peers:
            if address not in kept:
                self.channels.drop(address)
        self._peers = peers
