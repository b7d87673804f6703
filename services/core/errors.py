"""What can go wrong, and the gRPC status that each error becomes.

MeshError                     INTERNAL             a defect of ours
├── InvalidArgument           INVALID_ARGUMENT     BadRequest: the fields and their bounds
├── Unauthenticated           UNAUTHENTICATED      nobody knows the caller
├── PermissionDenied          PERMISSION_DENIED    known, and not allowed
├── Overloaded                RESOURCE_EXHAUSTED   RetryInfo: when to come back
├── Unavailable               UNAVAILABLE          RetryInfo when known
├── Conflict                  ABORTED              somebody else changed it first
├── NotPossible               FAILED_PRECONDITION  not in this way, as things are
└── DeadlineExceeded          DEADLINE_EXCEEDED

Every error carries a `reason` in UPPER_SNAKE for programs (google.rpc.ErrorInfo)
and a message that says what to do for people. `services.runtime.interceptor`
turns them into gRPC status codes; nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple


class Violation(NamedTuple):
    """One field that breaks a rule: its dotted path and what it must be."""

    field: str
    description: str


def describe(violations: Iterable[Violation]) -> str:
    """One readable line."""
    return "; ".join(f"{field}: {description}" for field, description in violations)


class MeshError(Exception):
    """The root. `reason` is stable and for programs, the message is for people."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, reason: str = "INTERNAL", retry_delay_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_delay_s = retry_delay_s


class InvalidArgument(MeshError):
    """The request breaks a rule: every broken field is named at once."""

    status = "INVALID_ARGUMENT"

    def __init__(
        self, violations: Sequence[Violation], *, reason: str = "INVALID_ARGUMENT"
    ) -> None:
        super().__init__(describe(violations), reason=reason)
        self.violations = tuple(violations)

    @classmethod
    def of(cls, field: str, description: str) -> InvalidArgument:
        return cls([Violation(field, description)])


class Unauthenticated(MeshError):
    status = "UNAUTHENTICATED"


class PermissionDenied(MeshError):
    status = "PERMISSION_DENIED"


class Overloaded(MeshError):
    status = "RESOURCE_EXHAUSTED"


class Unavailable(MeshError):
    status = "UNAVAILABLE"


class Conflict(MeshError):
    status = "ABORTED"


class NotPossible(MeshError):
    status = "FAILED_PRECONDITION"


class DeadlineExceeded(MeshError):
    status = "DEADLINE_EXCEEDED"
