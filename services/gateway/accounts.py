"""What an answer cost: tokens, and where the time to its first token went. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from firsttoken.common.v1 import common_pb2
from services.core.ledger import Ledger, Segment


class Usage(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def add_usage(usages: Sequence[common_pb2.Usage], num_choices: int) -> Usage:
    """Of all answers of a request, `num_choices` side by side to each prompt.

    A prompt counts once. Its cached tokens are those of the answer that found the fewest:
    the others found what that one had just computed.
    """
    prompts = [usages[at : at + num_choices] for at in range(0, len(usages), num_choices)]
    return Usage(
        sum(answers[0].prompt_tokens for answers in prompts),
        sum(min(each.cached_tokens for each in answers) for answers in prompts),
        sum(each.completion_tokens for each in usages),
    )


def ledger_json(ledger: Ledger) -> dict[str, float]:
    spent = {f"{segment}_ms": _ms(ledger.spent_s(segment)) for segment in Segment}
    return {**spent, "residual_ms": _ms(ledger.residual_s), "total_ms": _ms(ledger.total_s)}


def server_timing(ledger: Ledger) -> str:
    """https://www.w3.org/TR/server-timing/; of a failed request, the time until then, or until the
    mesh had a first token.
    """
    spent = [f"{segment};dur={_ms(ledger.spent_s(segment))}" for segment in Segment]
    residual = f"residual;dur={_ms(ledger.residual_s)}"
    total = "total" if ledger.first_token_s is None else "ttft"
    return ", ".join([*spent, residual, f"{total};dur={_ms(ledger.total_s)}"])


def journey_json(index: int, ledger: Ledger, finished: common_pb2.Finished) -> dict[str, Any]:
    """The way of one answer through the mesh."""
    return {
        "index": index,
        "ledger": ledger_json(ledger),
        "hidden": {f"{name}_ms": _ms(spent_s) for name, spent_s in ledger.hidden_s.items()},
        "trace_id": finished.trace_id,
        "generation": finished.generation,
        "worker_id": finished.worker_id,
        "engine": finished.engine,
        "attempts": finished.attempts,
        "migrations": finished.migrations,
        "handoff_ms": _ms(finished.handoff_ms / 1000),
        "evaluated_prompt_tokens": finished.usage.evaluated_prompt_tokens,
        "kv_path": finished.kv_path.reason,
        "routing": _routing_json(finished.routing),
    }


def _routing_json(routing: common_pb2.Routing) -> dict[str, Any]:
    is_predicted = routing.HasField("predicted_cached_tokens")
    return {
        "strategy": routing.strategy,
        "predicted_cached_tokens": routing.predicted_cached_tokens if is_predicted else None,
        "candidates": routing.candidates,
        "reason": routing.reason,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
