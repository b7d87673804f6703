"""What the doctor says: causes, with the evidence for each."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NOT_ENOUGH = "not enough evidence"


class Cause(enum.StrEnum):
    """Why a first token is late, or costs more than it must."""

    IDLE_ENGINE_BEHIND_QUEUE = "idle_engine_behind_queue"
    LONG_PREFILL_FROM_MISSES = "long_prefill_from_misses"
    INTERFERENCE = "prefill_decode_interference"
    LONG_PROMPTS_SQUEEZE = "long_prompts_squeeze"
    KV_CACHE_TOO_SMALL = "kv_cache_too_small"
    KV_CACHE_TOO_LARGE = "kv_cache_too_large"
    NONCE_IN_PREFIX = "nonce_in_prefix"
    LOOP_LAG = "loop_lag"
    L2_SLOWER_THAN_RECOMPUTE = "l2_slower_than_recompute"
    SPECULATION_DOES_NOT_PAY = "speculation_does_not_pay"
    COLD_START = "cold_start"
    SKEWED_ROUTING = "skewed_routing"
    WRONG_PD_RATIO = "wrong_pd_ratio"
    QUALITY_DRIFT = "quality_drift"
    MEMORY_BOUND_DECODE = "memory_bound_decode"
    COSTLY = "healthy_but_costly"
    # Found on the way to those.
    SLOW_WORKER = "slow_worker"
    STALE_ROUTER_KNOWLEDGE = "stale_router_knowledge"
    SLOW_PREPROCESS = "slow_preprocess"
    SLOW_NETWORK = "slow_network"
    OVERLOADED = "overloaded"


class Severity(enum.StrEnum):
    CRITICAL = "critical"
    WARNING = "warning"


class Evidence(NamedTuple):
    """One figure, as people read it, and from where on it counts ("": it explains)."""

    name: str
    value: str
    threshold: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    cause: Cause
    # One sentence, with the figure that matters most.
    summary: str
    # Of the mean time to the first token. 0: it costs something else.
    explains_s: float = 0.0
    # Of the mean TTFT, or of what else it costs; 1 is all of it.
    share: float
    evidence: tuple[Evidence, ...]
    # Requests that show it, the worst first.
    trace_ids: tuple[str, ...] = ()
    # What to change, from what to what. "": nothing in the configuration.
    setting: str = ""
    before: Any = None
    after: Any = None
    # What that should bring.
    expected: str = NOT_ENOUGH

    @property
    def severity(self) -> Severity:
        is_late = self.explains_s > 0 and self.share >= 0.5
        return Severity.CRITICAL if is_late else Severity.WARNING

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "cause": self.cause.value,
            "severity": self.severity.value,
            "summary": self.summary,
            "explains_ms": round(self.explains_s * 1e3, 3),
            "share": round(self.share, 4),
            "evidence": [each._asdict() for each in self.evidence],
            "trace_ids": list(self.trace_ids),
            "setting": self.setting,
            "before": self.before,
            "after": self.after,
            "expected": self.expected,
        }


class Undecided(NamedTuple):
    """A cause that can be neither named nor ruled out."""

    cause: Cause
    # What would decide it.
    needs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VolatileSpan:
    """Text that changes from request to request and breaks the prefix behind it."""

    # "a time stamp in message 1, characters 17 to 36"
    description: str
    trace_ids: tuple[str, ...]
    # Prompt tokens that would be found in a cache without it.
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clues:
    """What the prompts' own blocks tell. None: nobody looked."""

    spans: tuple[VolatileSpan, ...] | None = None
    # By trace id: tokens that had been cached where the request ran, and were evicted.
    evicted_tokens: Mapping[str, int] | None = None
    # By trace id: tokens that had been computed before, anywhere, and were computed again.
    recomputed_tokens: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    # The most TTFT explained first.
    findings: tuple[Finding, ...]
    undecided: tuple[Undecided, ...] = ()
    num_requests: int = field(default=0)

    def plain(self) -> dict[str, Any]:
        return {
            "healthy": not self.findings,
            "requests": self.num_requests,
            "findings": [finding.plain() for finding in self.findings],
            "undecided": [
                {"cause": each.cause.value, "needs": each.needs} for each in self.undecided
            ],
        }
