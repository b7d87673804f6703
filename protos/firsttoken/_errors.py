"""What a call into the mesh can fail with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from firsttoken._ledger import as_seen
from firsttoken.common.v1 import common_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_LEDGER_KEY = "firsttoken-ledger-bin"


class Violation(NamedTuple):
    """A field of the request that breaks a rule: its dotted path, and what it must be."""

    field: str
    description: str


class _Details(NamedTuple):
    reason: str = ""
    violations: tuple[Violation, ...] = ()
    retry_delay_s: float | None = None


class MeshError(Exception):
    """The mesh's answer is an error.

    `reason` is stable, in UPPER_SNAKE, for programs; `message` is for people.
    `retry_delay_s` says when it makes sense to come back. The three that come from
    google.rpc details stay empty unless googleapis-common-protos is installed.

    `ledger` says where the time went until then, segment to milliseconds. With
    `residual_ms`, which no segment owns, it adds up to `elapsed_ms`, as this client measured
    it. It is empty where the mesh told none: it was not reached, is gone, or did not know the
    caller. It is empty, too, once the first token has come.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_delay_s: float | None = None,
        ledger: Mapping[str, float] | None = None,
        elapsed_ms: float = 0.0,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_delay_s = retry_delay_s
        self.ledger = dict(ledger or {})
        self.elapsed_ms = elapsed_ms

    @property
    def residual_ms(self) -> float:
        return self.elapsed_ms - sum(self.ledger.values()) if self.ledger else 0.0


def to_mesh_error(error: grpc.aio.AioRpcError, *, elapsed_ms: float = 0.0) -> MeshError:
    """`elapsed_ms`: from the call on."""
    details = _parse_details(error)
    told = told_ledger(error)
    ledger = as_seen(told, elapsed_ms) if told is not None and elapsed_ms else None
    return MeshError(
        error.code(),
        error.details() or error.code().name,
        **details._asdict(),
        ledger=ledger,
        elapsed_ms=elapsed_ms,
    )


def told_ledger(error: grpc.aio.AioRpcError) -> common_pb2.Ledger | None:
    """None where the mesh told none."""
    for key, value in error.trailing_metadata():
        if key == _LEDGER_KEY and isinstance(value, bytes):
            try:
                return common_pb2.Ledger.FromString(value)
            except DecodeError:
                return None
    return None


def with_ledger(error: grpc.aio.AioRpcError, ledger: common_pb2.Ledger) -> grpc.aio.AioRpcError:
    """The same, with another ledger."""
    kept = (pair for pair in error.trailing_metadata() if pair[0] != _LEDGER_KEY)
    return grpc.aio.AioRpcError(
        error.code(),
        error.initial_metadata(),
        grpc.aio.Metadata(*kept, (_LEDGER_KEY, ledger.SerializeToString())),
        details=error.details(),
        debug_error_string=error.debug_error_string(),
    )


def _parse_details(error: grpc.aio.AioRpcError) -> _Details:
    found = [value for key, value in error.trailing_metadata() if key == _DETAILS_KEY]
    if not found:
        return _Details()
    try:
        from google.rpc import error_details_pb2, status_pb2
    except ImportError:
        return _Details()
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_delay_s = None
    for packed in status_pb2.Status.FromString(found[0]).details:
        if packed.Unpack(retry):
            retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            _ = packed.Unpack(info) or packed.Unpack(bad_request)
    violations = tuple(
        Violation(each.field, each.description) for each in bad_request.field_violations
    )
    return _Details(info.reason, violations, retry_delay_s)
