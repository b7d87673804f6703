"""Which requests came before one, and where a block was when it came. Pure.

Times are by the observer's clock. A router's own is ahead of that by what is least between a
request's end there and the time at which the observer heard of it: so the order of one router's
requests is exact, and others are right to some tenths of a second where hosts' clocks differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from services.observer.model import Hop, Request, Window
from services.observer.prompts import Evictions, KeptPrompt, Prompts

# What a process has to tell is heard so much later at most.
TOLD_WITHIN_S = 1.5


class Past(NamedTuple):
    """A request, and its prompt. `request` None: it has left the window, or not come into it."""

    prompt: KeptPrompt
    request: Request | None
    arrived_s: float
    # From then on its worker had the KV of its prompt; None: it never did.
    had_kv_s: float | None
    ended_s: float

    @property
    def worker_id(self) -> str:
        return self.request.worker_id if self.request is not None else ""


class Holding(NamedTuple):
    """What one worker did with a block before some time. The last of the three counts."""

    worker_id: str
    # It was computed there, or used; None: only on its way.
    had_s: float | None
    # Dropped after that.
    dropped_s: float | None
    # A request was computing it.
    is_computing: bool

    @property
    def has_it(self) -> bool:
        return self.had_s is not None and self.dropped_s is None


def read_past(window: Window, prompts: Prompts) -> list[Past]:
    """In the order of arrival."""
    # By hop: a caller may have sent several requests in one trace.
    known = {hop.span_id: (hop, request) for request in window.requests for hop in request.hops}
    behind_s: dict[str, float] = {}
    for prompt in prompts.kept:
        if prompt.span_id in known:
            hop, _ = known[prompt.span_id]
            delay_s = prompt.heard_unix_s - hop.arrived_unix_s - hop.ended_s
            behind_s[hop.member_id] = min(delay_s, behind_s.get(hop.member_id, delay_s))
    found = [_past(prompt, known.get(prompt.span_id), behind_s) for prompt in prompts.kept]
    return sorted(found, key=lambda past: past.arrived_s)


def _past(
    prompt: KeptPrompt, known: tuple[Hop, Request] | None, behind_s: Mapping[str, float]
) -> Past:
    if known is None:
        return Past(prompt, None, prompt.heard_unix_s, None, prompt.heard_unix_s)
    hop, request = known
    arrived_s = hop.arrived_unix_s + behind_s[hop.member_id]
    had_kv_s = None
    if request.worker_id and hop.first_token_s is not None:
        had_kv_s = arrived_s + hop.first_token_s
    return Past(prompt, request, arrived_s, had_kv_s, arrived_s + hop.ended_s)


def shared_blocks(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Of two chains: whatever lies before an equal link is equal."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def whereabouts(
    place: int,
    key: bytes,
    at_s: float,
    earlier: Iterable[Past],
    evictions: Evictions,
    *,
    missed_at: str = "",
) -> list[Holding]:
    """By worker, of the block `key`, the one at `place` in its chain, as it was at `at_s`.

    `missed_at`: the worker that had not got it then, so that what it tells late was before.
    """
    had_s: dict[str, float] = {}
    computing: set[str] = set()
    for past in earlier:
        keys = past.prompt.prefix_keys
        if not past.worker_id or len(keys) <= place or keys[place] != key:
            continue
        if past.had_kv_s is None:
            continue
        if past.had_kv_s > at_s:
            computing.add(past.worker_id)
        else:
            had_s[past.worker_id] = max(had_s.get(past.worker_id, 0.0), past.had_kv_s)
    found = []
    for worker_id in had_s.keys() | computing:
        last_s = had_s.get(worker_id)
        dropped_s = None
        if last_s is not None:
            times = evictions.get((worker_id, key), ())
            until_s = at_s + TOLD_WITHIN_S if worker_id == missed_at else at_s
            dropped_s = max((each for each in times if last_s <= each <= until_s), default=None)
        found.append(Holding(worker_id, last_s, dropped_s, worker_id in computing))
    return sorted(found)


def dropped_below(
    place: int,
    key: bytes,
    at_s: float,
    earlier: Iterable[Past],
    evictions: Evictions,
    store_id: str,
) -> float | None:
    """When a KV store dropped the block, which nobody can have written there since.

    What it tells late was before: it had not got the block at `at_s`.
    """
    times = evictions.get((store_id, key), ())
    dropped_s = max((each for each in times if each <= at_s + TOLD_WITHIN_S), default=None)
    if dropped_s is None:
        return None
    for past in earlier:
        keys, request = past.prompt.prefix_keys, past.request
        if len(keys) <= place or keys[place] != key:
            continue
        if request is None:
            came_s, is_from_pool = past.ended_s, False
        else:
            came_s = past.ended_s if past.had_kv_s is None else past.had_kv_s
            cached = request.cached_tokens // past.prompt.block_tokens
            # Only what comes into a worker's pool is written.
            is_from_pool = place < cached and not request.loaded_blocks and not request.handed_off
        if came_s > dropped_s and not is_from_pool:
            return None
    return dropped_s


def in_flight(worker_id: str, at_s: float, past: Iterable[Past]) -> int:
    return sum(
        each.worker_id == worker_id and each.arrived_s <= at_s < each.ended_s for each in past
    )
