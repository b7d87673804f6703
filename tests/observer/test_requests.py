from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import attributes as names
from services.core.ledger import Segment
from services.observer import requests
from services.observer.model import Hop
from services.observer.requests import GRACE_S, MAX_HOPS, ORPHANED_S, Assembly, assemble
from tests.observer.made import a_hop

TRACE = f"{7:032x}"


def hop(number: int, parent: int | None, name: str, **changes: Any) -> Hop:
    return a_hop(
        trace_id=changes.pop("trace_id", TRACE),
        name=name,
        span_id=f"{number:016x}",
        parent_span_id="" if parent is None else f"{parent:016x}",
        **changes,
    )


GATEWAY = hop(1, None, "gateway.request", arrived_unix_s=1.0, ended_s=0.9, first_token_s=0.3)
ROUTER = hop(
    2,
    1,
    "router.generate",
    arrived_unix_s=1.1,
    error="",
    hidden_s={"prefetch": 0.1},
    attributes={
        names.TENANT: "acme",
        names.REQUEST_CLASS: "batch",
        names.GENERATION: 4,
        names.PREDICTED_TOKENS: 128,
        names.STRATEGY: "kv_aware",
        names.TPOT_MS: 20.0,
        names.MODEL: "m",
        names.QUEUE_POSITION: 3,
    },
)
TOKENIZER = hop(3, 2, "tokenizer.encode", arrived_unix_s=1.2, attributes={names.INPUT_TOKENS: 200})
WORKER = hop(
    4,
    2,
    "worker.generate",
    arrived_unix_s=1.3,
    hidden_s={"prefetch": 0.2, "export": 0.05},
    attributes={
        names.ENGINE: "simulated",
        names.INPUT_TOKENS: 200,
        names.OUTPUT_TOKENS: 5,
        names.CACHED_TOKENS: 128,
        names.HANDOFF_MS: 7.0,
        names.KV_HANDED_OFF: True,
        names.KV_LOADED_BLOCKS: 1,
        names.KV_EXPECTED_LOAD_MS: 3.0,
        names.BATCH_SIZE: 2,
    },
)
PREFILL = hop(5, 4, "worker.prefill", arrived_unix_s=1.4, attributes={names.BATCH_SIZE: 9})
ALL = [GATEWAY, ROUTER, TOKENIZER, WORKER, PREFILL]


@given(order=st.permutations(ALL))
def test_in_whatever_order_hops_come_they_are_one_request(order: Sequence[Hop]) -> None:
    [request] = assemble(order)

    assert request.hops == (GATEWAY, ROUTER, TOKENIZER, WORKER, PREFILL)
    assert (request.ttft_s, request.duration_s, request.arrived_unix_s) == (0.3, 0.9, 1.0)
    assert (request.tenant, request.request_class, request.generation) == ("acme", "batch", 4)
    assert (request.model, request.engine, request.strategy) == ("m", "simulated", "kv_aware")
    assert (request.prompt_tokens, request.output_tokens) == (200, 5)
    assert (request.cached_tokens, request.predicted_tokens) == (128, 128)
    assert (request.handed_off, request.handoff_s, request.tpot_s) == (True, 0.007, 0.02)
    assert (request.loaded_blocks, request.expected_load_s) == (1, 0.003)
    assert (request.queue_position, request.batch_size) == (3, 2)
    assert request.hidden_s == {"prefetch": 0.2, "export": 0.05}
    assert request.spent_s == GATEWAY.spent_s
    assert request.residual_s == pytest.approx(0.3 - sum(GATEWAY.spent_s.values()))


def test_what_nobody_told_is_nothing() -> None:
    [request] = assemble([hop(1, None, "router.generate", first_token_s=None)])

    assert (request.predicted_tokens, request.tpot_s, request.ttft_s) == (None, None, None)
    assert (request.cached_tokens, request.tenant, request.residual_s) == (0, "", 0.0)


def test_attributes_of_other_kinds_than_expected_count_as_missing() -> None:
    wrong = {names.TENANT: 3, names.INPUT_TOKENS: "many", names.KV_HANDED_OFF: "yes"}
    [request] = assemble([hop(1, None, "router.generate", attributes=wrong)])

    assert (request.tenant, request.prompt_tokens, request.handed_off) == ("", 0, False)


@pytest.mark.parametrize("number", [1e300, -1e300, 2**64 - 1, -1])
def test_a_number_that_nobody_counts_up_to_counts_as_missing(number: float) -> None:
    wrong = {names.INPUT_TOKENS: number, names.PREDICTED_TOKENS: number, names.TPOT_MS: number}
    [request] = assemble([hop(1, None, "router.generate", attributes=wrong)])

    assert (request.prompt_tokens, request.predicted_tokens, request.tpot_s) == (0, None, None)


