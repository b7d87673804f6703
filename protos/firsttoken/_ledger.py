"""The ledger of a call, as its caller sees it."""

from __future__ import annotations

from firsttoken.common.v1 import common_pb2

# Names of the segments of TTFT, in the order a request meets them.
SEGMENTS = tuple(
    field.name.removesuffix("_ms")
    for field in common_pb2.Ledger.DESCRIPTOR.fields
    if field.name not in ("total_ms", "hidden_ms")
)
# Of each, the field that has its milliseconds.
_FIELDS = tuple((name, f"{name}_ms") for name in SEGMENTS)


def spend(own: common_pb2.Ledger, callee: common_pb2.Ledger, *, seen_s: float) -> None:
    """Add what a callee spent of `seen_s`; what it did not have of that is transfer."""
    for _, field in _FIELDS:
        if spent_ms := getattr(callee, field):
            setattr(own, field, getattr(own, field) + spent_ms)
    own.transfer_ms += seen_s * 1e3 - callee.total_ms
    for name, hidden_ms in callee.hidden_ms.items():
        own.hidden_ms[name] += hidden_ms


def as_seen(told: common_pb2.Ledger, seen_ms: float) -> dict[str, float]:
    """Segment to milliseconds; what the callee did not have of `seen_ms` is transfer."""
    ledger = {name: getattr(told, field) for name, field in _FIELDS}
    ledger["transfer"] += seen_ms - told.total_ms
    return ledger
