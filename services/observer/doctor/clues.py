"""What the prompts of a window tell the doctor. Pure.

clues_of(read_past(window, prompts), window.members, hygiene.report(...)) -> Clues
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from services.observer.doctor.finding import Clues, VolatileSpan
from services.observer.model import Member
from services.observer.past import Past


class Visit(NamedTuple):
    """A prompt at its worker. Times by one clock."""

    trace_id: str
    worker_id: str
    arrived_s: float
    # From then on the worker had its KV.
    had_kv_s: float
    # Found there, or loaded.
    cached_tokens: int
    # Of its full blocks.
    keys: Sequence[bytes]
    block_tokens: int


def clues_of(
    past: Iterable[Past], members: Iterable[Member], hygiene: Mapping[str, Any] | None = None
) -> Clues:
    visits = [
        Visit(
            each.request.trace_id,
            each.worker_id,
            each.arrived_s,
            each.had_kv_s,
            each.request.cached_tokens,
            each.prompt.prefix_keys,
            each.prompt.block_tokens,
        )
        for each in past
        if each.request is not None and each.had_kv_s is not None
    ]
    if not visits:
        return Clues(spans=volatile_spans(hygiene) if hygiene else None)
    return lost_tokens(
        visits,
        alive={each.id for each in members},
        spans=volatile_spans(hygiene) if hygiene else None,
    )


def lost_tokens(
    visits: Sequence[Visit],
    *,
    alive: Collection[str],
    spans: tuple[VolatileSpan, ...] | None = None,
) -> Clues:
    """Tokens that were computed though the same worker had them once, or any had that is `alive`
    at the end."""
    here: dict[str, set[bytes]] = defaultdict(set)
    anywhere: set[bytes] = set()
    evicted: dict[str, int] = {}
    recomputed: dict[str, int] = {}
    computed = sorted(visits, key=lambda each: each.had_kv_s)
    num_known = 0
    for visit in sorted(visits, key=lambda each: each.arrived_s):
        while num_known < len(computed) and computed[num_known].had_kv_s <= visit.arrived_s:
            earlier = computed[num_known]
            here[earlier.worker_id].update(earlier.keys)
            if earlier.worker_id in alive:
                anywhere.update(earlier.keys)
            num_known += 1
        for known, result in ((here[visit.worker_id], evicted), (anywhere, recomputed)):
            lost = _num_known(visit.keys, known) * visit.block_tokens - visit.cached_tokens
            if lost > 0:
                result[visit.trace_id] = lost
    return Clues(spans=spans, evicted_tokens=evicted, recomputed_tokens=recomputed)


def volatile_spans(hygiene: Mapping[str, Any]) -> tuple[VolatileSpan, ...] | None:
    """Of a hygiene report, what is no text of people. None: it cannot say what is."""
    measured, tokens = hygiene["hit_rate"], hygiene["prompt_tokens"]
    spans = []
    for change in hygiene["changes"]:
        gained = change["predicted_hit_rate_alone"] - (measured or 0.0)
        if change["kind"] is None and gained > 0:
            return None  # without the model's vocabulary, a question is like a nonce
        if change["kind"] != "text" and gained > 0:
            spans.append(
                VolatileSpan(
                    description=_describe(change),
                    trace_ids=(change["trace_id"],),
                    tokens=int(gained * tokens),
                )
            )
    return tuple(spans)


def _describe(change: Mapping[str, Any]) -> str:
    kind = change["kind"].replace("_", " ")
    values = f"{change['values']} values in {change['requests']} requests"
    if change["message"] is None or change["character"] is None:
        place = f"tokens {change['start_token']} to {change['end_token']}"
    else:
        last = change["end_character"]
        until = "" if last is None else f" to {last}"
        place = f"message {change['message']}, characters {change['character']}{until}"
    return f"{kind} in {place}, {values}"


def _num_known(keys: Sequence[bytes], known: set[bytes]) -> int:
    """From the chain's start without a gap."""
    return next((index for index, key in enumerate(keys) if key not in known), len(keys))
