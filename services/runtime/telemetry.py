"""One trace a request: W3C context in and out, spans built from ledgers, OTLP export."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NamedTuple, TypeAlias

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from services.core.ledger import Ledger

Attributes: TypeAlias = Mapping[str, str | bool | int | float]
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_TRACESTATE_CHARACTERS = 512
MAX_TRACESTATE_MEMBERS = 32
MAX_QUEUED_SPANS = 4096
EXPORT_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACESTATE_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/@]{0,255})="
    r"([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
_UNSET = Status(StatusCode.UNSET)
_SCOPE = InstrumentationScope("firsttoken")
_EXPORTER_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
)


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


def _random_id(num_bytes: int) -> str:
    while not any(value := secrets.token_bytes(num_bytes)):
        pass
    return value.hex()


class Tracing:
    """An async context manager that exports spans; with an empty endpoint it does nothing.

    Export runs on a thread of its own. A collector that is dead or slow costs a
    request nothing: the queue is bounded, the oldest spans are dropped, and one
    line in the log says so.
    """

    def __init__(self, endpoint: str, *, service: str, member_id: str) -> None:
        self._identity = {"service.name": service, "service.instance.id": member_id}
        self._resource = Resource(self._identity)
        self._exporter: OTLPSpanExporter | None = None
        self._processor: BatchSpanProcessor | None = None
        if endpoint:
            self._one_line = _OneLine(endpoint)
            for name in _EXPORTER_LOGGERS:
                logging.getLogger(name).addFilter(self._one_line)
            self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
            self._processor = BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=EXPORT_INTERVAL_S * 1000,
            )

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
        processor, self._processor = self._processor, None
        exporter, self._exporter = self._exporter, None
        if processor is None or exporter is None:
            return
        flushing = asyncio.ensure_future(asyncio.to_thread(processor.shutdown))
        try:
            await asyncio.wait({flushing}, timeout=CLOSE_TIMEOUT_S)
        finally:
            # Ends the call in progress and the wait for another try; no-op when flushed.
            exporter.shutdown()
        await flushing
        for name in _EXPORTER_LOGGERS:
            logging.getLogger(name).removeFilter(self._one_line)

    @property
    def enabled(self) -> bool:
        return self._processor is not None

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
        if self._processor is None or not context.sampled:
            return
        now_s = time.monotonic()
        offset_ns = time.time_ns() - int(now_s * 1e9)

        def wall_ns(monotonic_s: float) -> int:
            return offset_ns + int(monotonic_s * 1e9)

        span_context = _span_context(context)
        events = []
        if ledger.first_token_s is not None:
            events.append(Event("first_token", timestamp=wall_ns(ledger.first_token_s)))
        self._emit(
            name,
            span_context,
            parent=_span_context(context._replace(span_id=parent_span_id), remote=True),
            start_ns=wall_ns(ledger.arrived_s),
            end_ns=wall_ns(now_s if end_s is None else end_s),
            attributes={**self._identity, **attributes},
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, error) if error else _UNSET,
            events=events,
        )
        for segment, start_s, finish_s in ledger.intervals:
            self._emit(
                str(segment),
                _span_context(context.child()),
                parent=span_context,
                start_ns=wall_ns(start_s),
                end_ns=wall_ns(finish_s),
                attributes=self._identity,
            )

    def _emit(
        self,
        name: str,
        context: SpanContext | None,
        *,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = _UNSET,
        events: Iterable[Event] = (),
    ) -> None:
        span = ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=tuple(events),
            kind=kind,
            status=status,
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=_SCOPE,
        )
        assert self._processor is not None
        self._processor.on_end(span)


def _span_context(context: TraceContext, *, remote: bool = False) -> SpanContext | None:
    if not context.span_id:
        return None
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
        trace_state=_trace_state(context.tracestate),
    )


def _trace_state(header: str) -> TraceState | None:
    """None when malformed: the SDK's own parser would log each one."""
    entries: dict[str, str] = {}
    for member in header.split(","):
        if not (member := member.strip(" \t")):
            continue
        match = _TRACESTATE_MEMBER.fullmatch(member)
        if match is None or len(entries) == MAX_TRACESTATE_MEMBERS:
            return None
        entries[match[1]] = match[2]
    return TraceState(list(entries.items())) if entries else None


class _OneLine(logging.Filter):
    """Lets one record through, in our words; the exporter repeats itself for ever."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._line = f"spans are dropped: the collector at {endpoint} does not take them"
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if self._said or record.levelno < logging.WARNING:
            return False
        self._said = True
        record.msg, record.args, record.exc_info = self._line, (), None
        return True
