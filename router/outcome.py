"""What became of one request in the router: for its client, its trace and the record."""

from __future__ import annotations

from firsttoken.common.v1 import common_pb2
from router.decisions import Decision
from router.dispatch import Grant
from router.prompt import Choice, Prompt
from services.core import attributes as names
from services.core.ledger import Ledger, Segment
from services.runtime.telemetry import Attributes

# Of a request that came to no prompt.
_NOTHING = Prompt(b"", b"", 1)
_WORK = (Segment.QUEUE, Segment.PREFILL_QUEUE, Segment.KV_LOAD, Segment.PREFILL)


class Outcome:
    """Filled in while the request runs. Times are time.monotonic()."""

    def __init__(self) -> None:
        self.tenant = ""
        self.request_class = ""
        # From its arrival on; None: there is none.
        self.deadline_s: float | None = None
        self.prompt = _NOTHING
        # Workers tried before one gave the first token, and those that died after it.
        self.num_attempts = 0
        self.num_migrations = 0
        # Its client calls the worker itself.
        self.is_direct = False
        self.choice: Choice | None = None
        self._strategy = ""
        self._generation = 0
        self._queue_position = 0
        self._usage: common_pb2.Usage | None = None
        self._finished_s = 0.0

    @property
    def worker_id(self) -> str:
        return self.choice.worker.announced.id if self.choice else ""

    def choose(self, grant: Grant, strategy: str) -> None:
        """A worker is to be called; it may not be the first."""
        self.choice = grant.choice
        self._strategy = strategy
        self._generation = grant.generation
        self._queue_position = grant.queue_position

    def finish(self, usage: common_pb2.Usage, now_s: float) -> None:
        self._usage = usage
        self._finished_s = now_s

    def routing(self) -> common_pb2.Routing:
        assert self.choice is not None
        return common_pb2.Routing(
            strategy=self._strategy,
            predicted_cached_tokens=self.choice.predicted_tokens,
            candidates=self.choice.num_candidates,
            reason=self.choice.reason,
        )

    def attributes(self, ledger: Ledger) -> Attributes:
        """Of the request's span."""
        found: dict[str, str | bool | int | float] = {
            names.TENANT: self.tenant,
            names.REQUEST_CLASS: self.request_class,
            names.WORKER_ID: self.worker_id,
            names.ATTEMPTS: self.num_attempts,
            names.MIGRATIONS: self.num_migrations,
            names.DIRECT: self.is_direct,
            names.INPUT_TOKENS: self.prompt.num_tokens,
        }
        if self.choice is not None:
            found |= {
                # Later ones had no part in its time to the first token.
                names.GENERATION: self._generation,
                names.QUEUE_POSITION: self._queue_position,
                names.STRATEGY: self._strategy,
                names.CANDIDATES: self.choice.num_candidates,
                names.ROUTING_REASON: self.choice.reason,
            }
            if self.choice.predicted_tokens is not None:
                found[names.PREDICTED_TOKENS] = self.choice.predicted_tokens
                found[names.BEST_ELSEWHERE_TOKENS] = self.choice.best_elsewhere_tokens
                found[names.ROUTING_COST_S] = self.choice.cost_s
        if self._usage is not None:
            found[names.OUTPUT_TOKENS] = self._usage.completion_tokens
            found[names.CACHED_TOKENS] = self._usage.cached_tokens
            found[names.ACTUAL_TOKENS] = self._usage.cached_tokens
            found[names.EVALUATED_TOKENS] = self._usage.evaluated_prompt_tokens
        if (tpot_s := self._tpot_s(ledger)) is not None:
            found[names.TPOT_MS] = tpot_s * 1e3
        return found

    def _tpot_s(self, ledger: Ledger) -> float | None:
        num_after = self._usage.completion_tokens - 1 if self._usage else 0
        if ledger.first_token_s is None or num_after <= 0:
            return None
        return (self._finished_s - ledger.first_token_s) / num_after

    def decision(self, ledger: Ledger, *, strategy: str, generation: int, error: str) -> Decision:
        """`strategy` and `generation`: now, for a request that no worker was chosen for."""
        usage = self._usage
        return Decision(
            arrived_s=ledger.arrived_s,
            prefix_keys=self.prompt.prefix_keys,
            prompt_tokens=self.prompt.num_tokens,
            output_tokens=usage.completion_tokens if usage else 0,
            request_class=self.request_class,
            deadline_s=self.deadline_s,
            tenant=self.tenant,
            strategy=self._strategy or strategy,
            generation=self._generation or generation,
            choice=self.choice,
            attempts=self.num_attempts,
            migrations=self.num_migrations,
            queue_s=ledger.spent_s(Segment.QUEUE),
            ttft_s=None if ledger.first_token_s is None else ledger.total_s,
            tpot_s=self._tpot_s(ledger),
            cached_tokens=usage.cached_tokens if usage else None,
            evaluated_tokens=usage.evaluated_prompt_tokens if usage else None,
            prefill_s=ledger.spent_s(Segment.PREFILL) if usage else None,
            overhead_s=_overhead_s(ledger) if usage else None,
            error=error,
        )


def _overhead_s(ledger: Ledger) -> float:
    """Of the time to the first token, what neither waiting nor an engine took."""
    return max(0.0, ledger.total_s - sum(map(ledger.spent_s, _WORK)))
