"""The ledger of a call, as its caller sees it."""

from __future__ import annotations

from firsttoken.common.v1 import common_pb2

# Names of the segments of TTFT, in the order a request meets them.
SEGMENTS = tuple(
    field.name.removesuffix("_ms")
    for field in common_pb2.Ledger.DESCRIPTOR.fields
    if field.name not in ("total_ms", "hidden_ms")
)


def as_seen(told: common_pb2.Ledger, seen_ms: float) -> dict[str, float]:
    """Segment to milliseconds; what the callee did not have of `seen_ms` is transfer."""
    ledger = {name: getattr(told, f"{name}_ms") for name in SEGMENTS}
    ledger["transfer"] += seen_ms - told.total_ms
    return ledger
