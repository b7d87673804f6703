"""KV that takes longer to bring than to compute; caches larger than their use. Pure."""

from __future__ import annotations

import numpy as np

from services.core.ledger import Segment
from services.observer.doctor.facts import Facts
from services.observer.doctor.finding import Cause, Evidence, Finding, Undecided
from services.observer.doctor.readings import (
    BLOCKS_CACHED,
    BLOCKS_RESERVED,
    BLOCKS_TOTAL,
    Series,
)
from services.observer.doctor.words import at_least, at_most, ms, of_ttft, percent, times
from services.observer.statistics import mean, quantile

# Loads, of which most take longer than this many times what computing would.
MIN_LOADS, SLOW_LOAD = 10, 1.25
MIN_SHARE, MIN_EXPLAINED_S = 0.1, 0.005
# A load that takes so many times what was expected was decided on by a wrong estimate.
WRONG_ESTIMATE = 2.0
# A cache of which so much was never used, and grows no more, in a window so long.
USED_SHARE, GROWN_SHARE = 0.1, 0.02
LONG_WINDOW_S, MIN_REQUESTS = 300.0, 200


def l2_slower_than_recompute(facts: Facts) -> Finding | Undecided | None:
    loaded = facts.column(each.loaded_blocks for each in facts.requests) > 0
    if not loaded.any():
        return None
    took_s = facts.column(each.load_s for each in facts.requests)
    took_s = np.maximum(took_s, facts.spent_s[Segment.KV_LOAD]) * loaded
    compute_s = _computing_s(facts)
    if not compute_s[loaded].any():
        needs = "how fast workers compute prompts: none was computed in this window"
        return Undecided(Cause.L2_SLOWER_THAN_RECOMPUTE, needs)
    lost_s = np.where(loaded, np.maximum(0.0, took_s - compute_s), 0.0)
    explains_s = float(lost_s.sum()) / facts.num_requests
    ratio = quantile(took_s[loaded] / np.maximum(compute_s[loaded], 1e-6), 0.5)
    is_slow = ratio >= SLOW_LOAD
    # Who loads holds a slot: others wait for it.
    worked_s = mean(facts.prefill_s) + float(took_s.sum()) / facts.num_requests
    explains_s += mean(facts.waited_s) * explains_s / max(worked_s, 1e-9)
    if not is_slow or explains_s < max(MIN_SHARE * facts.mean_ttft_s, MIN_EXPLAINED_S):
        return None
    if int(loaded.sum()) < MIN_LOADS:
        needs = f"at least {MIN_LOADS} loads from the KV store"
        return Undecided(Cause.L2_SLOWER_THAN_RECOMPUTE, needs)
    mode = facts.config("worker.kv_load", "")
    return Finding(
        cause=Cause.L2_SLOWER_THAN_RECOMPUTE,
        summary=(
            f"Loading KV from the store takes {times(ratio)} as long as computing it would:"
            f" {ms(quantile(took_s[loaded], 0.5))} at the median."
        ),
        explains_s=explains_s,
        share=explains_s / facts.mean_ttft_s,
        evidence=(
            Evidence("load / computing, median", times(ratio), at_least(times(SLOW_LOAD))),
            Evidence("requests that loaded", f"{loaded.sum()} of {facts.num_requests}"),
            *_estimates(facts, loaded, took_s),
        ),
        trace_ids=facts.worst(lost_s),
        setting="worker.kv_load",
        before=mode or None,
        after="auto" if mode == "always" else "never",
        expected=of_ttft(explains_s, facts.mean_ttft_s),
    )


def kv_cache_too_large(facts: Facts) -> Finding | Undecided | None:
    """Memory that a cache holds and never uses."""
    rows = [_use_of(facts, total) for total in facts.readings.series(BLOCKS_TOTAL)]
    if not rows or any(row is None for row in rows):
        return None
    used = max(row[0] for row in rows if row)
    grown = max(row[1] for row in rows if row)
    is_long = facts.duration_s >= LONG_WINDOW_S and facts.num_requests >= MIN_REQUESTS
    if used > USED_SHARE or grown > GROWN_SHARE:
        return None
    if not is_long:
        needs = f"a window of {LONG_WINDOW_S:.0f} s with {MIN_REQUESTS} requests"
        return Undecided(Cause.KV_CACHE_TOO_LARGE, needs)
    engines = {each.engine for each in facts.requests}
    key = "worker.simulated.num_blocks" if engines == {"simulated"} else "worker.num_cache_blocks"
    blocks = facts.config(key)
    return Finding(
        cause=Cause.KV_CACHE_TOO_LARGE,
        summary=f"No worker ever used more than {percent(used)} of its KV blocks.",
        share=1 - used,
        evidence=(
            Evidence("blocks used at most", percent(used), at_most(percent(USED_SHARE))),
            Evidence(
                "grown in the window's second half", percent(grown), at_most(percent(GROWN_SHARE))
            ),
        ),
        setting=key,
        before=blocks,
        after=None if blocks is None else max(1, int(2 * used * blocks)),
        expected="the same TTFT with less memory",
    )


def _computing_s(facts: Facts) -> np.ndarray:
    """Of each load, what computing its blocks would have taken, as far as anybody knows."""
    expected_s = facts.column(each.expected_compute_s for each in facts.requests)
    rate = facts.prefill_tokens_per_s
    if not rate:
        return expected_s
    tokens = facts.column(each.loaded_blocks * facts.block_tokens for each in facts.requests)
    return np.where(expected_s > 0, expected_s, tokens / rate)


def _estimates(facts: Facts, loaded: np.ndarray, took_s: np.ndarray) -> tuple[Evidence, ...]:
    expected_s = facts.column(each.expected_load_s for each in facts.requests)
    known = loaded & (expected_s > 0)
    if not known.any():
        return ()
    ratio = quantile(took_s[known] / expected_s[known], 0.5)
    return (
        Evidence("load / what was expected of it", times(ratio), at_least(times(WRONG_ESTIMATE))),
    )


def _use_of(facts: Facts, total: Series) -> tuple[float, float] | None:
    """The most that was used of a worker's blocks, and how much more in the second half."""
    blocks = total.values[-1]
    used: dict[float, float] = {}
    for name in (BLOCKS_CACHED, BLOCKS_RESERVED):
        for series in facts.readings.series(name):
            if series.member_id == total.member_id:
                for at_s, value in zip(series.times_s, series.values, strict=True):
                    used[at_s] = used.get(at_s, 0.0) + value
    if not used or blocks <= 0:
        return None
    middle_s = (min(used) + max(used)) / 2
    first = max((value for at_s, value in used.items() if at_s <= middle_s), default=0.0)
    second = max((value for at_s, value in used.items() if at_s > middle_s), default=first)
    return max(first, second) / blocks, max(0.0, second - first) / blocks
