"""What a process tells, as values: checked, since a process may be of another version. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from firsttoken.observer.v1 import observer_pb2
from services.core.errors import InvalidArgument
from services.core.keys import split_keys
from services.core.ledger import Segment
from services.observer.model import Hop, Part
from services.observer.prompts import ToldPrompt
from services.runtime import hops

MAX_ID_CHARACTERS = 128
MAX_NAME_CHARACTERS = 200
MAX_ATTRIBUTES = 128
MAX_VALUE_CHARACTERS = 4096
MAX_PARTS = 4096
# As a time of day in 2096; together, two fit the nanoseconds of a span.
MAX_SECONDS = 4e9
# Of a metric: bytes of a year fit, and sums of all series what JSON takes.
MAX_LEVEL = 1e15
# Of hops; sums of all members' fit what JSON takes.
MAX_DROPPED = 10**12
# What OpenTelemetry takes as a whole number.
_INT64 = range(-(2**63), 2**63)

_TRACE_ID = re.compile("[0-9a-f]{32}")
_SPAN_ID = re.compile("[0-9a-f]{16}")
_SEGMENTS = {str(segment): segment for segment in Segment}


class Teller(NamedTuple):
    """The process at the other end of a stream."""

    member_id: str
    # "router", "worker", "tokenizer", "gateway" or "kvstore".
    service: str
    host: str
    pid: int


def read_hops(batch: bytes, teller: Teller) -> list[Hop]:
    """Raises InvalidArgument for what is no batch of hops."""
    try:
        return [_to_hop(row, teller) for row in hops.decode(batch)]
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidArgument.of("hops_json", f"must be hops of this version: {error}") from None


def read_prompt(message: observer_pb2.Prompt) -> ToldPrompt:
    """Raises InvalidArgument for what is no prompt."""
    try:
        return ToldPrompt(
            trace_id=message.trace_id.hex(),
            span_id=message.span_id.hex(),
            prefix_keys=split_keys(message.prefix_keys),
            first_token=message.first_token,
            token_ids=message.token_ids,
            tenant=message.tenant[:MAX_NAME_CHARACTERS],
            block_tokens=message.block_tokens,
        )
    except ValueError as error:
        raise InvalidArgument.of("prompts.prefix_keys", str(error)) from None


def read_eviction(message: observer_pb2.Eviction) -> list[bytes]:
    """The keys of the blocks. Raises InvalidArgument where they are none, or nobody's."""
    if len(message.holder_id) > MAX_ID_CHARACTERS:
        rule = f"must have at most {MAX_ID_CHARACTERS} characters"
        raise InvalidArgument.of("evictions.holder_id", rule)
    try:
        return split_keys(message.prefix_keys)
    except ValueError as error:
        raise InvalidArgument.of("evictions.prefix_keys", str(error)) from None


def _to_hop(row: hops.Hop, teller: Teller) -> Hop:
    parent_span_id = _text(row.parent_span_id)
    if not (
        _TRACE_ID.fullmatch(row.trace_id)
        and _SPAN_ID.fullmatch(row.span_id)
        and (not parent_span_id or _SPAN_ID.fullmatch(parent_span_id))
    ):
        raise ValueError("malformed ids")
    if len(row.parts) > MAX_PARTS:
        raise ValueError("too many parts")
    first_token_s = None if row.first_token_s is None else _seconds(row.first_token_s)
    return Hop(
        name=_text(row.name)[:MAX_NAME_CHARACTERS],
        service=teller.service,
        member_id=teller.member_id,
        host=teller.host,
        trace_id=row.trace_id,
        span_id=row.span_id,
        parent_span_id=parent_span_id,
        tracestate=_text(row.tracestate),
        sampled=row.sampled is True,
        arrived_unix_s=_seconds(row.arrived_unix_ns / 1e9),
        ended_s=_seconds(row.ended_s),
        first_token_s=first_token_s,
        parts=tuple(
            Part(_SEGMENTS[segment], _seconds(start_s), _seconds(end_s))
            for segment, start_s, end_s in row.parts
        ),
        spent_s={_SEGMENTS[segment]: _seconds(spent_s) for segment, spent_s in row.spent_s},
        hidden_s={_text(name): _seconds(spent_s) for name, spent_s in row.hidden_s},
        error=_text(row.error)[:MAX_VALUE_CHARACTERS],
        attributes=_attributes(row.attributes),
    )


def _seconds(value: Any) -> float:
    if not isinstance(value, float | int) or not abs(value) <= MAX_SECONDS:
        raise ValueError(f"{value!r} is no duration")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """As OpenTelemetry has them: single values, or lists of them; others are left out."""
    if not isinstance(given, dict) or len(given) > MAX_ATTRIBUTES:
        raise ValueError(f"attributes must be an object of at most {MAX_ATTRIBUTES}")
    found: dict[str, Any] = {}
    for name, value in given.items():
        _text(name)
        if isinstance(value, str):
            found[name] = value[:MAX_VALUE_CHARACTERS]
        elif _is_number(value) or _is_plain_list(value):
            found[name] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value in _INT64)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) or _is_number(v) for v in value)
