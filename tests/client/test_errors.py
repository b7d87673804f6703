from __future__ import annotations

import grpc
from grpc.aio import AioRpcError, Metadata

from firsttoken._errors import Violation, to_mesh_error
from services.core import errors
from services.runtime.status import to_status


def as_received(code: grpc.StatusCode, error: errors.MeshError) -> AioRpcError:
    details = to_status(error).SerializeToString()
    trailing = Metadata(("grpc-status-details-bin", details))
    return AioRpcError(code, Metadata(), trailing, details=error.message)


def test_reads_which_fields_broke_which_rules() -> None:
    violations = [errors.Violation("text", "must not be empty"), errors.Violation("model", "bad")]
    error = to_mesh_error(
        as_received(grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument(violations))
    )

    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "INVALID_ARGUMENT"
    assert error.violations == (
        Violation("text", "must not be empty"),
        Violation("model", "bad"),
    )
    assert str(error) == "INVALID_ARGUMENT: text: must not be empty; model: bad"


def test_reads_when_to_come_back() -> None:
    overloaded = errors.Overloaded("full", reason="QUEUE_FULL", retry_delay_s=1.5)
    error = to_mesh_error(as_received(grpc.StatusCode.RESOURCE_EXHAUSTED, overloaded))

    assert (error.reason, error.retry_delay_s) == ("QUEUE_FULL", 1.5)


def test_does_without_details() -> None:
    bare = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata())
    error = to_mesh_error(bare)

    assert (error.message, error.reason, error.violations) == ("UNAVAILABLE", "", ())
    assert error.retry_delay_s is None