def test_a_client_may_put_several_requests_into_one_trace() -> None:
    other = hop(9, 77, "router.generate", arrived_unix_s=0.5)

    first, second = assemble([*ALL, other])

    assert first.hops == (other,)
    assert second.hops == tuple(ALL)


def test_after_a_migration_the_worker_that_came_last_counts() -> None:
    later = hop(6, 2, "worker.generate", arrived_unix_s=1.9, attributes={names.ENGINE: "other"})
    [request] = assemble([*ALL, later])

    assert request.engine == "other"


@pytest.mark.parametrize(
    "hops", [[], [TOKENIZER], [hop(1, 1, "tokenizer.encode")], [hop(1, 2, "a"), hop(2, 1, "b")]]
)
def test_what_is_below_no_request_is_none(hops: list[Hop]) -> None:
    assert assemble(hops) == []


def test_a_hop_that_is_its_own_parent_is_a_request_of_its_own() -> None:
    [request] = assemble([hop(1, 1, "router.generate")])

    assert len(request.hops) == 1


def test_a_trace_waits_for_its_last_hops_from_the_first_end_on() -> None:
    assembly = Assembly()
    assembly.hear(TOKENIZER, 0.0)
    assert not list(assembly.settle(100.0))
    assembly.hear(ROUTER, 200.0)
    assembly.hear(WORKER, 200.0 + GRACE_S / 2)
    assert not list(assembly.settle(200.0 + GRACE_S * 0.9))

    [settled] = assembly.settle(200.0 + GRACE_S)

    assert settled == (TRACE, (TOKENIZER, ROUTER, WORKER))
    assert len(assembly) == 0


def test_a_trace_whose_worker_is_done_waits_for_its_router() -> None:
    """Another worker goes on with the answer, for longer than hops wait for each other; and the
    client takes longer still to read it."""
    failed = hop(6, 2, "worker.generate", error="x", attributes={names.ERROR_TYPE: "ENGINE_DIED"})
    assembly = Assembly()
    assembly.hear(failed, 0.0)
    assert not list(assembly.settle(10 * GRACE_S))
    assembly.hear(WORKER, 10 * GRACE_S)
    assert not list(assembly.settle(20 * GRACE_S))
    assembly.hear(ROUTER, 20 * GRACE_S)

    assert [each.hops for each in assembly.settle(21 * GRACE_S)] == [(failed, WORKER, ROUTER)]


@pytest.mark.parametrize(
    ("parent", "code"), [(None, "ENGINE_DIED"), (2, "CANCELLED")], ids=["alone", "cancelled"]
)
def test_a_failed_worker_that_nobody_goes_on_for_is_a_request_soon(
    parent: int | None, code: str
) -> None:
    failed = hop(6, parent, "worker.generate", error="x", attributes={names.ERROR_TYPE: code})
    assembly = Assembly()
    assembly.hear(failed, 0.0)

    assert [each.hops for each in assembly.settle(GRACE_S)] == [(failed,)]


def test_hops_whose_request_never_ends_are_let_go() -> None:
    assembly = Assembly()
    assembly.hear(TOKENIZER, 0.0)

    assert [settled.hops for settled in assembly.settle(ORPHANED_S)] == [(TOKENIZER,)]


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_TRACES", 10)
    assembly = Assembly()
    for number in range(50):
        assembly.hear(hop(1, None, "tokenizer.encode", trace_id=f"{number:032x}"), float(number))
    for number in range(MAX_HOPS + 10):
        assembly.hear(hop(number + 1, None, "router.generate"), 50.0)

    assembly.check_integrity()
    assert len(assembly) == 11
    assert len(next(assembly.settle(60.0)).hops) == MAX_HOPS


@given(
    heard=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(ALL), st.floats(0, 3)), max_size=40)
)
def test_every_hop_is_settled_once(heard: list[tuple[int, Hop, float]]) -> None:
    assembly, now_s, out = Assembly(), 0.0, 0
    for trace, each, pause_s in heard:
        now_s += pause_s
        assembly.hear(hop(1, None, each.name, trace_id=f"{trace + 1:032x}"), now_s)
        assembly.check_integrity()
        out += sum(len(settled.hops) for settled in assembly.settle(now_s))
    out += sum(len(settled.hops) for settled in assembly.settle_all())

    assert out == len(heard)
    assert len(assembly) == 0


def test_segments_are_those_of_the_outermost_hop() -> None:
    outer = hop(1, None, "router.generate", spent_s={Segment.QUEUE: 1.0})
    inner = hop(2, 1, "worker.generate", spent_s={Segment.PREFILL: 5.0})

    assert assemble([outer, inner])[0].spent_s == {Segment.QUEUE: 1.0}
