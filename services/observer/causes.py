"""Why the first block that a prompt lacked was not in its worker's cache. Pure.

Each function looks for one cause and gives what it found, or None. None of them guesses: what
is not known is UNKNOWN, with what is.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

from services.observer.model import Request
from services.observer.past import (
    Holding,
    Past,
    dropped_below,
    in_flight,
    shared_blocks,
    whereabouts,
)
from services.observer.prompts import Prompts


class Cause(enum.StrEnum):
    HIT = "hit"
    # Text that changes with each request stands before text that does not.
    CHANGING_TEXT = "changing_text"
    SHORTER_THAN_A_BLOCK = "shorter_than_a_block"
    OTHER_TENANT = "other_tenant"
    OTHER_SALT = "other_salt"
    EVICTED = "evicted"
    # Another worker had it, and was dearer; or nobody asked where it is.
    ELSEWHERE = "elsewhere"
    # It was on its way: a request before it was computing the same.
    STILL_COMPUTING = "still_computing"
    HOLDER_LEFT = "holder_left"
    ROUTER_DID_NOT_KNOW = "router_did_not_know"
    # The KV store had it, and computing was expected to be faster.
    COMPUTED_INSTEAD = "computed_instead"
    FIRST_OF_ITS_KIND = "first_of_its_kind"
    UNKNOWN = "unknown"


class Finding(NamedTuple):
    cause: Cause
    # One sentence.
    summary: str
    # Prompt tokens that were computed for this reason.
    lost_tokens: int
    evidence: tuple[str, ...] = ()


class Case(NamedTuple):
    """The request in question, and all before it."""

    past: Past
    request: Request
    earlier: Sequence[Past]
    prompts: Prompts
    # Those that were there, as far as is known.
    workers: Collection[str]
    # The KV store that the request's worker used, where that is known.
    store_id: str
    # Blocks that were cached, and those that could have been: the last token is computed.
    cached_blocks: int
    usable_blocks: int

    @property
    def block_tokens(self) -> int:
        return self.past.prompt.block_tokens

    def lost_tokens(self, num_blocks: int) -> int:
        """With so many blocks at hand, those that were not used."""
        have = min(num_blocks, self.usable_blocks)
        return max(0, have - self.cached_blocks) * self.block_tokens


def of_the_caches(case: Case) -> Finding | None:
    """An earlier prompt of the same tenant and salt goes on like this one."""
    keys = case.past.prompt.prefix_keys
    shared = max((shared_blocks(keys, past.prompt.prefix_keys) for past in case.earlier), default=0)
    lost = case.lost_tokens(shared)
    if not lost:
        return None
    place = case.cached_blocks
    everywhere = whereabouts(
        place,
        keys[place],
        case.past.arrived_s,
        case.earlier,
        case.prompts.evictions,
        missed_at=case.request.worker_id,
    )
    holdings = [each for each in everywhere if each.worker_id in case.workers]
    if everywhere and not holdings:
        left = f"{', '.join(each.worker_id for each in everywhere)} had it, and has left the mesh"
        below = _evicted_below(case, holdings, lost)
        return below._replace(evidence=(left,)) if below else Finding(Cause.HOLDER_LEFT, left, lost)
    for look in (_computed_instead, _elsewhere, _still_computing, _evicted, _evicted_below):
        finding = look(case, holdings, lost)
        if finding is not None:
            return finding
    return Finding(
        Cause.UNKNOWN,
        "an earlier prompt begins with the same tokens, and it is not known where they went",
        lost,
        tuple(_known(case, holdings)),
    )


def of_other_roots(case: Case) -> Finding | None:
    """The same tokens were there, under the keys of another tenant or salt."""
    prompt = case.past.prompt
    most, best = 0, None
    for past in case.earlier:
        if past.prompt.root != prompt.root:
            shared = shared_blocks(prompt.contents, past.prompt.contents)
            if shared > most:
                most, best = shared, past
    own = max(
        (shared_blocks(prompt.prefix_keys, past.prompt.prefix_keys) for past in case.earlier),
        default=0,
    )
    lost = case.lost_tokens(most) - case.lost_tokens(own)
    if best is None or lost <= 0:
        return None
    other, tokens = best.prompt, most * case.block_tokens
    evidence = (f"{tokens} tokens are those of {other.trace_id}",)
    if other.tenant != prompt.tenant:
        summary = (
            f"the same {tokens} tokens came from tenant {_name(other.tenant)}: prefixes are not"
            f" shared with tenant {_name(prompt.tenant)}"
        )
        return Finding(Cause.OTHER_TENANT, summary, lost, evidence)
    summary = (
        f"the same {tokens} tokens came with another cache_salt, or before the tenant's salt was"
        " changed: prefixes are shared only with the same one"
    )
    return Finding(Cause.OTHER_SALT, summary, lost, evidence)


def _computed_instead(case: Case, holdings: Sequence[Holding], lost: int) -> Finding | None:
    request = case.request
    if request.loaded_blocks or not request.expected_load_s > request.expected_compute_s > 0:
        return None
    summary = (
        f"the KV store had it, and computing ({request.expected_compute_s * 1e3:.0f} ms) was"
        f" expected to be faster than loading ({request.expected_load_s * 1e3:.0f} ms)"
    )
    return Finding(Cause.COMPUTED_INSTEAD, summary, lost)


def _elsewhere(case: Case, holdings: Sequence[Holding], lost: int) -> Finding | None:
    request = case.request
    others = [each.worker_id for each in holdings if each.has_it]
    if not others or request.worker_id in others:
        return None
    running = [
        f"requests at {worker_id} then: {in_flight(worker_id, case.past.arrived_s, case.earlier)}"
        for worker_id in (*others, request.worker_id)
    ]
    where = ", ".join(others)
    if request.predicted_tokens is None:
        summary = (
            f"{where} had it; router.routing_strategy {request.strategy} does not ask where"
            " prefixes are"
        )
        return Finding(Cause.ELSEWHERE, summary, lost, tuple(running))
    evidence = (
        f"the router expected {request.predicted_tokens} cached tokens at {request.worker_id} and"
        f" {request.best_elsewhere_tokens} at the best other",
        f"it waited in the router behind {request.queue_position} others",
        *running,
    )
    if request.best_elsewhere_tokens > max(request.predicted_tokens, request.cached_tokens):
        summary = f"{where} had it, and was too busy: {request.worker_id} was expected to be faster"
        return Finding(Cause.ELSEWHERE, summary, lost, evidence)
    summary = f"{where} had it, and the router did not know: its reports are late or missing"
    return Finding(Cause.ROUTER_DID_NOT_KNOW, summary, lost, evidence)


def _still_computing(case: Case, holdings: Sequence[Holding], lost: int) -> Finding | None:
    computing = [each.worker_id for each in holdings if each.is_computing]
    if not computing:
        return None
    summary = f"an earlier request was still computing it, at {', '.join(computing)}"
    return Finding(Cause.STILL_COMPUTING, summary, lost)


def _evicted(case: Case, holdings: Sequence[Holding], lost: int) -> Finding | None:
    dropped = [each for each in holdings if each.dropped_s is not None]
    if not dropped or any(each.has_it for each in holdings):
        return None
    # Where the request went, if it was dropped there; else where it was to be had longest.
    at = case.past.arrived_s
    ours = [each for each in dropped if each.worker_id == case.request.worker_id]
    holding = ours[0] if ours else max(dropped, key=lambda each: each.dropped_s or 0.0)
    assert holding.had_s is not None
    assert holding.dropped_s is not None
    between = [
        past.request
        for past in case.earlier
        if past.worker_id == holding.worker_id
        and past.request is not None
        and past.had_kv_s is not None
        and holding.had_s < past.had_kv_s <= holding.dropped_s + 1.0
    ]
    brought = sum(request.prompt_tokens - request.cached_tokens for request in between)
    ago_s = max(0.0, at - holding.dropped_s)
    summary = f"{holding.worker_id} dropped it {ago_s:.1f} s before"
    summary += ", to make room for others" if brought else ""
    evidence = (
        f"it was last used there {at - holding.had_s:.1f} s before",
        f"in between {len(between)} requests brought {brought} new prompt tokens there",
    )
    below = _evicted_below(case, holdings, lost)
    if below is not None:
        summary += f"; {below.summary}"
    return Finding(Cause.EVICTED, summary, lost, evidence)


def _evicted_below(case: Case, holdings: Sequence[Holding], lost: int) -> Finding | None:
    """No worker had it, and the KV store would have, had it not dropped it."""
    if any(each.has_it or each.is_computing for each in holdings):
        return None
    if _computed_instead(case, holdings, lost) is not None:
        return None
    key, at = case.past.prompt.prefix_keys[case.cached_blocks], case.past.arrived_s
    dropped_s = dropped_below(
        case.cached_blocks, key, at, case.earlier, case.prompts.store_evictions, case.store_id
    )
    if dropped_s is None:
        return None
    ago_s = max(0.0, at - dropped_s)
    summary = (
        f"the KV store {case.store_id} had it in node memory (L1), and dropped it {ago_s:.1f} s"
        " before"
    )
    return Finding(Cause.EVICTED, summary, lost)


def _known(case: Case, holdings: Sequence[Holding]) -> list[str]:
    request, at = case.request, case.past.arrived_s
    known = [
        f"{each.worker_id} had it {at - each.had_s:.1f} s before, and has not said that it"
        " dropped it"
        for each in holdings
        if each.has_it and each.had_s is not None
    ]
    if request.predicted_tokens is not None:
        known.append(
            f"the router expected {request.predicted_tokens} cached tokens at {request.worker_id}"
        )
    return known


def _name(tenant: str) -> str:
    return f'"{tenant}"'
