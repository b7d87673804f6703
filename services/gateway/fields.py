"""Reading a JSON object field by field; what is wrong is collected, and named.

A field that is null counts as absent, as OpenAI has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from services.core.errors import Violation

MAX_UINT32 = (1 << 32) - 1


class Fields:
    """A JSON object. Readers give None for what is absent, or is not what it must be."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        prefix: str = "",
        violations: list[Violation] | None = None,
    ) -> None:
        self.values = values
        self._prefix = prefix
        self.violations: list[Violation] = [] if violations is None else violations

    def path(self, name: str) -> str:
        return self._prefix + name

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self.values.get(name)

    def refuse(self, name: str, rule: str) -> None:
        self.violations.append(Violation(self.path(name), rule))

    def string(self, name: str, *, max_characters: int | None = None) -> str | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.refuse(name, f"must be a string; got {kind_of(value)}")
            return None
        if max_characters is not None and len(value) > max_characters:
            self.refuse(name, f"must be at most {max_characters} characters; got {len(value)}")
            return None
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(name, f"must be true or false; got {kind_of(value)}")
        return None

    def integer(self, name: str, *, low: int = 0, high: int = MAX_UINT32) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        whole = to_whole(value)
        if whole is None:
            self.refuse(name, f"must be a whole number; got {kind_of(value)}")
            return None
        if not low <= whole <= high:
            self.refuse(name, f"must be in [{low}, {high}]; got {whole}")
            return None
        return whole

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, f"must be a number; got {kind_of(value)}")
            return None
        number = float(value)
        if not math.isfinite(number):
            self.refuse(name, "must be a finite number")
            return None
        return number

    def choice(self, name: str, *choices: str) -> str | None:
        value = self.string(name)
        if value is not None and value not in choices:
            self.refuse(name, f"must be one of {', '.join(choices)}; got {value[:40]!r}")
            return None
        return value

    def items(self, name: str) -> list[Any] | None:
        value = self.values.get(name)
        if value is None or isinstance(value, list):
            return value
        self.refuse(name, f"must be a list; got {kind_of(value)}")
        return None

    def section(self, name: str) -> Fields | None:
        """An object in the object."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, f"must be an object; got {kind_of(value)}")
            return None
        return Fields(value, prefix=f"{self.path(name)}.", violations=self.violations)

    def element(self, name: str, index: int, value: Any) -> Fields | None:
        """An object in the list `name`."""
        if not isinstance(value, dict):
            self.refuse(f"{name}[{index}]", f"must be an object; got {kind_of(value)}")
            return None
        return Fields(value, prefix=f"{self.path(name)}[{index}].", violations=self.violations)


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def to_whole(value: Any) -> int | None:
    """As JSON has it, 3.0 is 3. A float beyond 2**53 stands for a number that was cut."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def to_token_id(value: Any) -> int | None:
    whole = to_whole(value)
    return whole if whole is not None and 0 <= whole <= MAX_UINT32 else None
