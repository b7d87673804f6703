"""Which prompt goes first. Pure.

Each has a virtual deadline: when it came, and PATIENCE times as long as the rest of it
takes alone. The earliest goes first. So a short prompt goes past a long one, unless that
came PATIENCE times the difference before it: whatever comes later than that goes behind.
A long prompt thus waits for what comes in a time that is a small multiple of its own, and
never for ever; and a prompt that is nearly done is not left lying.

Interactive requests go before batch ones, whatever their lengths, except for those that
have waited BATCH_AGEING_S longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from worker.messages import Submit

# 0 would be first come, first served; the higher, the longer a long prompt may be passed.
PATIENCE = 4.0
# A waiting batch request goes before interactive ones that came this much later.
BATCH_AGEING_S = 5.0

T = TypeVar("T")


class Urgency(NamedTuple):
    batch: bool
    submitted_s: float
    deadline_s: float

    @classmethod
    def of(cls, submit: Submit, num_tokens: int, tokens_per_s: float) -> Urgency:
        """`num_tokens`: still to be computed. `tokens_per_s`: 0 while nobody knows."""
        alone_s = num_tokens / tokens_per_s if tokens_per_s else 0.0
        deadline_s = submit.submitted_s + PATIENCE * alone_s
        return cls(submit.batch_class, submit.submitted_s, deadline_s)

    def lent(self, other: Urgency) -> Urgency:
        """Of one that another waits for."""
        return Urgency(
            self.batch and other.batch,
            min(self.submitted_s, other.submitted_s),
            min(self.deadline_s, other.deadline_s),
        )


def in_order(urgencies: Mapping[T, Urgency]) -> list[T]:
    """The most urgent first; those that are equally urgent as they are."""
    ranked = sorted(urgencies.items(), key=lambda item: item[1].deadline_s)
    interactive = deque(item for item in ranked if not item[1].batch)
    batch = deque(item for item in ranked if item[1].batch)
    order = []
    while interactive and batch:
        aged = batch[0][1].submitted_s + BATCH_AGEING_S < interactive[0][1].submitted_s
        order.append((batch if aged else interactive).popleft())
    return [item for item, _ in (*order, *interactive, *batch)]
