"""Protobuf to plain values and back, where more than one process needs it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError

from firsttoken.common.v1 import common_pb2
from services.core.errors import InvalidArgument
from services.core.ledger import Ledger, Segment
from services.core.sampling import Sampling
from services.runtime.interceptor import CallMetadata

TENANT_KEY = "firsttoken-tenant"
MAX_TENANT_CHARACTERS = 128
# Nothing lasts so long (a month); what is told beyond it is nothing, as is what is no number.
MAX_TOLD_MS = 2.6e9
# In the trailing metadata of a call that has failed: its ledger up to there.
LEDGER_KEY = "firsttoken-ledger-bin"

# Of each segment, the field that has its milliseconds.
_FIELDS = {segment: f"{segment}_ms" for segment in Segment}
_REPEATED = {"stop", "stop_token_ids"}
_REQUEST_CLASSES = frozenset(common_pb2.RequestClass.values())


def sampling_from_proto(message: common_pb2.SamplingParams) -> Sampling:
    """Absent fields become the defaults of `Sampling`; nothing is checked."""
    given = {field.name: value for field, value in message.ListFields()}
    for name in given.keys() & _REPEATED:
        given[name] = tuple(given[name])
    return Sampling(**given)


def check_sampling(sampling: Sampling, *, max_context_tokens: int, vocabulary_size: int) -> None:
    """Raises InvalidArgument naming every field out of its bounds."""
    violations = sampling.violations(
        max_context_tokens=max_context_tokens, vocabulary_size=vocabulary_size
    )
    if violations:
        raise InvalidArgument(violations)


def is_batch(request_class: common_pb2.RequestClass.ValueType) -> bool:
    """Raises InvalidArgument for a class that this version does not know."""
    if request_class not in _REQUEST_CLASSES:
        raise InvalidArgument.of("request_class", f"is no request class; got {request_class}")
    return request_class == common_pb2.REQUEST_CLASS_BATCH


def tenant_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The caller's tenant; "" when it names none."""
    tenant = next((value for key, value in metadata or () if key == TENANT_KEY), "")
    ok = isinstance(tenant, str) and tenant.isascii() and (tenant.isprintable() or not tenant)
    if not ok or len(tenant) > MAX_TENANT_CHARACTERS:
        raise InvalidArgument.of(
            f"metadata.{TENANT_KEY}",
            f"must be at most {MAX_TENANT_CHARACTERS} printable ASCII characters",
        )
    return str(tenant)


def ledger_to_proto(ledger: Ledger) -> common_pb2.Ledger:
    spent_ms = {_FIELDS[segment]: spent_s * 1e3 for segment, spent_s in ledger.sums_s()}
    hidden_ms = {name: hidden_s * 1e3 for name, hidden_s in ledger.hidden_s.items()}
    return common_pb2.Ledger(total_ms=ledger.total_s * 1e3, hidden_ms=hidden_ms, **spent_ms)


def spend_callee(ledger: Ledger, callee: common_pb2.Ledger, *, seen_s: float) -> None:
    """Enter what another process spent.

    `seen_s`: from the call to its first token or failure, on this process's clock. What the
    callee did not have is transfer; what it had and does not own stays unowned.
    """
    for segment, field in _FIELDS.items():
        if spent_s := _told_s(getattr(callee, field)):
            ledger.spend(segment, spent_s)
    for name, hidden_ms in callee.hidden_ms.items():
        ledger.hide(name, _told_s(hidden_ms))
    ledger.spend(Segment.TRANSFER, seen_s - _told_s(callee.total_ms))


def _told_s(duration_ms: float) -> float:
    """One that was worked out, such as transfer, may be less than nothing by a little."""
    return duration_ms / 1000 if abs(duration_ms) <= MAX_TOLD_MS else 0.0


def tell_ledger(call: CallMetadata, ledger: Ledger) -> None:
    """To whoever called, with the error that is about to be raised."""
    told = ledger_to_proto(ledger).SerializeToString()
    call.set_trailing_metadata(((LEDGER_KEY, told),))


def spend_failed_call(ledger: Ledger, error: grpc.aio.AioRpcError, *, seen_s: float) -> None:
    """The same of a call that has failed. Where its callee told nothing, that stays unowned."""
    for key, value in error.trailing_metadata():
        if key == LEDGER_KEY and isinstance(value, bytes):
            with suppress(DecodeError):
                spend_callee(ledger, common_pb2.Ledger.FromString(value), seen_s=seen_s)
