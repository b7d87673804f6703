"""Hops of requests as spans, on their way to an OTLP collector."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from services.core.attributes import HIDDEN
from services.observer.model import Hop

MAX_QUEUED_SPANS = 8192
EXPORT_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0
MAX_TRACESTATE_MEMBERS = 32
# Processes that come and go.
MAX_IDENTITIES = 256

_TRACESTATE_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_\-*/@]{0,255})="
    r"([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
_UNSET = Status(StatusCode.UNSET)
# What the collector gets has been chosen already.
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("firsttoken")
_EXPORTER_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
)


class _Identity(NamedTuple):
    """Of a process. On each span too: not every reader of spans shows resources."""

    attributes: Mapping[str, Any]
    resource: Resource


class SpanExporter:
    """Exports on a thread of its own.

    A collector that is dead or slow costs nothing but spans: the queue is bounded,
    the oldest are dropped, and one line in the log says so.
    """

    def __init__(self, endpoint: str) -> None:
        self._identities: dict[tuple[str, str], _Identity] = {}
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

    def export(self, hop: Hop) -> None:
        """Queue its span, and under it one for each interval that it measured."""
        identity = self._identity(hop)
        trace_id, trace_state = int(hop.trace_id, 16), _trace_state(hop.tracestate)

        def context(span_id: int, *, remote: bool = False) -> SpanContext:
            return SpanContext(
                trace_id, span_id, is_remote=remote, trace_flags=_SAMPLED, trace_state=trace_state
            )

        def unix_ns(since_arrival_s: float) -> int:
            return int((hop.arrived_unix_s + since_arrival_s) * 1e9)

        own = context(int(hop.span_id, 16))
        first_token = [] if hop.first_token_s is None else [hop.first_token_s]
        self._emit(
            hop.name,
            own,
            identity,
            parent=context(int(hop.parent_span_id, 16), remote=True)
            if hop.parent_span_id
            else None,
            start_ns=unix_ns(0.0),
            end_ns=unix_ns(hop.ended_s),
            attributes=_attributes(hop),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, hop.error) if hop.error else _UNSET,
            events=[Event("first_token", timestamp=unix_ns(at_s)) for at_s in first_token],
        )
        for segment, start_s, end_s in hop.parts:
            self._emit(
                str(segment),
                context(_random_span_id()),
                identity,
                parent=own,
                start_ns=unix_ns(start_s),
                end_ns=unix_ns(end_s),
            )

    def _identity(self, hop: Hop) -> _Identity:
        key = hop.service, hop.member_id
        if key not in self._identities:
            if len(self._identities) >= MAX_IDENTITIES:
                del self._identities[next(iter(self._identities))]
            attributes = {"service.name": hop.service, "service.instance.id": hop.member_id}
            self._identities[key] = _Identity(attributes, Resource(attributes))
        return self._identities[key]

    def _emit(
        self,
        name: str,
        context: SpanContext,
        identity: _Identity,
        *,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Any] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = _UNSET,
        events: Iterable[Event] = (),
    ) -> None:
        span = ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=identity.resource,
            attributes={**identity.attributes, **(attributes or {})},
            events=tuple(events),
            kind=kind,
            status=status,
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=_SCOPE,
        )
        self._processor.on_end(span)


def _attributes(hop: Hop) -> dict[str, Any]:
    hidden_ms = {f"{HIDDEN}{name}": spent_s * 1e3 for name, spent_s in hop.hidden_s.items()}
    return {**hop.attributes, **hidden_ms}


def _random_span_id() -> int:
    return secrets.randbits(64) or 1


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
