from __future__ import annotations

import grpc
import pytest

from firsttoken.client import MeshError, Violation
from services.core.errors import Unauthenticated
from services.gateway.errors import from_core, from_mesh

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (Code.INVALID_ARGUMENT, 400, "invalid_request_error"),
        (Code.UNAUTHENTICATED, 401, "invalid_request_error"),
        (Code.PERMISSION_DENIED, 403, "permission_error"),
        (Code.NOT_FOUND, 404, "invalid_request_error"),
        (Code.ABORTED, 409, "server_error"),
        (Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
        (Code.UNIMPLEMENTED, 501, "server_error"),
        (Code.UNAVAILABLE, 503, "server_error"),
        (Code.CANCELLED, 503, "server_error"),
        (Code.DEADLINE_EXCEEDED, 504, "server_error"),
        (Code.INTERNAL, 500, "server_error"),
        (Code.UNKNOWN, 500, "server_error"),
    ],
)
def test_every_status_has_its_http_form(code: Code, status: int, kind: str) -> None:
    error = from_mesh(MeshError(code, "it went wrong", reason="SOME_REASON"), str)

    assert (error.status, error.type, error.code) == (status, kind, "some_reason")
    assert error.body() == {
        "error": {"message": "it went wrong", "type": kind, "param": None, "code": "some_reason"}
    }
    assert ("retry-after" in error.headers) == (status in (429, 503))
    assert ("www-authenticate" in error.headers) == (status == 401)


def test_broken_fields_are_told_in_the_caller_s_words() -> None:
    violations = (Violation("a", "must be 1"), Violation("b", "must be 2"))
    mesh_error = MeshError(Code.INVALID_ARGUMENT, "a: …", reason="X", violations=violations)

    error = from_mesh(mesh_error, {"a": "messages", "b": "top_p"}.__getitem__)

    assert (error.param, error.message) == ("messages", "messages: must be 1; top_p: must be 2")


@pytest.mark.parametrize(
    ("delay_s", "seconds", "milliseconds"),
    [(0.0, "1", "1"), (0.0301, "1", "31"), (1.0, "1", "1000"), (2.5, "3", "2500")],
)
def test_when_to_come_back_is_never_too_early(
    delay_s: float, seconds: str, milliseconds: str
) -> None:
    error = from_mesh(MeshError(Code.RESOURCE_EXHAUSTED, "full", retry_delay_s=delay_s), str)

    assert error.headers == {"retry-after": seconds, "retry-after-ms": milliseconds}


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("", "resource_exhausted"),
        ("RATE_LIMITED", "rate_limit_exceeded"),
        ("TOO_MANY_CONCURRENT", "rate_limit_exceeded"),
        ("PROMPT_TOO_LONG", "context_length_exceeded"),
        ("QUEUE_FULL", "queue_full"),
    ],
)
def test_codes_are_openai_s_where_it_has_one(reason: str, code: str) -> None:
    assert from_mesh(MeshError(Code.RESOURCE_EXHAUSTED, "no", reason=reason), str).code == code


def test_what_is_refused_here_looks_like_what_the_mesh_refuses() -> None:
    error = from_core(Unauthenticated("who calls?", reason="NO_CREDENTIALS"))

    assert (error.status, error.code) == (401, "invalid_api_key")
    assert "www-authenticate" in error.headers
