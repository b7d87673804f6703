"""An error as a gRPC status that fits into the trailers of a call.

gRPC drops a call whose trailers are longer than 8 KiB, and its status with it. The
message is in there twice: percent-encoded, and with the details in base64. Texts are
therefore cut, and violations beyond the room for them are only counted: code and
reason always arrive.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from services.core.errors import InvalidArgument, MeshError, Violation, describe

DOMAIN = "firsttoken"
# In percent-encoded bytes. Together they leave a quarter of the trailers free.
MAX_FIELD_BYTES = 160
MAX_DESCRIPTION_BYTES = 640
MAX_MESSAGE_BYTES = 1600

# What tags and separators add to each violation, in message and details.
_OVERHEAD_BYTES = 8
_CUT = "..."


class Bounded(NamedTuple):
    """Texts of an error that fit; `violations` are the first of them."""

    message: str
    violations: tuple[Violation, ...]


def to_status(error: MeshError) -> status_pb2.Status:
    message, violations = bound(error)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if violations:
        found = [
            error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
            for field, description in violations
        ]
        details.append(error_details_pb2.BadRequest(field_violations=found))
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(
        code=code_pb2.Code.Value(error.status),
        message=message,
        details=[_pack(detail) for detail in details],
    )


def read_violations(details: bytes) -> tuple[Violation, ...]:
    """`details`: of a status that another service gave. Raises DecodeError."""
    bad_request = error_details_pb2.BadRequest()
    for packed in status_pb2.Status.FromString(details).details:
        if packed.Unpack(bad_request):
            break
    found = bad_request.field_violations
    return tuple(Violation(each.field, each.description) for each in found)


def bound(error: MeshError) -> Bounded:
    if not isinstance(error, InvalidArgument):
        return Bounded(clip(error.message, MAX_MESSAGE_BYTES), ())
    kept: list[Violation] = []
    room = MAX_MESSAGE_BYTES
    for field, description in error.violations:
        violation = Violation(
            clip(field, MAX_FIELD_BYTES), clip(description, MAX_DESCRIPTION_BYTES)
        )
        room -= _OVERHEAD_BYTES + sum(map(_encoded_bytes, "".join(violation)))
        if room < 0:
            break
        kept.append(violation)
    num_left = len(error.violations) - len(kept)
    message = describe(kept)
    return Bounded(f"{message}; and {num_left} more" if num_left else message, tuple(kept))


def clip(text: str, max_bytes: int) -> str:
    """`text`, or its beginning, in at most `max_bytes` once percent-encoded."""
    # Half of a surrogate pair has no UTF-8.
    head = text[:max_bytes].encode(errors="replace").decode()
    sizes = list(accumulate(map(_encoded_bytes, head), initial=0))
    if len(text) <= max_bytes and sizes[-1] <= max_bytes:
        return head
    return head[: bisect_right(sizes, max_bytes - len(_CUT)) - 1] + _CUT


def _encoded_bytes(character: str) -> int:
    """As percent-encoding has it, in the header grpc-message."""
    plain = character.isascii() and character.isprintable() and character != "%"
    return 1 if plain else 3 * len(character.encode())


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
