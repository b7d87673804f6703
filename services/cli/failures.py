"""What ends a command early: one readable line for people, plain fields for programs."""

from __future__ import annotations

from typing import Any

from services.cli.plain import plain

BAD_REQUEST = 1
# As uvicorn does, so that a supervisor knows that trying again will not help.
CANNOT_START = 3


class Failure(Exception):
    """Raised by a command; `firsttoken` prints it and exits with `exit_status`.

    `fields` (code, reason, violations, ...) go into the `error` of a --json answer.
    """

    def __init__(self, message: str, *, exit_status: int = BAD_REQUEST, **fields: Any) -> None:
        super().__init__(plain(" ".join(message.split())))
        self.exit_status = exit_status
        self._fields = fields

    def add_hint(self, hint: str) -> None:
        self.args = (f"{self} ({hint})",)

    def fields(self) -> dict[str, Any]:
        return {"message": str(self), **self._fields}
