"""What one request is told of, to all who learn from it: dispatcher, record, observer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from firsttoken.common.v1 import common_pb2
from router.dispatch import Grant
from router.fleet import Worker
from router.outcome import Outcome
from services.core import attributes as names
from services.core.ledger import Ledger
from services.runtime.interceptor import Context
from services.runtime.telemetry import TraceContext

if TYPE_CHECKING:
    from router.mesh import Mesh

# Of every request's span here, and of a plan's that came to nothing: its client has come back
# with it, and that is the request.
HOP_NAME = "router.generate"
PLAN_HOP_NAME = "router.plan"


class Account:
    """Of one request, from its arrival on. `record` ends it."""

    def __init__(self, mesh: Mesh, context: Context) -> None:
        self.ledger = Ledger(time.monotonic())
        self.outcome = Outcome()
        self.outcome.deadline_s = context.time_remaining()
        self._mesh = mesh
        self._caller = TraceContext.from_metadata(context.invocation_metadata())
        sampled = mesh.reporter.decide(self._caller, mesh.snapshot.config.telemetry.sample_ratio)
        self.trace = self._caller.child(sampled=sampled)

    def tell(self, finished: common_pb2.Finished, grant: Grant) -> None:
        """The router's part of an answer's last message."""
        finished.trace_id = self.trace.trace_id
        finished.generation = grant.generation
        finished.worker_id = grant.slot.worker.announced.id
        finished.attempts = self.outcome.num_attempts
        finished.migrations = self.outcome.num_migrations
        finished.routing.CopyFrom(self.outcome.routing())

    def answered(self, grant: Grant) -> None:
        """The first token has come from its worker."""
        self._mesh.dispatcher.answered(grant.slot.worker)
        grant.first_token()

    def learn(self, finished: common_pb2.Finished, grant: Grant) -> None:
        """From a worker's last message: what the worker had itself, what came out of a KV store,
        and who computed the prompt.
        """
        usage, path = finished.usage, finished.kv_path
        self.outcome.finish(usage, time.monotonic())
        loaded_tokens = path.loaded_blocks * self.outcome.prompt.block_tokens
        grant.finished(
            cached_tokens=max(0, usage.cached_tokens - loaded_tokens),
            evaluated_tokens=usage.evaluated_prompt_tokens,
            loaded_blocks=path.loaded_blocks,
            load_s=path.load_ms / 1e3,
        )
        if grant.prefill is not None:
            self._learn_of_prefill(grant.prefill.worker, path)

    def record(self, error: str, code: str, ended_s: float | None = None) -> None:
        """It has ended, now by default; `code` is empty when all went well."""
        self._mesh.record(self.outcome, self.ledger, code)
        self._tell_observer(HOP_NAME, error, code, ended_s)

    def record_plan(self, error: str, code: str, ended_s: float) -> None:
        """It has ended, and another request goes on for it."""
        self._tell_observer(PLAN_HOP_NAME, error, code, ended_s)

    def _tell_observer(self, name: str, error: str, code: str, ended_s: float | None) -> None:
        reporter = self._mesh.reporter
        if not reporter.enabled:
            return
        reporter.record_request(
            name,
            self.trace,
            self._caller.span_id,
            self.ledger,
            {
                names.MODEL: self._mesh.roster.model,
                names.GENERATION: self._mesh.snapshot.generation,
                **({names.ERROR_TYPE: code} if code else {}),
                **self.outcome.attributes(self.ledger),
            },
            error=error,
            end_s=ended_s,
        )
        if self.outcome.prompt.num_tokens:
            told = self._mesh.telling.message(
                self.outcome.prompt,
                trace_id=self.trace.trace_id,
                span_id=self.trace.span_id,
                tenant=self.outcome.tenant,
                now_s=time.monotonic(),
            )
            reporter.prompt(told)

    def _learn_of_prefill(self, worker: Worker, path: common_pb2.KvPath) -> None:
        if path.prefill_failed:
            self._mesh.dispatcher.prefill_failed(worker)
        elif path.handed_off:
            self._mesh.dispatcher.prefilled(worker)
            path.prefill_worker_id = worker.announced.id
