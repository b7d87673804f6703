"""Whether the blocks that a prompt lacks are loaded, computed, or both at once.

Pure: a decision from estimates, in seconds.

Loading and computing together go towards each other: blocks come from the tail
backward while the engine computes from the head forward. What a step has begun is
computed by that step, so the two pay only when loading lasts longer than a step.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from worker.estimates import ReadCost, Tier


class Decision(enum.Enum):
    COMPUTE = "compute"
    LOAD = "load"
    BOTH = "both"


class Missing(NamedTuple):
    """Blocks of a prompt, one after the other, that the engine lacks and one tier has."""

    num_blocks: int
    tier: Tier
    # Blocks that may wait for the engine at once.
    room: int


class EngineCost(NamedTuple):
    """What the engine takes, in seconds. A block's computing 0: not measured yet."""

    compute_block_s: float
    step_s: float
    import_block_s: float = 0.0
    # Until it begins with this request.
    wait_s: float = 0.0
    # It has begun and is not held back any more: it cannot wait for a load.
    computing: bool = False


class Expected(NamedTuple):
    """Seconds from now until all missing blocks are in the engine; infinite: not possible."""

    compute_s: float
    load_s: float
    both_s: float
    # Of the blocks, how many are loaded when both meet.
    num_met: int = 0

    def of(self, decision: Decision) -> float:
        match decision:
            case Decision.COMPUTE:
                return self.compute_s
            case Decision.LOAD:
                return self.load_s
            case Decision.BOTH:
                return self.both_s


class Plan(NamedTuple):
    decision: Decision
    # To load: from the front when loading, from the tail otherwise.
    num_blocks: int
    expected: Expected
    # For people.
    reason: str
    # Of the times expected, what passes before the engine can begin.
    wait_s: float = 0.0
    # Only to learn how fast the tier is.
    probe: bool = False
    # For its blocks another plan counts: it did not hold, or came after one that did not.
    superseded: bool = False

    @property
    def best_other_s(self) -> float:
        """The best estimate of a way not taken, from when the engine can begin."""
        others = [way for way in Decision if way is not self.decision]
        return min(map(self.expected.of, others)) - self.wait_s


def expect(missing: Missing, read: ReadCost, engine: EngineCost) -> Expected:
    if not engine.compute_block_s:
        load_s = _load_s(missing, read, engine)
        if engine.computing:
            return Expected(math.inf, math.inf, load_s)
        return Expected(math.inf, load_s, math.inf)
    compute_s = engine.wait_s + missing.num_blocks * engine.compute_block_s
    both_s, num_met = _both(missing, read, engine)
    load_s = math.inf if engine.computing else _load_s(missing, read, engine)
    return Expected(compute_s, load_s, both_s, num_met)


def decide(missing: Missing, read: ReadCost, engine: EngineCost) -> Plan:
    """The way that is expected to take least; computing, when others take as long."""
    expected = expect(missing, read, engine)
    decision = Decision.BOTH if expected.both_s < expected.compute_s else Decision.COMPUTE
    # A block that comes just after a step has begun costs a whole step: half, on average.
    at_once_s = expected.both_s + engine.step_s / 2
    if expected.load_s < min(expected.compute_s, at_once_s):
        decision = Decision.LOAD
    num_blocks, done = {
        Decision.COMPUTE: (0, "computed"),
        Decision.LOAD: (missing.num_blocks, "loaded"),
        Decision.BOTH: (min(missing.num_blocks, missing.room), "loaded and computed at once"),
    }[decision]
    times = f"{_ms(expected.load_s)} to load, {_ms(expected.compute_s)} to compute"
    if decision is Decision.BOTH:
        times += f", {_ms(expected.both_s)} for both"
    reason = f"{missing.num_blocks} blocks in {missing.tier.value} {done}: {times}"
    return Plan(decision, num_blocks, expected, reason, engine.wait_s)


def _load_s(missing: Missing, read: ReadCost, engine: EngineCost) -> float:
    """What there is no room for is read once the engine takes blocks."""
    ahead = min(missing.num_blocks, missing.room)
    rest_s = (missing.num_blocks - ahead) * read.block_s
    imports_s = missing.num_blocks * engine.import_block_s
    return max(engine.wait_s, read.of(ahead)) + rest_s + imports_s


def _both(missing: Missing, read: ReadCost, engine: EngineCost) -> tuple[float, int]:
    """Whole steps from the head, until one reaches the lowest block loaded when it begins."""
    num_blocks = missing.num_blocks
    per_step = engine.step_s / engine.compute_block_s
    lead_s = engine.wait_s - read.latency_s

    def loaded(num_steps: int) -> int:
        read_for_s = lead_s + num_steps * engine.step_s
        if read_for_s < 0:
            return 0
        # With a whisker of tolerance, or rounding would take back a block that has come.
        count = read_for_s / read.block_s + 1e-9 if read.block_s else math.inf
        return min(num_blocks, missing.room, math.floor(min(count, num_blocks)))

    low, high = 0, math.ceil(num_blocks / per_step)
    while low < high:  # the first step that reaches what is loaded
        middle = (low + high) // 2
        if (middle + 1) * per_step >= num_blocks - loaded(middle):
            high = middle
        else:
            low = middle + 1
    num_met = loaded(low)
    last_s = max(0.0, num_blocks - num_met - low * per_step) * engine.compute_block_s
    both_s = engine.wait_s + low * engine.step_s + last_s + num_met * engine.import_block_s
    return both_s, num_met


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if math.isfinite(seconds) else "an unknown time"
