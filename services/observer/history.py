"""How the time to the first token went on, for longer than requests are kept.

Pure. A request is counted into a step of time, and there into a bin of requests whose first token
came about as late. Each bin knows what their time went for, so that of the slowest requests it is
known as well as of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from services.core.ledger import Segment
from services.observer.model import Request

# A bin's requests differ by no more than this.
GROWTH = 1.05
SHORTEST_S = 1e-4
MAX_BIN = 340
# The slowest: from here on.
TAIL = 0.95
RESIDUAL = "residual"
# What a first token's time goes for, in the order in which it is shown.
SHARES = (*(str(segment) for segment in Segment), RESIDUAL)


class Summary(NamedTuple):
    """Requests of some time. What needs a first token is None where none came."""

    num_requests: int
    num_failed: int
    p50_s: float | None
    p95_s: float | None
    # By SHARES, on average: of all, and of the slowest twentieth.
    mean_s: Mapping[str, float] | None
    slowest_s: Mapping[str, float] | None
    hit_rate: float | None


class Step:
    """Counts of requests that came in one stretch of time, or of several together."""

    __slots__ = ("bins", "cached_tokens", "num_failed", "num_requests", "prompt_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_failed = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        # For each: how many, their summed time to the first token, and what it went for.
        self.bins: dict[int, list[float]] = {}

    def add(self, request: Request) -> None:
        self.num_requests += 1
        self.num_failed += bool(request.error)
        if request.ttft_s is None:
            return
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += min(request.cached_tokens, request.prompt_tokens)
        sums = self.bins.setdefault(_bin(request.ttft_s), [0.0] * (2 + len(SHARES)))
        sums[0] += 1
        sums[1] += request.ttft_s
        for at, segment in enumerate(Segment, start=2):
            sums[at] += request.spent_s.get(segment, 0.0)
        sums[-1] += request.residual_s

    def merge(self, other: Step) -> None:
        self.num_requests += other.num_requests
        self.num_failed += other.num_failed
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        for at, sums in other.bins.items():
            mine = self.bins.get(at)
            self.bins[at] = sums[:] if mine is None else [*map(sum, zip(mine, sums, strict=True))]

    def summary(self) -> Summary:
        return Summary(
            num_requests=self.num_requests,
            num_failed=self.num_failed,
            p50_s=self._quantile_s(0.5),
            p95_s=self._quantile_s(TAIL),
            mean_s=self._mean_s(1.0),
            slowest_s=self._mean_s(1 - TAIL),
            hit_rate=self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
        )

    def _quantile_s(self, share: float) -> float | None:
        rank = share * self._num_answered
        passed = 0.0
        for at in sorted(self.bins):
            count, total_s, *_ = self.bins[at]
            passed += count
            if passed >= rank:
                return total_s / count
        return None

    @property
    def _num_answered(self) -> float:
        return sum(sums[0] for sums in self.bins.values())

    def _mean_s(self, share: float) -> dict[str, float] | None:
        """Of this share of the requests, the slowest; but of one at least."""
        if not self.bins:
            return None
        wanted = left = max(share * self._num_answered, 1.0)
        sums_s = [0.0] * len(SHARES)
        for at in sorted(self.bins, reverse=True):
            count, _, *spent_s = self.bins[at]
            part = min(left / count, 1.0)
            sums_s = [mine + part * theirs for mine, theirs in zip(sums_s, spent_s, strict=True)]
            left -= part * count
            if left <= 0:
                break
        return {name: spent_s / wanted for name, spent_s in zip(SHARES, sums_s, strict=True)}


class Series:
    """Steps of `step_s`, the newest `num_steps` of them."""

    def __init__(self, *, step_s: int, num_steps: int) -> None:
        self.step_s = step_s
        self.num_steps = num_steps
        self._steps: dict[int, Step] = {}

    def add(self, request: Request, now_unix_s: float) -> None:
        """A clock that runs ahead counts as now, what is too old not at all."""
        now = self._number(now_unix_s)
        number = min(self._number(request.arrived_unix_s), now)
        self._forget_until(now - self.num_steps)
        if number > now - self.num_steps:
            self._steps.setdefault(number, Step()).add(request)

    def between(self, begin_unix_s: float, end_unix_s: float) -> Step:
        """Together, the steps that begin then."""
        together = Step()
        for number, step in self._steps.items():
            if begin_unix_s <= number * self.step_s < end_unix_s:
                together.merge(step)
        return together

    def begins_unix_s(self, end_unix_s: float) -> list[int]:
        """Of each step that is kept, the last one having `end_unix_s` in it."""
        last = self._number(end_unix_s)
        return [number * self.step_s for number in range(last - self.num_steps + 1, last + 1)]

    def oldest_unix_s(self, end_unix_s: float) -> int | None:
        """When the first step with requests begins, of those that are kept until then."""
        first = self._number(end_unix_s) - self.num_steps + 1
        kept = [number * self.step_s for number in self._steps if number >= first]
        return min(kept, default=None)

    def summary_at(self, begin_unix_s: int) -> Summary:
        return self._steps.get(begin_unix_s // self.step_s, _NOTHING).summary()

    def check_integrity(self) -> None:
        assert len(self._steps) <= self.num_steps
        for step in self._steps.values():
            counted = sum(sums[0] for sums in step.bins.values())
            assert 0 <= step.num_failed <= step.num_requests
            assert counted <= step.num_requests
            assert 0 <= step.cached_tokens <= step.prompt_tokens
            for sums in step.bins.values():
                assert sums[0] > 0
                assert math.isclose(sums[1], sum(sums[2:]), rel_tol=1e-6, abs_tol=1e-6 * sums[0])

    def _number(self, unix_s: float) -> int:
        return int(unix_s // self.step_s)

    def _forget_until(self, number: int) -> None:
        for old in [known for known in self._steps if known <= number]:
            del self._steps[old]


class History:
    """The last five minutes closely, and somewhat more than an hour by the minute."""

    def __init__(self) -> None:
        self.minutes = Series(step_s=5, num_steps=60)
        self.hour = Series(step_s=60, num_steps=75)

    @classmethod
    def of(cls, requests: Iterable[Request], now_unix_s: float) -> History:
        history = cls()
        for request in requests:
            history.add(request, now_unix_s)
        return history

    def add(self, request: Request, now_unix_s: float) -> None:
        """Once a request."""
        self.minutes.add(request, now_unix_s)
        self.hour.add(request, now_unix_s)

    def check_integrity(self) -> None:
        self.minutes.check_integrity()
        self.hour.check_integrity()


_NOTHING = Step()


def _bin(ttft_s: float) -> int:
    if ttft_s <= SHORTEST_S:
        return 0
    return int(min(math.log(ttft_s / SHORTEST_S) / math.log(GROWTH) + 1, MAX_BIN))
