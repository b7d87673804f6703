"""Where prompts' tokens came from, and what routers had expected. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.observer.model import Request, Window
from services.observer.state_fields import Cache, Predicted, StoreRow, TierRow
from services.observer.state_load import Tracks

# As workers count the tokens of prompts: the tier to show, by its name there.
_SOURCE, _TOKENS = "source", "firsttoken.worker.prompt.tokens"
TIERS = {"worker": "worker", "l1": "node memory", "l2": "Redis", "computed": "computed"}
_HITS, _MISSES = "firsttoken.kvstore.hits", "firsttoken.kvstore.misses"


def cache(recent: Iterable[Request], window: Window, since_unix_s: float) -> Cache:
    """`recent`: those that came since then."""
    answered = [request for request in recent if request.ttft_s is not None]
    tracks = Tracks(window.readings, (_TOKENS, _HITS, _MISSES), since_unix_s=since_unix_s)
    tokens = _counted(tracks) or _told(answered)
    total = sum(tokens.values())
    return Cache(
        prompt_tokens=total,
        tiers=[
            TierRow(tier=tier, tokens=count, share=round(count / max(total, 1), 4))
            for tier, count in tokens.items()
        ],
        predicted=_predicted(answered),
        stores=_stores(tracks),
    )


def _counted(tracks: Tracks) -> dict[str, int]:
    """By the workers; empty where they counted none."""
    tokens = {
        title: int(sum(track.growth for track in tracks.of_all(_TOKENS, (_SOURCE, source))))
        for source, title in TIERS.items()
    }
    return tokens if any(tokens.values()) else {}


def _told(answered: Sequence[Request]) -> dict[str, int]:
    """By the requests themselves, which do not tell the tiers apart."""
    cached_tokens = sum(_cached(request) for request in answered)
    prompt_tokens = sum(request.prompt_tokens for request in answered)
    return {"a cache": cached_tokens, "computed": prompt_tokens - cached_tokens}


def _cached(request: Request) -> int:
    return min(request.cached_tokens, request.prompt_tokens)


def _predicted(answered: Sequence[Request]) -> Predicted:
    num, prompt, predicted, cached, over = 0, 0, 0, 0, 0
    for request in answered:
        expected = request.predicted_tokens
        if expected is not None:
            found = _cached(request)
            num += 1
            prompt += request.prompt_tokens
            predicted += expected
            cached += found
            if expected > found:
                over += expected - found
    return Predicted(
        num_requests=num,
        prompt_tokens=prompt,
        predicted_tokens=predicted,
        cached_tokens=cached,
        over_tokens=over,
        under_tokens=cached + over - predicted,
    )


def _stores(tracks: Tracks) -> list[StoreRow]:
    rows = []
    for tier in ("l1", "l2"):
        hits = sum(track.growth for track in tracks.of_all(_HITS, ("tier", tier)))
        misses = sum(track.growth for track in tracks.of_all(_MISSES, ("tier", tier)))
        if hits + misses > 0:
            rate = round(hits / (hits + misses), 4)
            rows.append(
                StoreRow(
                    tier=TIERS[tier], num_hits=int(hits), num_misses=int(misses), hit_rate=rate
                )
            )
    return rows
