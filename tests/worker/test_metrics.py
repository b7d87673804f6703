from __future__ import annotations

from collections import Counter
from typing import Any

from services.core.metrics import Labels
from tests.worker.steps import INFO
from worker.estimates import ReadCost, Tier
from worker.messages import DraftCounts
from worker.metrics import METRICS, Readings, read
from worker.tier import TierStats
from worker.watch import EMPTY_LOAD

LOAD = EMPTY_LOAD._replace(
    engine_busy_s=2.5,
    num_blocks_reserved=3,
    prompt_tokens_evaluated=1000,
    prompt_tokens_cached=600,
    drafts={"batch, greedy": DraftCounts(num_drafted=10, num_accepted=7, is_on=False)},
)
TIER = TierStats(
    num_loads=1,
    num_slots=0,
    num_writing=0,
    blocks_loaded=5,
    blocks_loaded_from_l2=2,
    blocks_stored=9,
    blocks_present=0,
    dropped=Counter({"queue full": 4}),
    rejected=Counter({"checksum": 1}),
    failed=Counter({"timeout": 2}),
    num_compute=1,
    num_load=2,
    num_both=3,
    num_probes=0,
    regret_ms=20.0,
    spent_ms=500.0,
)


def values(name: str, **changes: Any) -> dict[Labels, float]:
    return {each.labels: each.value for each in read(readings(**changes)) if each.name == name}


def readings(**changes: Any) -> Readings:
    fields: dict[str, Any] = {
        "load": LOAD,
        "info": INFO,
        "tier": TIER,
        "read_costs": {Tier.L2: ReadCost(latency_s=0.001, block_s=0.01)},
        "num_streams": 0,
        "num_held": 0,
        "num_inbox_blocks": 0,
        "handoffs_taken": 0,
        "handoffs_given": 0,
        "tickets_refused": {"TICKET_USED": 1},
    }
    return Readings(**{**fields, **changes})


def test_prompt_tokens_are_told_apart_by_source() -> None:
    assert values("firsttoken.worker.prompt.tokens") == {
        (("source", "computed"),): 1000,
        (("source", "worker"),): 600,
        (("source", "l1"),): 3 * INFO.block_tokens,
        (("source", "l2"),): 2 * INFO.block_tokens,
    }


def test_drafts_are_told_by_class_and_by_what_became_of_them() -> None:
    assert values("firsttoken.worker.draft.tokens") == {
        (("class", "batch, greedy"), ("end", "accepted")): 7,
        (("class", "batch, greedy"), ("end", "rejected")): 3,
    }
    assert list(values("firsttoken.worker.drafting").values()) == [0]


def test_a_tier_that_nothing_is_known_of_has_no_speed() -> None:
    bandwidths = values("firsttoken.worker.kv.read.bandwidth")
    assert bandwidths == {(("tier", "l2"),): INFO.block_bytes / 0.01}
    instant = {Tier.L1: ReadCost(latency_s=0.001, block_s=0.0)}
    assert not values("firsttoken.worker.kv.read.bandwidth", read_costs=instant)


def test_what_is_held_counts_as_a_leak_only_while_no_request_is_here() -> None:
    assert values("firsttoken.leak.held") == {
        (("what", "requests"),): 0,
        (("what", "blocks"),): 3,
        (("what", "outbox"),): 0,
        (("what", "inbox"),): 0,
        (("what", "loads"),): 1,
    }
    assert not any(values("firsttoken.leak.held", num_streams=1).values())


def test_it_tells_what_it_describes() -> None:
    assert {each.name for each in read(readings())} == {metric.name for metric in METRICS}
