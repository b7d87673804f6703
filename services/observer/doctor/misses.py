"""Prompts that are computed though somebody had computed them: by whose fault. Pure.

What is computed again lengthens its own prefill, and the wait of those behind it: of both, a
miss is charged with its share of what was computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from services.observer.doctor.facts import Facts
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.readings import BLOCKS_CACHED, BLOCKS_RESERVED, BLOCKS_TOTAL
from services.observer.doctor.words import at_least, ms, of_ttft, percent
from services.observer.statistics import Floats, mean, quantile

# Of the mean TTFT, what a cause explains at least before it is named, and in itself.
MIN_SHARE, MIN_EXPLAINED_S = 0.15, 0.005
# Of the prompts' tokens, those that are lost at least.
MIN_LOST_SHARE = 0.02
# Without a cache in sight, a prefill is long from here on, and there are next to no hits.
LONG_PREFILL_S, FEW_HITS = 0.25, 0.1
# Of a cache in use, and of what went through it.
FULL_SHARE = 0.9
# Where strategies do not look at caches: requests that find something, and how much.
MIN_REUSING = 0.1


def long_prefill_from_misses(facts: Facts) -> Finding | Undecided | None:
    """Somebody had it, and the request went elsewhere."""
    if not _is_computing_long(facts):
        return None
    lost = _lost_by_routing(facts)
    if lost is None:
        return _without_reuse(facts)
    explains_s = charged_s(facts, lost)
    if not is_worth(facts, explains_s) or _share(facts, lost) < MIN_LOST_SHARE:
        return _without_reuse(facts)
    strategy = ", ".join(sorted(facts.strategies)) or "the routing strategy"
    is_blind = facts.is_cache_blind
    return Finding(
        cause=Cause.LONG_PREFILL_FROM_MISSES,
        summary=(
            f"Prompts are computed though another worker has their beginning: {strategy} sends"
            f" them past it. Hit rate {percent(facts.hit_rate)}."
        ),
        explains_s=explains_s,
        share=explains_s / facts.mean_ttft_s,
        evidence=(
            _computing(facts),
            Evidence("hit rate", percent(facts.hit_rate)),
            Evidence(
                "prompt tokens that another worker had",
                percent(_share(facts, lost)),
                at_least(percent(MIN_LOST_SHARE)),
            ),
        ),
        trace_ids=facts.worst(lost),
        setting="router.routing_strategy" if is_blind else "",
        before=facts.config("router.routing_strategy", strategy) if is_blind else None,
        after="kv_aware" if is_blind else None,
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def kv_cache_too_small(facts: Facts) -> Finding | Undecided | None:
    """The worker had it, and threw it away."""
    if not _is_computing_long(facts):
        return None
    evicted = facts.clues.evicted_tokens
    if evicted is None:
        is_full = any(share >= FULL_SHARE for share in filled(facts).values())
        needs = "the prompts' blocks and evictions: which of the misses were evicted"
        return Undecided(Cause.KV_CACHE_TOO_SMALL, needs) if is_full else None
    lost = _by_trace(facts, evicted)
    explains_s = charged_s(facts, lost)
    if not is_worth(facts, explains_s) or _share(facts, lost) < MIN_LOST_SHARE:
        return None
    key, blocks = _capacity(facts)
    return Finding(
        cause=Cause.KV_CACHE_TOO_SMALL,
        summary=(
            f"{percent(_share(facts, lost))} of the prompts' tokens were in the cache of their own"
            " worker and had been evicted when they were asked for again."
        ),
        explains_s=explains_s,
        share=explains_s / facts.mean_ttft_s,
        evidence=(
            _computing(facts),
            Evidence(
                "prompt tokens evicted and computed again",
                percent(_share(facts, lost)),
                at_least(percent(MIN_LOST_SHARE)),
            ),
            Evidence("hit rate", percent(facts.hit_rate)),
            *_fullest(facts),
        ),
        trace_ids=facts.worst(lost),
        setting=key,
        before=blocks,
        after=None if blocks is None else 2 * blocks,
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def nonce_in_prefix(facts: Facts) -> Finding | Undecided | None:
    """The prompts themselves differ where they need not."""
    spans = facts.clues.spans
    if spans is None:
        if _is_computing_long(facts) and facts.hit_rate < FEW_HITS:
            needs = "a report of prompt hygiene: whether something volatile breaks the prefixes"
            return Undecided(Cause.NONCE_IN_PREFIX, needs)
        return None
    if not spans or not facts.prefill_tokens_per_s:
        return None
    worst = max(spans, key=lambda each: each.tokens)
    tokens = sum(each.tokens for each in spans)
    explains_s = _charged_tokens_s(facts, tokens)
    if not is_worth(facts, explains_s):
        return None
    total = float(facts.prompt_tokens.sum())
    return Finding(
        cause=Cause.NONCE_IN_PREFIX,
        summary=f"What changes from request to request breaks prefixes: {worst.description}.",
        explains_s=explains_s,
        share=explains_s / facts.mean_ttft_s,
        evidence=(
            _computing(facts),
            Evidence("hit rate", percent(facts.hit_rate)),
            Evidence("hit rate without it", percent(min(1.0, facts.hit_rate + tokens / total))),
            *(Evidence("volatile", each.description) for each in spans[:3]),
        ),
        trace_ids=worst.trace_ids[:5],
        expected=of_ttft(explains_s, facts.mean_ttft_s) + ", when it moves to the prompt's end",
    )


def stale_router_knowledge(facts: Facts) -> Finding | Undecided | None:
    """The router thought that the worker had it."""
    asked = [each.predicted_tokens is not None for each in facts.requests]
    if not any(asked):
        return None
    lost = facts.column(
        max(0, (each.predicted_tokens or 0) - each.cached_tokens) for each in facts.requests
    )
    # What another worker had, and the router thought that nobody had.
    known = facts.column(each.best_elsewhere_tokens for each in facts.requests)
    unknown = np.maximum(0.0, _had_elsewhere(facts) - np.maximum(0.0, known - facts.cached_tokens))
    lost = np.maximum(lost, unknown)
    explains_s = charged_s(facts, lost)
    if not is_worth(facts, explains_s) or _share(facts, lost) < MIN_LOST_SHARE:
        return None
    return Finding(
        cause=Cause.STALE_ROUTER_KNOWLEDGE,
        summary=(
            f"Routers are wrong about where {percent(_share(facts, lost))} of the prompt tokens are"
            " cached: reports of workers come late or not at all."
        ),
        explains_s=explains_s,
        share=explains_s / facts.mean_ttft_s,
        evidence=(
            _computing(facts),
            Evidence(
                "prompt tokens whose place routers got wrong",
                percent(_share(facts, lost)),
                at_least(percent(MIN_LOST_SHARE)),
            ),
        ),
        trace_ids=facts.worst(lost),
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


# --- what they share


def charged_s(facts: Facts, lost: Floats) -> float:
    """Of the mean TTFT, by tokens lost in each request."""
    return _charged_tokens_s(facts, float(np.minimum(lost, facts.computed_tokens).sum()))


def is_worth(facts: Facts, explains_s: float) -> bool:
    return explains_s >= max(MIN_SHARE * facts.mean_ttft_s, MIN_EXPLAINED_S)


def filled(facts: Facts) -> dict[str, float]:
    """By worker: how full its blocks are, where it says so."""
    cached, reserved, total = (
        facts.readings.last(name) for name in (BLOCKS_CACHED, BLOCKS_RESERVED, BLOCKS_TOTAL)
    )
    return {
        name: min(1.0, (cached.get(name, 0.0) + reserved.get(name, 0.0)) / blocks)
        for name, blocks in total.items()
        if blocks > 0
    }


def _charged_tokens_s(facts: Facts, tokens: float) -> float:
    computed = float(facts.computed_tokens.sum())
    if not computed:
        return 0.0
    working_s = mean(facts.prefill_s) + mean(facts.waited_s)
    return min(1.0, tokens / computed) * working_s


def _is_computing_long(facts: Facts) -> bool:
    working_s = mean(facts.prefill_s) + mean(facts.waited_s)
    return is_worth(facts, working_s)


def _lost_by_routing(facts: Facts) -> Floats | None:
    """Tokens that another worker had, where nobody looks at caches. None: nobody knows."""
    if not facts.is_cache_blind:
        return np.zeros(facts.num_requests)
    if facts.clues.recomputed_tokens is not None:
        return _had_elsewhere(facts)
    found = facts.cached_tokens >= facts.block_tokens
    if mean(found.astype(np.float64)) < MIN_REUSING:
        return None
    # Those that found nothing could have found what others, most often, did.
    typical = quantile(facts.cached_tokens[found] / facts.prompt_tokens[found], 0.5)
    return np.where(found, 0.0, typical * facts.prompt_tokens)


def _had_elsewhere(facts: Facts) -> Floats:
    """Tokens that were computed again, and not since their own worker had evicted them."""
    own = _by_trace(facts, facts.clues.evicted_tokens or {})
    return np.maximum(0.0, _by_trace(facts, facts.clues.recomputed_tokens or {}) - own)


def _without_reuse(facts: Facts) -> Finding | Undecided | None:
    prefill_s = mean(facts.prefill_s)
    if prefill_s < max(LONG_PREFILL_S, facts.mean_ttft_s / 2) or facts.hit_rate >= FEW_HITS:
        return None
    if facts.clues.recomputed_tokens is None:
        needs = "the prompts' blocks: whether any of them had been computed before"
        return Undecided(Cause.LONG_PREFILL_FROM_MISSES, needs)
    return Finding(
        cause=Cause.LONG_PREFILL_FROM_MISSES,
        summary=(
            f"Nearly every prompt is computed whole, in {ms(prefill_s)} on average: prompts begin"
            " differently, so caches cannot help."
        ),
        explains_s=prefill_s,
        share=prefill_s / facts.mean_ttft_s,
        evidence=(
            Evidence("mean prefill", ms(prefill_s), at_least(ms(LONG_PREFILL_S))),
            Evidence("hit rate", percent(facts.hit_rate), f"below {percent(FEW_HITS)}"),
        ),
        trace_ids=facts.worst(facts.prefill_s),
    )


def _by_trace(facts: Facts, tokens: Mapping[str, int]) -> Floats:
    return facts.column(tokens.get(each.trace_id, 0) for each in facts.requests)


def _share(facts: Facts, lost: Floats) -> float:
    total = float(facts.prompt_tokens.sum())
    return float(np.minimum(lost, facts.computed_tokens).sum()) / total if total else 0.0


def _computing(facts: Facts) -> Evidence:
    prefill_s, waited_s = mean(facts.prefill_s), mean(facts.waited_s)
    return Evidence(
        "mean prefill, and wait for it",
        f"{ms(prefill_s)} + {ms(waited_s)} of {ms(facts.mean_ttft_s)}",
        at_least(percent(MIN_SHARE)),
    )


def _fullest(facts: Facts) -> tuple[Evidence, ...]:
    shares = filled(facts)
    if not shares:
        return ()
    name = max(shares, key=lambda each: shares[each])
    return (Evidence("fullest cache", f"{name}: {percent(shares[name])}"),)


def _capacity(facts: Facts) -> tuple[str, int | None]:
    engines = {each.engine for each in facts.requests}
    key = "worker.simulated.num_blocks" if engines == {"simulated"} else "worker.num_cache_blocks"
    value = facts.config(key)
    return key, None if value is None else int(value)
