from __future__ import annotations

import math

import orjson
import pytest

from firsttoken.observer.v1 import observer_pb2
from services.core.config import Snapshot
from services.core.settings import MeshConfig
from services.observer import saved
from services.observer.books import Books
from services.observer.doctor.finding import Clues
from services.observer.exposition import render
from services.observer.hearing import Teller
from services.observer.state import make_state


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1e300])
def test_a_level_that_is_no_number_does_not_take_the_page_away(value: float) -> None:
    books = Books(Snapshot(1, MeshConfig()), None)
    labels = {"request_class": "interactive"}
    name = "firsttoken.router.requests.waiting"
    sample = observer_pb2.Sample(name=name, value=value, labels=labels)
    books.hear(Teller("r", "router", "h", 1), observer_pb2.ReportRequest(samples=[sample]))

    orjson.dumps(make_state(books.window(), [], books.history))


def test_any_number_of_dropped_hops_can_be_told() -> None:
    books = Books(Snapshot(1, MeshConfig()), None)
    for member_id in ("a", "b"):
        told = observer_pb2.ReportRequest(num_dropped=2**64 - 1)
        books.hear(Teller(member_id, "router", "h", 1), told)

    orjson.dumps(make_state(books.window(), [], books.history))
    saved.load(saved.dump(books.window(), Clues()), "a window")
    assert render(books.families()).body


@pytest.mark.parametrize("value", [1e300, math.inf, 2.0**64])
def test_a_count_that_leaps_does_not_take_the_page_away(value: float) -> None:
    books = Books(Snapshot(1, MeshConfig()), None)
    for level in (0.0, value, -value):
        for name, labels in (
            ("firsttoken.worker.prompt.tokens", {"source": "worker"}),
            ("firsttoken.kvstore.hits", {"tier": "l1"}),
        ):
            sample = observer_pb2.Sample(name=name, value=level, labels=labels)
            told = observer_pb2.ReportRequest(samples=[sample])
            books.hear(Teller("w", "worker", "h", 1), told)

        orjson.dumps(make_state(books.window(), [], books.history))
        assert render(books.families()).body


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, -1.0])
def test_a_bubble_that_lasted_no_time_is_not_kept(duration_s: float) -> None:
    books = Books(Snapshot(1, MeshConfig()), None)
    told = observer_pb2.ReportRequest()
    told.bubbles.add(stage="queue", duration_s=duration_s)
    books.hear(Teller("w", "worker", "h", 1), told)

    assert not list(books.bubbles)
    saved.load(saved.dump(books.window(), Clues()), "a window")
