"""Whether the blocks that a prompt lacks are loaded, computed, or both at once.

Pure: estimates from what was measured, a decision from the estimates, and the regret
when another way would have been faster. Times are in seconds, and are arguments.

Loading and computing together go towards each other: blocks come from the tail
backward while the engine computes from the head forward. What a step has begun is
computed by that step, so the two pay only when loading lasts longer than a step.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

# Blocks read to learn how fast a tier is, before a whole chain is entrusted to it.
PROBE_BLOCKS = 4
# An estimate that kept requests from loading is looked at again after this time.
STALE_AFTER_S = 10.0


class Tier(enum.Enum):
    """Where the KV store has a block: in node memory, or in Redis."""

    L1 = "L1"
    L2 = "L2"


class Decision(enum.Enum):
    COMPUTE = "compute"
    LOAD = "load"
    BOTH = "both"


class ReadCost(NamedTuple):
    """Reading n blocks takes latency_s + n * block_s."""

    latency_s: float
    block_s: float

    def of(self, num_blocks: int) -> float:
        return self.latency_s + num_blocks * self.block_s if num_blocks else 0.0


class ReadEstimate:
    """A moving estimate of a tier's cost: a line through the latest reads.

    Small reads tell the latency, large ones the bandwidth. While all are of one size,
    a weak prior decides what of their time is latency.
    """

    KEEP = 0.85  # of the weight of all earlier reads, at each new one
    PRIOR_WEIGHT = 0.002
    PRIOR_LATENCY_S = 0.001
    # One slow read on a busy machine is not yet another tier.
    MOST_GROWTH = 4.0

    def __init__(self) -> None:
        self.num_reads = 0
        self.observed_s = -math.inf
        self._hint: ReadCost | None = None
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    @property
    def cost(self) -> ReadCost | None:
        """None: nothing is known."""
        return self._fit() if self.num_reads else self._hint

    def hint(self, cost: ReadCost) -> None:
        """What somebody else has measured; own reads count more."""
        self._hint = cost

    def observe(self, num_blocks: int, read_s: float, now_s: float) -> None:
        cost = self.cost
        if cost is not None:
            read_s = min(read_s, self.MOST_GROWTH * max(cost.of(num_blocks), 1e-4))
        weight = 1 / num_blocks
        self._weight = self.KEEP * self._weight + weight
        self._n = self.KEEP * self._n + weight * num_blocks
        self._nn = self.KEEP * self._nn + weight * num_blocks**2
        self._t = self.KEEP * self._t + weight * read_s
        self._nt = self.KEEP * self._nt + weight * num_blocks * read_s
        self.num_reads += 1
        self.observed_s = now_s

    def observe_wait(self, waited_s: float, now_s: float) -> None:
        """Nothing has come in this time: a lesson only if something should have."""
        cost = self.cost
        if cost is None or waited_s > cost.of(1):
            self.observe(1, waited_s, now_s)

    def _fit(self) -> ReadCost:
        """Weighted least squares; neither part is negative."""
        weight = self._weight + self.PRIOR_WEIGHT  # the prior: no blocks, PRIOR_LATENCY_S
        time = self._t + self.PRIOR_WEIGHT * self.PRIOR_LATENCY_S
        spread = weight * self._nn - self._n**2
        block_s = (weight * self._nt - self._n * time) / spread
        latency_s = (time - block_s * self._n) / weight
        if latency_s < 0:
            return ReadCost(0.0, self._nt / self._nn)
        if block_s < 0:
            return ReadCost(time / weight, 0.0)
        return ReadCost(latency_s, block_s)


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

    @property
    def best_other_s(self) -> float:
        """The best estimate of a way not taken, from when the engine can begin."""
        expected = self.expected
        ways = {
            Decision.COMPUTE: expected.compute_s,
            Decision.LOAD: expected.load_s,
            Decision.BOTH: expected.both_s,
        }
        best_s = min(time_s for way, time_s in ways.items() if way is not self.decision)
        return best_s - self.wait_s


def expect(missing: Missing, read: ReadCost, engine: EngineCost) -> Expected:
    if not engine.compute_block_s:
        load_s = _load_s(missing, read, engine)
        return Expected(math.inf, *((math.inf, load_s) if engine.computing else (load_s, math.inf)))
    compute_s = engine.wait_s + missing.num_blocks * engine.compute_block_s
    both_s, num_met = _both(missing, read, engine)
    load_s = math.inf if engine.computing else _load_s(missing, read, engine)
    return Expected(compute_s, load_s, both_s, num_met)


def decide(missing: Missing, read: ReadCost, engine: EngineCost) -> Plan:
    """The way that is expected to take least; computing, when others take as long."""
    expected = expect(missing, read, engine)
    decision, num_blocks = Decision.COMPUTE, 0
    times = f"{_ms(expected.load_s)} to load, {_ms(expected.compute_s)} to compute"
    if min(expected.load_s, expected.both_s) < expected.compute_s:
        if expected.load_s <= expected.both_s:
            decision, num_blocks = Decision.LOAD, missing.num_blocks
        else:
            decision, num_blocks = Decision.BOTH, min(missing.num_blocks, missing.room)
            times += f", {_ms(expected.both_s)} for both at once"
    reason = f"{missing.num_blocks} blocks in {missing.tier.value}: {times}"
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


@dataclass(slots=True)
class Tally:
    """What was decided, and what it cost."""

    num_compute: int = 0
    num_load: int = 0
    num_both: int = 0
    num_probes: int = 0
    # Time lost against the best estimate of a way not taken, and the time of all ways taken.
    regret_s: float = 0.0
    spent_s: float = 0.0

    def count(self, plan: Plan) -> None:
        self.num_compute += plan.decision is Decision.COMPUTE
        self.num_load += plan.decision is Decision.LOAD
        self.num_both += plan.decision is Decision.BOTH
        self.num_probes += plan.probe

    def settle(self, best_other_s: float, actual_s: float) -> float:
        """The regret of one request, in seconds."""
        regret_s = max(0.0, actual_s - best_other_s)
        self.regret_s += regret_s
        self.spent_s += actual_s
        return regret_s


class LoadPlanner:
    """What is known of the tiers and the engine, and a plan for each request."""

    def __init__(self, *, probe_blocks: int = PROBE_BLOCKS) -> None:
        self.tally = Tally()
        self._probe_blocks = probe_blocks
        self._reads = {tier: ReadEstimate() for tier in Tier}
        self._import_block_s = 0.0
        # Lately, of requests that found no free slot.
        self.queue_wait_s = 0.0

    @property
    def import_block_s(self) -> float:
        return self._import_block_s

    def read(self, tier: Tier) -> ReadEstimate:
        return self._reads[tier]

    def observe_import(self, num_blocks: int, import_s: float) -> None:
        """Time in which the engine was busy with others is part of it now and then."""
        block_s = import_s / num_blocks
        known_s = self._import_block_s
        weight = (0.1 if block_s > known_s else 0.5) if known_s else 1.0
        self._import_block_s += weight * (block_s - known_s)

    def observe_queue(self, waited_s: float) -> None:
        self.queue_wait_s += 0.3 * (waited_s - self.queue_wait_s)

    def plan_always(self, missing: Missing, engine: EngineCost) -> Plan:
        """Load, whatever it takes."""
        read = self._reads[missing.tier].cost or ReadCost(math.inf, 0.0)
        expected = expect(missing, read, self._with_imports(engine))
        plan = Plan(
            Decision.LOAD,
            missing.num_blocks,
            expected,
            f"{missing.num_blocks} blocks in {missing.tier.value}: worker.kv_load is always",
            engine.wait_s,
        )
        self.tally.count(plan)
        return plan

    def plan(self, missing: Missing, engine: EngineCost, now_s: float) -> Plan:
        """Never entrusts a whole chain to a tier that nothing is known of."""
        read = self._reads[missing.tier]
        engine = self._with_imports(engine)
        if read.cost is None:
            plan = self._first_probe(missing, engine)
        else:
            plan = decide(missing, read.cost, engine)
            if plan.decision is Decision.COMPUTE:
                plan = self._look_again(plan, missing, now_s - read.observed_s)
        self.tally.count(plan)
        return plan

    def _first_probe(self, missing: Missing, engine: EngineCost) -> Plan:
        count = min(self._probe_blocks, missing.num_blocks, missing.room)
        block_s = engine.compute_block_s or math.inf
        expected = Expected(engine.wait_s + count * block_s, math.inf, math.inf)
        decision = Decision.BOTH if engine.computing else Decision.LOAD
        reason = f"{count} blocks read to learn how fast {missing.tier.value} is"
        return Plan(decision, count, expected, reason, engine.wait_s, probe=True)

    def _look_again(self, plan: Plan, missing: Missing, age_s: float) -> Plan:
        """What keeps requests from loading is not believed for ever."""
        self._import_block_s *= 0.98
        if age_s <= STALE_AFTER_S:
            return plan
        # Beside the computing, from the tail: it costs the request nothing.
        count = min(self._probe_blocks, missing.num_blocks, missing.room)
        return plan._replace(num_blocks=count, probe=True)

    def _with_imports(self, engine: EngineCost) -> EngineCost:
        return engine._replace(import_block_s=self._import_block_s)
