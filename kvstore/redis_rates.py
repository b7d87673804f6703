"""How fast L2 is lately."""

from __future__ import annotations

HALF_LIFE_S = 20.0


class MovingRatio:
    """sum(amount) / sum(weight), where late observations count more.

    What was observed before counts half after HALF_LIFE_S, and half after further
    observations of `half_life_weight`: a change shows soon in a busy store too.
    Without news the ratio stays what it was. Pure: the time is an argument.
    """

    def __init__(self, *, half_life_weight: float) -> None:
        self._half_life_weight = half_life_weight
        self._amount = 0.0
        self._weight = 0.0
        self._last_s = 0.0

    @property
    def value(self) -> float:
        """0: nothing observed yet."""
        return self._amount / self._weight if self._weight > 0 else 0.0

    def observe(self, amount: float, weight: float, now_s: float) -> None:
        age = (now_s - self._last_s) / HALF_LIFE_S + weight / self._half_life_weight
        keep = 0.5 ** max(0.0, age)
        self._amount = self._amount * keep + amount
        self._weight = self._weight * keep + weight
        self._last_s = now_s
