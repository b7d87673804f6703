"""One trace a request: W3C context in and out, spans built from ledgers."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from services.core.ledger import Ledger
from services.core.metrics import Metric

if TYPE_CHECKING:
    from services.runtime.spans import SpanExporter

Attributes: TypeAlias = Mapping[str, str | bool | int | float]
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
            or not int(trace_id, 16) * int(span_id, 16)
        ):
            return cls.new()
        tracestate = ",".join(states)
        if len(tracestate) > MAX_TRACESTATE_CHARACTERS:
            tracestate = ""
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), tracestate)

    def child(self, *, sampled: bool | None = None) -> TraceContext:
        """A new span in this trace; `sampled` settles what nobody had decided."""
        decided = self.sampled if self.sampled is not None else sampled
        return self._replace(span_id=_random_id(8), sampled=decided)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The pairs that carry it to the next hop. It must be a span: see `child`."""
        traceparent = f"00-{self.trace_id}-{self.span_id}-{int(bool(self.sampled)):02x}"
        if self.tracestate:
            return (TRACEPARENT, traceparent), (TRACESTATE, self.tracestate)
        return ((TRACEPARENT, traceparent),)


@asynccontextmanager
async def export_metrics(
    endpoint: str,
    *,
    service: str,
    member_id: str,
    metrics: Iterable[Metric],
    read: Callable[[], Mapping[str, float]],
) -> AsyncIterator[None]:
    """While this is entered; see MetricsExporter. With an empty endpoint it does nothing."""
    if not endpoint:
        yield
        return
    from services.runtime.metrics import MetricsExporter

    exporter = MetricsExporter(
        endpoint, service=service, member_id=member_id, metrics=metrics, read=read
    )
    async with exporter:
        yield


def _random_id(num_bytes: int) -> str:
    while not any(value := secrets.token_bytes(num_bytes)):
        pass
    return value.hex()


class Tracing:
    """An async context manager that exports spans; with an empty endpoint it does nothing.

    A collector that is dead or slow costs a request nothing, see SpanExporter.
    """

    def __init__(self, endpoint: str, *, service: str, member_id: str) -> None:
        self._exporter: SpanExporter | None = None
        if endpoint:
            # Only then: importing the SDK takes longer than starting a server.
            from services.runtime.spans import SpanExporter

            self._exporter = SpanExporter(endpoint, service=service, member_id=member_id)

    async def __aenter__(self) -> Tracing:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Export what is queued, as far as a short deadline lets it."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            await exporter.close()

    @property
    def enabled(self) -> bool:
        return self._exporter is not None

    def decide(self, context: TraceContext, sample_ratio: float) -> bool:
        """The caller's decision, or else the same one in every process for one trace."""
        if context.sampled is not None:
            return context.sampled
        return int(context.trace_id[16:], 16) < sample_ratio * (1 << 64)

    def record_request(
        self,
        name: str,
        context: TraceContext,
        parent_span_id: str,
        ledger: Ledger,
        attributes: Attributes,
        *,
        error: str = "",
        end_s: float | None = None,
    ) -> None:
        """Queue the span of one request's hop, and under it one for each interval.

        `context` is the hop's own span, `parent_span_id` the caller's ("" for
        none). `ledger` times are time.monotonic(); `end_s` defaults to now. A
        non-empty `error` gives the span an error status.
        """
        if self._exporter is not None and context.sampled:
            self._exporter.export_request(
                name, context, parent_span_id, ledger, attributes, error=error, end_s=end_s
            )
