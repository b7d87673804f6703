"""What a process says of itself in numbers: what each means, and what it is now. Pure."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

# Names to values, in the order in which they are shown.
Labels: TypeAlias = tuple[tuple[str, str], ...]


class Metric(NamedTuple):
    """`name` and `unit` as in OpenTelemetry and UCUM: "{request}" for a count of requests."""

    name: str
    unit: str
    text: str
    # It only grows, and begins at 0 with the process.
    counts: bool


class Sample(NamedTuple):
    """The value of a metric now. Those of one name differ in their labels."""

    name: str
    value: float
    labels: Labels = ()


# Of every process that serves requests: by `what`.
LEAK = Metric(
    "firsttoken.leak.held",
    "{thing}",
    "Held while no request is here; more than 0 for longer than a moment is a leak.",
    False,
)
