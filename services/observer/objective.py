"""Whether a request was what was promised: its first token in time. Pure."""

from __future__ import annotations

import enum

from services.core.attributes import ERROR_TYPE
from services.observer.model import Request


class Outcome(enum.StrEnum):
    GOOD = "good"
    # It came, or would have come, too late.
    SLOW = "slow"
    FAILED = "failed"


# What callers got wrong, or had no right to: no fault of the mesh. As routers and workers
# name it, and below as gateways do.
_CALLERS = frozenset(
    {
        *("INVALID_ARGUMENT", "MALFORMED_MESSAGE", "PROMPT_TOO_LONG", "NO_REQUEST"),
        *("UNAUTHENTICATED", "NO_CREDENTIALS", "UNKNOWN_CREDENTIALS", "METADATA_TOO_LONG"),
        *("PERMISSION_DENIED", "SEVERAL_TENANTS", "FOREIGN_TENANT", "CLASS_NOT_ALLOWED"),
        *("RATE_LIMITED", "TOO_MANY_CONCURRENT", "SLOW_CLIENT", "PLAN_EXPIRED"),
        *("INVALID_VALUE", "INVALID_JSON", "INVALID_API_KEY", "TOO_MANY_KEYS"),
        *("CONTEXT_LENGTH_EXCEEDED", "MODEL_NOT_FOUND", "TOO_MANY_CHOICES"),
        *("RATE_LIMIT_EXCEEDED", "BODY_TOO_LONG", "BODY_TIMEOUT", "UNSUPPORTED_MEDIA_TYPE"),
    }
)
_LEFT = frozenset({"CANCELLED", "CLIENT_GONE", "DEADLINE_EXCEEDED"})


def outcome_of(request: Request, slo_ttft_s: float) -> Outcome | None:
    """None for one that says nothing of the mesh.

    A caller that leaves without a token after `slo_ttft_s` leaves since it was late.
    """
    if request.ttft_s is not None:
        return Outcome.GOOD if request.ttft_s <= slo_ttft_s else Outcome.SLOW
    # Of all hops: a gateway has other words than the router under it.
    codes = {str(hop.attributes.get(ERROR_TYPE, "")).upper() for hop in request.hops if hop.error}
    if codes & _CALLERS:
        return None
    if codes & _LEFT:
        return Outcome.SLOW if request.duration_s > slo_ttft_s else None
    return Outcome.FAILED
