"""Plans that are given out: planned, started, ended, expired. Each holds a worker's slot.

What becomes of them, the workers tell (`plan_following`). A plan that nobody begins expires; one
whose worker is gone has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2
from router.account import Account
from router.dispatch import Grant
from services.runtime import tickets
from services.runtime.protocol import spend_callee

# What a worker has begun may be told that much later.
EXPIRY_GRACE_S = 0.25
# Until what ran at a worker that nothing is heard of has ended.
DEAF_S = 5.0
# The worker may tell that a plan has failed before its client has come back with it, which
# makes it no request of its own. Shorter than the observer waits for a trace's other hops.
RESUMPTION_GRACE_S = 0.5


@dataclass(slots=True)
class PlanCounts:
    """Since the router's start. Each plan is in `planned`, and in one of the others in the end."""

    planned: int = 0
    answered: int = 0
    failed: int = 0
    expired: int = 0
    lost: int = 0

    @property
    def ended(self) -> dict[str, int]:
        outcomes = asdict(self)
        del outcomes["planned"]
        return outcomes


class OpenPlan:
    """From a plan's ticket to its end. `planned_s`: when it was made, on the monotonic clock."""

    def __init__(
        self,
        plan: direct_pb2.Plan,
        grant: Grant,
        account: Account,
        lease: AbstractContextManager[object],
        planned_s: float,
    ) -> None:
        self.id = plan.id
        self.worker_id = plan.worker_id
        self.has_started = False
        # Its client has come back with it: that request is the one to be told of.
        self.is_resumed = False
        self.timer: asyncio.TimerHandle | None = None
        self._grant = grant
        self._account = account
        self._lease = lease
        self._planned_s = planned_s
        self._has_token = False
        # How it ended, and when.
        self._error, self._code, self._ended_s = "", "", 0.0

    def first_token(self, ledger: common_pb2.Ledger) -> None:
        if not self._has_token:
            self._has_token = True
            self._account.ledger.mark_first_token(self._spend(ledger))
            self._account.answered(self._grant)

    def finish(self, finished: common_pb2.Finished) -> None:
        self.first_token(finished.ledger)
        self._account.learn(finished, self._grant)
        self._end("", "")

    def fail(self, error: str, code: str, ledger: common_pb2.Ledger | None = None) -> None:
        if not self._has_token:
            failed_s = self._planned_s if ledger is None else self._spend(ledger)
            self._account.ledger.mark_failure(failed_s)
        self._end(error, code)

    def record(self) -> None:
        """Once it has ended."""
        record = self._account.record_plan if self.is_resumed else self._account.record
        record(self._error, self._code, self._ended_s)

    def _spend(self, told: common_pb2.Ledger) -> float:
        """Returns when that was over. The client's way to the worker is the client's to tell."""
        spent_s = told.total_ms / 1e3
        spend_callee(self._account.ledger, told, seen_s=spent_s)
        return self._planned_s + spent_s

    def _end(self, error: str, code: str) -> None:
        self._error, self._code, self._ended_s = error, code, time.monotonic()
        self._grant.release()
        with self._lease:
            pass


