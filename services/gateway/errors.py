"""Errors as OpenAI's clients know them, and what a gRPC status becomes among them.

gRPC status          HTTP  type                    headers
INVALID_ARGUMENT     400   invalid_request_error
UNAUTHENTICATED      401   invalid_request_error   WWW-Authenticate
PERMISSION_DENIED    403   permission_error
NOT_FOUND            404   invalid_request_error
ABORTED              409   server_error
RESOURCE_EXHAUSTED   429   rate_limit_error        Retry-After, retry-after-ms
UNIMPLEMENTED        501   server_error
UNAVAILABLE          503   server_error            Retry-After, retry-after-ms
CANCELLED            503   server_error
DEADLINE_EXCEEDED    504   server_error
any other            500   server_error
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

from firsttoken.client import MeshError
from services.core import errors
from services.core.errors import Violation, describe

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

_HTTP = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, INVALID_REQUEST),
    grpc.StatusCode.UNAUTHENTICATED: (401, INVALID_REQUEST),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, INVALID_REQUEST),
    grpc.StatusCode.ABORTED: (409, SERVER_ERROR),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNIMPLEMENTED: (501, SERVER_ERROR),
    grpc.StatusCode.UNAVAILABLE: (503, SERVER_ERROR),
    grpc.StatusCode.CANCELLED: (503, SERVER_ERROR),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, SERVER_ERROR),
}
_OTHER = (500, SERVER_ERROR)
# OpenAI's names for what the mesh calls otherwise.
_CODES = {
    "INVALID_ARGUMENT": "invalid_value",
    "PROMPT_TOO_LONG": CONTEXT_LENGTH_EXCEEDED,
    "RATE_LIMITED": "rate_limit_exceeded",
    "TOO_MANY_CONCURRENT": "rate_limit_exceeded",
    "NO_CREDENTIALS": "invalid_api_key",
    "UNKNOWN_CREDENTIALS": "invalid_api_key",
    "INTERNAL": "internal_error",
}
_DEFAULT_RETRY_S = 1.0


class ApiError(Exception):
    """An answer that is an error. `param` is a field of the request in OpenAI's spelling."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class ClientGone(Exception):
    """The client has left: there is nobody to answer."""


def bad_request(violations: Iterable[Violation], *, code: str = "invalid_value") -> ApiError:
    """Names every broken field in the message, and the first as `param`."""
    found = list(violations)
    return ApiError(400, describe(found), param=found[0].field, code=code)


def model_not_found(model: str, *, served: str) -> ApiError:
    return ApiError(
        404,
        f"the model {model[:128]!r} does not exist; {served!r} is served here",
        param="model",
        code="model_not_found",
    )


def unauthenticated(message: str) -> ApiError:
    return ApiError(
        401, message, code="invalid_api_key", headers={"www-authenticate": 'Bearer realm="mesh"'}
    )


def retry_headers(delay_s: float) -> dict[str, str]:
    return {
        "retry-after": str(max(1, math.ceil(delay_s))),
        "retry-after-ms": str(max(1, math.ceil(delay_s * 1000))),
    }


def unavailable(message: str, *, code: str) -> ApiError:
    return ApiError(
        503, message, type=SERVER_ERROR, code=code, headers=retry_headers(_DEFAULT_RETRY_S)
    )


def internal_error() -> ApiError:
    return ApiError(500, "internal error", type=SERVER_ERROR, code="internal_error")


def from_core(error: errors.MeshError) -> ApiError:
    """One that was raised here."""
    code = grpc.StatusCode[error.status]
    reason, delay_s = error.reason, error.retry_delay_s
    return from_mesh(MeshError(code, error.message, reason=reason, retry_delay_s=delay_s), str)


def from_mesh(error: MeshError, to_param: Callable[[str], str]) -> ApiError:
    """`to_param`: from a dotted field of the mesh's to the name that the caller used."""
    status, kind = _HTTP.get(error.code, _OTHER)
    reason = error.reason or error.code.name
    code = _CODES.get(reason, reason.lower())
    if error.violations:
        renamed = [Violation(to_param(field), text) for field, text in error.violations]
        api_error = bad_request(renamed, code=code)
        api_error.status, api_error.type = status, kind
        return api_error
    headers: dict[str, str] = {}
    if status in (429, 503) or error.retry_delay_s is not None:
        delay_s = _DEFAULT_RETRY_S if error.retry_delay_s is None else error.retry_delay_s
        headers = retry_headers(delay_s)
    if status == 401:
        headers |= unauthenticated("").headers
    return ApiError(status, error.message, type=kind, code=code, headers=headers)
