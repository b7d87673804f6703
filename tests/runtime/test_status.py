from __future__ import annotations

import base64
from urllib.parse import quote

import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import InvalidArgument, MeshError, Overloaded, Violation
from services.runtime.status import bound, clip, to_status

SOFT_LIMIT_BYTES = 8 << 10
# What is in the trailers besides.
OTHER_TRAILERS_BYTES = 512


def trailer_bytes(status: status_pb2.Status) -> int:
    return len(quote(status.message, safe="")) + len(base64.b64encode(status.SerializeToString()))


def violations_of(status: status_pb2.Status) -> list[Violation]:
    request = error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(request)
    return [Violation(each.field, each.description) for each in request.field_violations]


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument.of("model", "must be another; got " + "g" * 100_000),
        InvalidArgument.of("f" * 100_000, "is no setting"),
        InvalidArgument.of("\U0001f600" * 1000, "\U0001f600" * 1000),
        InvalidArgument.of("model", "%" * 10_000),
        InvalidArgument.of("model", "\ud800"),
        InvalidArgument([Violation(f"stop[{i}]", "must be longer") for i in range(5000)]),
        InvalidArgument([Violation("", "")] * 100_000),
        InvalidArgument([Violation("f" * 1000, "d" * 1000)] * 100),
        Overloaded("\n" * 100_000, reason="QUEUE_FULL", retry_delay_s=1.0),
    ],
    ids=["text", "field", "wide", "percents", "surrogate", "many", "empty", "both", "message"],
)
def test_every_status_fits_into_the_trailers(error: MeshError) -> None:
    status = to_status(error)

    assert trailer_bytes(status) < SOFT_LIMIT_BYTES - OTHER_TRAILERS_BYTES
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == error.reason
    assert bool(violations_of(status)) == isinstance(error, InvalidArgument)


@given(
    st.lists(st.builds(Violation, st.text(max_size=300), st.text(max_size=900)), max_size=40),
    st.text(max_size=2000),
)
def test_any_status_fits(violations: list[Violation], message: str) -> None:
    for error in (InvalidArgument(violations), MeshError(message)):
        assert trailer_bytes(to_status(error)) < SOFT_LIMIT_BYTES - OTHER_TRAILERS_BYTES


def test_what_fits_is_said_in_full() -> None:
    error = InvalidArgument([Violation("a.b", "must be größer"), Violation("c", "must exist")])

    assert bound(error) == (error.message, error.violations)
    assert bound(MeshError("broken")) == ("broken", ())


def test_violations_beyond_the_room_are_counted() -> None:
    error = InvalidArgument([Violation(f"stop[{i}]", "must not be empty") for i in range(1000)])

    message, violations = bound(error)

    assert violations == error.violations[: len(violations)]
    assert len(violations) >= 20
    assert message.endswith(f"; and {1000 - len(violations)} more")


def test_a_text_is_cut_between_characters_and_says_so() -> None:
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdefg", 6) == "abc..."
    assert clip("aäö", 13) == "aäö"
    assert clip("aäöü", 13) == "aä..."
    assert clip("", 6) == ""
