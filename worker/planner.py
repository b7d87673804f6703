"""A plan for each load of a worker, what became of it, and what is learnt from that. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from worker.estimates import ComputeEstimate, ReadCost, ReadEstimate, Tier
from worker.loading import Decision, EngineCost, Expected, Missing, Plan, decide, expect

# Blocks read to learn how fast a tier is, before a whole chain is entrusted to it.
PROBE_BLOCKS = 4
# An estimate that keeps requests from loading is looked at again after this time, or at
# once while it rests on fewer reads.
STALE_AFTER_S = 10.0
ENOUGH_READS = 4


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
        self.compute = ComputeEstimate()
        # Lately, of requests that found no free slot.
        self.queue_wait_s = 0.0
        self._probe_blocks = probe_blocks
        self._reads = {tier: ReadEstimate() for tier in Tier}
        self._import_block_s = 0.0

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
        reason = f"{missing.num_blocks} blocks in {missing.tier.value} loaded:"
        plan = Plan(
            Decision.LOAD,
            missing.num_blocks,
            expected,
            f"{reason} worker.kv_load is always",
            engine.wait_s,
        )
        self.tally.count(plan)
        return plan

    def plan(
        self, missing: Missing, engine: EngineCost, now_s: float, *, least_block_s: float = 0.0
    ) -> Plan:
        """Never entrusts a whole chain to a tier that nothing is known of.

        `least_block_s`: what a block takes just now, whatever it took lately.
        """
        cost = self._reads[missing.tier].cost
        engine = self._with_imports(engine)
        if cost is None:
            plan = self._first_probe(missing, engine)
        else:
            cost = cost._replace(block_s=max(cost.block_s, least_block_s))
            plan = decide(missing, cost, engine)
            if plan.decision is Decision.COMPUTE:
                plan = self._look_again(plan, missing, now_s)
        self.tally.count(plan)
        return plan

    def _first_probe(self, missing: Missing, engine: EngineCost) -> Plan:
        count = min(self._probe_blocks, missing.num_blocks, missing.room)
        block_s = engine.compute_block_s or math.inf
        expected = Expected(engine.wait_s + count * block_s, math.inf, math.inf)
        decision = Decision.BOTH if engine.computing else Decision.LOAD
        reason = f"{count} blocks loaded to learn how fast {missing.tier.value} is"
        return Plan(decision, count, expected, reason, engine.wait_s, probe=True)

    def _look_again(self, plan: Plan, missing: Missing, now_s: float) -> Plan:
        """What keeps requests from loading is not believed for ever."""
        self._import_block_s *= 0.98
        read = self._reads[missing.tier]
        age_s = now_s - read.observed_s
        if age_s <= STALE_AFTER_S and read.num_reads >= ENOUGH_READS:
            return plan
        # Beside the computing, from the tail: it costs the request nothing.
        count = min(self._probe_blocks, missing.num_blocks, missing.room)
        return plan._replace(num_blocks=count, probe=True)

    def _with_imports(self, engine: EngineCost) -> EngineCost:
        return engine._replace(import_block_s=self._import_block_s)
