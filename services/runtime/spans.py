"""Spans from ledgers, on their way to an OTLP collector."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from services.core.ledger import Ledger
from services.runtime.status import MAX_MESSAGE_BYTES, clip
from services.runtime.telemetry import Attributes, TraceContext

MAX_QUEUED_SPANS = 4096
EXPORT_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
MAX_TRACESTATE_MEMBERS = 32

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


class SpanExporter:
    """Exports on a thread of its own.

    A collector that is dead or slow costs a request nothing: the queue is bounded,
    the oldest spans are dropped, and one line in the log says so.
    """

    def __init__(self, endpoint: str, *, service: str, member_id: str) -> None:
        self._identity = {"service.name": service, "service.instance.id": member_id}
        self._resource = Resource(self._identity)
        self._one_line = _OneLine(endpoint)
        for name in _EXPORTER_LOGGERS:
            logging.getLogger(name).addFilter(self._one_line)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            schedule_delay_millis=EXPORT_INTERVAL_S * 1000,
        )

    async def close(self) -> None:
        """Export what is queued, as far as CLOSE_TIMEOUT_S lets it. To be called once."""
        flushing = asyncio.ensure_future(asyncio.to_thread(self._processor.shutdown))
        try:
            await asyncio.wait({flushing}, timeout=CLOSE_TIMEOUT_S)
        finally:
            if not flushing.done():
                # Ends the call in progress and the wait for another try.
                self._exporter.shutdown()
        await flushing
        for name in _EXPORTER_LOGGERS:
            logging.getLogger(name).removeFilter(self._one_line)

    def export_request(
        self,
        name: str,
        context: TraceContext,
        parent_span_id: str,
        ledger: Ledger,
        attributes: Attributes,
        *,
        error: str,
        end_s: float | None,
    ) -> None:
        """See Tracing.record_request."""
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
            status=Status(StatusCode.ERROR, clip(error, MAX_MESSAGE_BYTES)) if error else _UNSET,
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
        self._line = f"telemetry is dropped: the collector at {endpoint} does not take it"
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if self._said or record.levelno < logging.WARNING:
            return False
        self._said = True
        record.msg, record.args, record.exc_info = self._line, (), None
        return True
