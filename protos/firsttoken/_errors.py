"""What a call into the mesh can fail with."""

from __future__ import annotations

from typing import NamedTuple

import grpc

_DETAILS_KEY = "grpc-status-details-bin"


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
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_delay_s = retry_delay_s


def to_mesh_error(error: grpc.aio.AioRpcError) -> MeshError:
    details = _parse_details(error)
    return MeshError(error.code(), error.details() or error.code().name, **details._asdict())


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
