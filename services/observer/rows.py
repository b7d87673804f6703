"""Requests as rows of JSON, for the page and whoever asks the observer over HTTP. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.core.ledger import Segment
from services.observer.history import RESIDUAL
from services.observer.model import Request
from services.observer.placing import Placed, merged_parts, place
from services.observer.state_fields import HopRow, RequestRow

MAX_HOPS, MAX_PARTS, MAX_HIDDEN = 6, 8, 3
# Of a trace that is shown as a whole.
MAX_TRACE_PARTS = 400
NAME_BYTES, PHRASE_BYTES, TEXT_BYTES = 48, 96, 240


def seconds(value: float) -> float:
    """To the microsecond; JSON has no word for what is not finite."""
    return round(value, 6) if math.isfinite(value) else 0.0


def maybe_seconds(value: float | None) -> float | None:
    return None if value is None else seconds(value)


def name(value: object) -> str:
    return _clip(str(value), NAME_BYTES)


def phrase(value: object) -> str:
    return _clip(str(value), PHRASE_BYTES)


def text(value: object) -> str:
    return _clip(str(value), TEXT_BYTES)


def _clip(value: str, max_bytes: int) -> str:
    encoded = value.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[:max_bytes].decode(errors="ignore") + "…"


def describe(request: Request) -> RequestRow:
    """Without its hops."""
    spent_s = {str(segment): seconds(request.spent_s.get(segment, 0.0)) for segment in Segment}
    return RequestRow(
        trace_id=request.trace_id,
        span_id=request.hops[0].span_id if request.hops else "",
        arrived_unix_s=seconds(request.arrived_unix_s),
        ttft_s=maybe_seconds(request.ttft_s),
        duration_s=seconds(request.duration_s),
        spent_s={**spent_s, RESIDUAL: seconds(request.residual_s)},
        hidden_s=_hidden(request.hidden_s),
        handoff_s=seconds(request.handoff_s),
        model=name(request.model),
        tenant=name(request.tenant),
        request_class=name(request.request_class),
        generation=request.generation,
        worker_id=name(request.worker_id),
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        output_tokens=request.output_tokens,
        error=text(request.error),
    )


def describe_hops(request: Request) -> list[HopRow]:
    """In the order in which they called each other, on the outermost hop's axis."""
    return [_hop(placed, MAX_PARTS) for placed in place(request)[:MAX_HOPS]]


def describe_trace(request: Request) -> dict[str, Any]:
    """The whole of it, the spans' attributes included: `/api/requests/{trace_id}`."""
    placed = place(request)
    return {
        **describe(request),
        "engine": request.engine,
        "strategy": request.strategy,
        "predicted_tokens": request.predicted_tokens,
        "best_elsewhere_tokens": request.best_elsewhere_tokens,
        "batch_size": request.batch_size,
        "queue_position": request.queue_position,
        "attempts": request.attempts,
        "migrations": request.migrations,
        "tpot_s": maybe_seconds(request.tpot_s),
        "hops": [
            {**_hop(each, MAX_TRACE_PARTS), "attributes": dict(sorted(each.hop.attributes.items()))}
            for each in placed
        ],
    }


def _hop(placed: Placed, max_parts: int) -> HopRow:
    hop = placed.hop
    return HopRow(
        name=name(hop.name),
        service=name(hop.service),
        member_id=name(hop.member_id),
        offset_s=seconds(placed.offset_s),
        depth=placed.depth,
        ended_s=seconds(hop.ended_s),
        first_token_s=maybe_seconds(hop.first_token_s),
        parts=[
            (str(part.segment), seconds(part.start_s), seconds(part.end_s))
            for part in merged_parts(hop.parts, max_parts)
        ],
        hidden_s=_hidden(hop.hidden_s),
        error=phrase(hop.error),
    )


def _hidden(hidden_s: Mapping[str, float]) -> dict[str, float]:
    longest = sorted(hidden_s.items(), key=lambda item: item[1], reverse=True)[:MAX_HIDDEN]
    return {name(key): seconds(value) for key, value in longest}
