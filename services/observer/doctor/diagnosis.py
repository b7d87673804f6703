"""From a window to what is wrong in it: every rule is asked, the specific ones before the general.

Pure. `diagnose(window)` gives findings, `examine` also what can be neither named nor ruled
out, `report` the same as JSON.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from services.observer.doctor.answers import (
    healthy_but_costly,
    memory_bound_decode,
    speculation_does_not_pay,
)
from services.observer.doctor.drift import quality_drift
from services.observer.doctor.facts import MIN_REQUESTS, Facts
from services.observer.doctor.finding import Cause, Clues, Diagnosis, Finding, Undecided
from services.observer.doctor.loading import kv_cache_too_large, l2_slower_than_recompute
from services.observer.doctor.misses import (
    kv_cache_too_small,
    long_prefill_from_misses,
    nonce_in_prefix,
    stale_router_knowledge,
)
from services.observer.doctor.processes import loop_lag, slow_network, slow_preprocess
from services.observer.doctor.sharing import interference, long_prompts_squeeze
from services.observer.doctor.spreading import skewed_routing, slow_worker, wrong_pd_ratio
from services.observer.doctor.starts import cold_start
from services.observer.doctor.waiting import idle_engine_behind_queue, overloaded
from services.observer.model import Window

Rule: TypeAlias = Callable[[Facts], Finding | Undecided | None]

RULES: Mapping[Cause, Rule] = {
    Cause.IDLE_ENGINE_BEHIND_QUEUE: idle_engine_behind_queue,
    Cause.LONG_PREFILL_FROM_MISSES: long_prefill_from_misses,
    Cause.INTERFERENCE: interference,
    Cause.LONG_PROMPTS_SQUEEZE: long_prompts_squeeze,
    Cause.KV_CACHE_TOO_SMALL: kv_cache_too_small,
    Cause.KV_CACHE_TOO_LARGE: kv_cache_too_large,
    Cause.NONCE_IN_PREFIX: nonce_in_prefix,
    Cause.LOOP_LAG: loop_lag,
    Cause.L2_SLOWER_THAN_RECOMPUTE: l2_slower_than_recompute,
    Cause.SPECULATION_DOES_NOT_PAY: speculation_does_not_pay,
    Cause.COLD_START: cold_start,
    Cause.SKEWED_ROUTING: skewed_routing,
    Cause.WRONG_PD_RATIO: wrong_pd_ratio,
    Cause.QUALITY_DRIFT: quality_drift,
    Cause.MEMORY_BOUND_DECODE: memory_bound_decode,
    Cause.COSTLY: healthy_but_costly,
    Cause.SLOW_WORKER: slow_worker,
    Cause.STALE_ROUTER_KNOWLEDGE: stale_router_knowledge,
    Cause.SLOW_PREPROCESS: slow_preprocess,
    Cause.SLOW_NETWORK: slow_network,
    Cause.OVERLOADED: overloaded,
}

_WAITS = (Cause.OVERLOADED, Cause.IDLE_ENGINE_BEHIND_QUEUE)
_MISSES = (Cause.LONG_PREFILL_FROM_MISSES,)
# What a cause brings with it, and would be named for as well: those are left out.
BRINGS: Mapping[Cause, tuple[Cause, ...]] = {
    Cause.NONCE_IN_PREFIX: (*_MISSES, Cause.KV_CACHE_TOO_SMALL, *_WAITS),
    Cause.KV_CACHE_TOO_SMALL: (*_MISSES, Cause.STALE_ROUTER_KNOWLEDGE, *_WAITS),
    Cause.IDLE_ENGINE_BEHIND_QUEUE: (Cause.OVERLOADED,),
    Cause.LONG_PREFILL_FROM_MISSES: (Cause.OVERLOADED,),
    Cause.STALE_ROUTER_KNOWLEDGE: (*_MISSES, Cause.OVERLOADED),
    Cause.COLD_START: (
        *_MISSES,
        *_WAITS,
        Cause.SLOW_WORKER,
        Cause.SKEWED_ROUTING,
        Cause.LONG_PROMPTS_SQUEEZE,
        Cause.STALE_ROUTER_KNOWLEDGE,
    ),
    Cause.L2_SLOWER_THAN_RECOMPUTE: (
        *_WAITS,
        Cause.SLOW_WORKER,
        Cause.KV_CACHE_TOO_SMALL,
        Cause.COSTLY,
    ),
    Cause.MEMORY_BOUND_DECODE: (
        *_WAITS,
        Cause.INTERFERENCE,
        Cause.STALE_ROUTER_KNOWLEDGE,
        Cause.SLOW_WORKER,
    ),
    Cause.SLOW_WORKER: (
        Cause.SKEWED_ROUTING,
        *_WAITS,
        Cause.INTERFERENCE,
        Cause.LONG_PROMPTS_SQUEEZE,
    ),
    Cause.SKEWED_ROUTING: (Cause.OVERLOADED, Cause.INTERFERENCE),
    Cause.WRONG_PD_RATIO: (*_WAITS, *_MISSES, Cause.SKEWED_ROUTING, Cause.KV_CACHE_TOO_SMALL),
    Cause.LOOP_LAG: (Cause.SLOW_NETWORK, Cause.SLOW_PREPROCESS, Cause.IDLE_ENGINE_BEHIND_QUEUE),
    Cause.LONG_PROMPTS_SQUEEZE: (Cause.SKEWED_ROUTING, *_WAITS),
}

logger = logging.getLogger(__name__)


def diagnose(window: Window, clues: Clues | None = None) -> list[Finding]:
    """The most TTFT explained first; what costs something else comes behind. Empty: healthy."""
    return [*examine(window, clues).findings]


def examine(window: Window, clues: Clues | None = None) -> Diagnosis:
    facts = Facts.of(window, clues)
    if facts.num_requests < MIN_REQUESTS:
        needs = f"at least {MIN_REQUESTS} answered requests; there are {facts.num_requests}"
        undecided = tuple(Undecided(cause, needs) for cause in RULES)
        return Diagnosis(findings=(), undecided=undecided, num_requests=facts.num_requests)
    judged = [_judge(cause, rule, facts) for cause, rule in RULES.items()]
    found = [each for each in judged if isinstance(each, Finding)]
    brought = {cause for finding in found for cause in BRINGS.get(finding.cause, ())}
    named = [
        dataclasses.replace(finding, share=min(1.0, finding.share))
        for finding in found
        if finding.cause not in brought
    ]
    return Diagnosis(
        findings=tuple(sorted(named, key=_rank)),
        undecided=tuple(each for each in judged if isinstance(each, Undecided)),
        num_requests=facts.num_requests,
    )


def _judge(cause: Cause, rule: Rule, facts: Facts) -> Finding | Undecided | None:
    try:
        return rule(facts)
    except Exception:  # a defect: the other rules may still see what is wrong
        logger.exception("the doctor's rule for %s failed", cause)
        return Undecided(cause, "its rule failed; the observer's log says how")


def report(window: Window, clues: Clues | None = None) -> dict[str, Any]:
    """What `/api/doctor` answers."""
    return examine(window, clues).plain()


def _rank(finding: Finding) -> tuple[float, float]:
    return -finding.explains_s, -finding.share
