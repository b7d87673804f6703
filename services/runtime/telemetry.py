"""One trace a request: W3C context in and out."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

# Of a span: texts, numbers, truth values, and lists of them.
Attributes: TypeAlias = Mapping[str, Any]
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_TRACESTATE_CHARACTERS = 512

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """Where a request stands in its trace (https://www.w3.org/TR/trace-context/)."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits; "" when the trace begins here
    sampled: bool | None = None  # None: nobody has decided yet
    tracestate: str = ""

    @classmethod
    def new(cls) -> TraceContext:
        return cls(trace_id=_random_id(16), span_id="")

    @classmethod
    def from_metadata(cls, metadata: Metadata | None) -> TraceContext:
        """The caller's context; a new trace when it has none, or a malformed one."""
        parents, states = [], []
        for key, value in metadata or ():
            if key == TRACEPARENT:
                parents.append(str(value))
            elif key == TRACESTATE:
                states.append(str(value))
        match = _TRACEPARENT.fullmatch(parents[0]) if len(parents) == 1 else None
        if match is None:
            return cls.new()
        version, trace_id, span_id, flags, more = match.groups()
        if (
            version == "ff"
            or (version == "00" and more)
            or not (trace_id.strip("0") and span_id.strip("0"))
        ):
            return cls.new()
        tracestate = ",".join(states)
        if len(tracestate) > MAX_TRACESTATE_CHARACTERS:
            tracestate = ""
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), tracestate)

    def child(self, *, sampled: bool | None = None) -> TraceContext:
        """A new span in this trace; `sampled` settles what nobody had decided."""
        decided = self.sampled if self.sampled is not None else sampled
        return TraceContext(self.trace_id, _random_id(8), decided, self.tracestate)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The pairs that carry it to the next hop. It must be a span: see `child`."""
        traceparent = f"00-{self.trace_id}-{self.span_id}-{int(bool(self.sampled)):02x}"
        if self.tracestate:
            return (TRACEPARENT, traceparent), (TRACESTATE, self.tracestate)
        return ((TRACEPARENT, traceparent),)


def _random_id(num_bytes: int) -> str:
    """Not for secrets: the system's own source costs a call of the kernel each time."""
    while not (value := random.randbytes(num_bytes).hex()).strip("0"):
        pass
    return value
