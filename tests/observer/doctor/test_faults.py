"""Each fault is named first, from mild to severe."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.observer.doctor import Cause, diagnose
from tests.observer.doctor import scenarios as mesh
from tests.observer.windows import Seen

FAULTS: dict[str, tuple[Cause, Callable[[], Seen]]] = {
    "2 slots": (Cause.IDLE_ENGINE_BEHIND_QUEUE, lambda: mesh.few_slots(2)),
    "unseen workers": (Cause.IDLE_ENGINE_BEHIND_QUEUE, lambda: mesh.unseen_workers(90.0)),
    "round robin": (Cause.LONG_PREFILL_FROM_MISSES, lambda: mesh.blind_routing("round_robin")),
    "prompts beside answers": (Cause.INTERFERENCE, lambda: mesh.prompts_beside_answers(0.1)),
    "long documents": (Cause.LONG_PROMPTS_SQUEEZE, lambda: mesh.documents(24_000)),
    "small caches": (Cause.KV_CACHE_TOO_SMALL, lambda: mesh.small_caches(192)),
    "slow store": (Cause.L2_SLOWER_THAN_RECOMPUTE, lambda: mesh.slow_store(0.05)),
    "cold engines": (Cause.COLD_START, lambda: mesh.slow_beginning(5.0)),
    "cold caches": (Cause.COLD_START, lambda: mesh.restart(2048)),
    "hot prefix": (Cause.SKEWED_ROUTING, lambda: mesh.hot_prefix(4.0)),
    "slow worker": (Cause.SLOW_WORKER, lambda: mesh.slow_worker(4.0)),
    "little prefill": (Cause.WRONG_PD_RATIO, lambda: mesh.split(1, 3, 8.0, 32)),
    "little decode": (Cause.WRONG_PD_RATIO, lambda: mesh.split(3, 1, 8.0, 200)),
    "deaf router": (Cause.STALE_ROUTER_KNOWLEDGE, lambda: mesh.deaf_router(1.0)),
    "slow decoding": (Cause.MEMORY_BOUND_DECODE, lambda: mesh.slow_decoding(100.0)),
    "idle mesh": (Cause.COSTLY, lambda: mesh.idle_mesh(8)),
    "overload": (Cause.OVERLOADED, lambda: mesh.overload(40.0)),
}


@pytest.mark.parametrize(("cause", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_first(cause: Cause, fault: Callable[[], Seen]) -> None:
    seen = fault()
    findings = diagnose(seen.window, seen.clues)
    assert findings, "nothing was found"
    first = findings[0]
    assert first.cause is cause, [each.cause.value for each in findings]
    assert first.evidence
    assert 0 < first.share <= 1
    explained_s = [each.explains_s for each in findings]
    assert explained_s == sorted(explained_s, reverse=True)
