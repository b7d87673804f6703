from __future__ import annotations

import asyncio
from typing import Any

from services.core import attributes as names
from services.observer.explained_spans import MAX_WAITING, ExplainedSpans
from services.observer.model import Hop
from services.observer.why import UnknownTrace
from tests.observer.made import a_hop
from tests.runtime.waiting import eventually


def hops(number: int) -> list[Hop]:
    """Of a gateway and, below it, of a router."""
    return [
        a_hop(name="gateway.request", span_id=f"a{number:015x}"),
        a_hop(name="router.generate", span_id=f"b{number:015x}", attributes={"kept": number}),
    ]


def ids(given: list[Hop]) -> frozenset[str]:
    return frozenset(hop.span_id for hop in given)


async def explain(span_id: str) -> dict[str, Any]:
    return {"cause": "evicted", "summary": f"of {span_id}", "lost_tokens": 64}


async def test_the_reason_is_on_the_span_of_the_router_that_missed() -> None:
    exported: list[Hop] = []
    async with ExplainedSpans(exported.append) as spans:
        spans.explain = explain
        spans.export(hops(1), ids(hops(1)))
        spans.export(hops(2), frozenset())
        await eventually(lambda: len(exported) == 4)

    found = {hop.span_id: hop.attributes for hop in exported}
    assert found["b" + "1".zfill(15)] == {
        "kept": 1,
        names.MISS_CAUSE: "evicted",
        names.MISS_SUMMARY: f"of b{'1'.zfill(15)}",
        names.MISS_TOKENS: 64,
    }
    assert found["a" + "1".zfill(15)] == {}
    assert found["b" + "2".zfill(15)] == {"kept": 2}


async def test_spans_go_out_without_a_reason_when_there_is_none() -> None:
    exported: list[Hop] = []

    async def fail(span_id: str) -> dict[str, Any]:
        raise UnknownTrace("it is older")

    async with ExplainedSpans(exported.append) as spans:
        spans.explain = fail
        spans.export(hops(1), ids(hops(1)))
        await eventually(lambda: len(exported) == 2)
    assert exported == hops(1)


async def test_nothing_waits_for_an_explanation_without_bounds_or_for_ever() -> None:
    exported: list[Hop] = []

    async def never(span_id: str) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async with ExplainedSpans(exported.append) as spans:
        spans.explain = never
        spans.export(hops(0), ids(hops(0)))
        await asyncio.sleep(0)
        for number in range(1, MAX_WAITING + 4):
            spans.export(hops(number), ids(hops(number)))
        assert len(exported) == 6
    assert len(exported) == 2 * (MAX_WAITING + 4)