class Plans:
    def __init__(self) -> None:
        self.counts = PlanCounts()
        self._open: dict[bytes, OpenPlan] = {}
        # Failed, and not recorded yet.
        self._failed: dict[bytes, OpenPlan] = {}
        # Of each worker that tells: where callers reach it.
        self._addresses: dict[str, str] = {}
        self._deaf: dict[str, asyncio.TimerHandle] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def address_of(self, worker_id: str) -> str:
        """Of the worker's port for callers; "" while it does not tell what becomes of plans."""
        return self._addresses.get(worker_id, "")

    def add(self, plan: OpenPlan) -> None:
        self.counts.planned += 1
        self._open[plan.id] = plan
        patience_s = tickets.LIFETIME_S + EXPIRY_GRACE_S
        plan.timer = asyncio.get_running_loop().call_later(patience_s, self._expire, plan)

    def resumed(self, plan_id: bytes) -> None:
        """The client has come back with it."""
        plan = self._open.get(plan_id) or self._failed.get(plan_id)
        if plan is not None:
            plan.is_resumed = True
            self._record_failed(plan)

    def hear(self, worker_id: str, address: str, message: worker_pb2.FollowPlansResponse) -> None:
        self._addresses[worker_id] = address
        if (timer := self._deaf.pop(worker_id, None)) is not None:
            timer.cancel()
        for event in message.events:
            plan = self._open.get(event.id)
            if plan is not None and plan.worker_id == worker_id:
                self._hear_of(plan, event)
        if message.HasField("running"):
            self._compare(worker_id, message.running)

    def deaf(self, worker_id: str) -> None:
        """Nothing more comes from it for now."""
        if self._addresses.pop(worker_id, None) is not None:
            loop = asyncio.get_running_loop()
            self._deaf[worker_id] = loop.call_later(DEAF_S, self.gone, worker_id)

    def gone(self, worker_id: str) -> None:
        """It has left, or nothing has been heard of it for long."""
        self._addresses.pop(worker_id, None)
        if (timer := self._deaf.pop(worker_id, None)) is not None:
            timer.cancel()
        for plan in self._at(worker_id, lambda plan: plan.has_started):
            self._lose(plan)

    def close(self) -> None:
        """The router stops: nobody will be told any more."""
        for worker_id in [*self._deaf]:
            self.gone(worker_id)
        for plan in [*self._open.values()]:
            self._lose(plan)
        for plan in [*self._failed.values()]:
            self._record_failed(plan)

    def check_idle(self) -> None:
        assert not self._open, f"{len(self._open)} plans are open"

    def _hear_of(self, plan: OpenPlan, event: worker_pb2.PlanEvent) -> None:
        self._start(plan)
        match event.WhichOneof("event"):
            case "first_token":
                plan.first_token(event.first_token.ledger)
            case "ended":
                self._end(plan, event.ended)

    def _start(self, plan: OpenPlan) -> None:
        if not plan.has_started:
            plan.has_started = True
            assert plan.timer is not None
            plan.timer.cancel()

    def _end(self, plan: OpenPlan, ended: worker_pb2.PlanEnded) -> None:
        del self._open[plan.id]
        if ended.HasField("finished"):
            self.counts.answered += 1
            plan.finish(ended.finished)
            plan.record()
        elif ended.error_reason == tickets.EXPIRED:
            self.counts.expired += 1
            plan.fail(ended.error, ended.error_reason)
            plan.record()
        else:
            self.counts.failed += 1
            ledger = ended.ledger if ended.HasField("ledger") else None
            plan.fail(ended.error, ended.error_reason or "UNKNOWN", ledger)
            self._await_client(plan)

    def _compare(self, worker_id: str, running: worker_pb2.PlansRunning) -> None:
        """What has begun, or ended, while nobody heard it."""
        ids = set(running.ids)
        for plan in self._at(worker_id, lambda plan: plan.id in ids):
            self._start(plan)
        for plan in self._at(worker_id, lambda plan: plan.has_started and plan.id not in ids):
            self._lose(plan)

    def _at(self, worker_id: str, fits: Callable[[OpenPlan], bool]) -> list[OpenPlan]:
        plans: Mapping[bytes, OpenPlan] = self._open
        return [plan for plan in plans.values() if plan.worker_id == worker_id and fits(plan)]

    def _expire(self, plan: OpenPlan) -> None:
        self.counts.expired += 1
        del self._open[plan.id]
        plan.fail("the client did not come to the worker", tickets.EXPIRED)
        plan.record()

    def _lose(self, plan: OpenPlan) -> None:
        self.counts.lost += 1
        del self._open[plan.id]
        if plan.timer is not None:
            plan.timer.cancel()
        plan.fail("what became of it, its worker can no longer say", "PLAN_LOST")
        self._await_client(plan)

    def _await_client(self, plan: OpenPlan) -> None:
        """Whether it comes back."""
        if plan.is_resumed:
            plan.record()
            return
        self._failed[plan.id] = plan
        loop = asyncio.get_running_loop()
        plan.timer = loop.call_later(RESUMPTION_GRACE_S, self._record_failed, plan)

    def _record_failed(self, plan: OpenPlan) -> None:
        if self._failed.pop(plan.id, None) is not None:
            if plan.timer is not None:
                plan.timer.cancel()
            plan.record()
