"""Plans that are given out, and what becomes of them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.worker.v1 import worker_pb2
from router import plans as plans_module
from router.plans import OpenPlan, Plans
from services.core.ledger import Ledger
from services.runtime import tickets
from tests.runtime.waiting import eventually

WORKER, ADDRESS = "worker-1", "127.0.0.1:1"


class Held:
    """What a plan holds, and what is told of it: grant, lease and account in one."""

    def __init__(self) -> None:
        self.ledger = Ledger(100.0)
        self.told: list[str] = []

    def answered(self, grant: Any) -> None:
        self.told.append("first token")

    def release(self) -> None:
        self.told.append("released")

    def learn(self, finished: common_pb2.Finished, grant: Any) -> None:
        self.told.append(f"learned {finished.usage.completion_tokens}")

    def record(self, error: str, code: str, ended_s: float) -> None:
        self.told.append(f"recorded {code}".strip())

    def record_plan(self, error: str, code: str, ended_s: float) -> None:
        self.told.append(f"plan recorded {code}".strip())


def add(plans: Plans, number: int = 1, worker_id: str = WORKER) -> Held:
    held: Any = Held()
    plan = direct_pb2.Plan(id=bytes([number]), worker_id=worker_id)
    lease = ExitStack()
    lease.callback(held.told.append, "lease given back")
    plans.add(OpenPlan(plan, held, held, lease, planned_s=101.0))
    assert isinstance(held, Held)
    return held


def hear(plans: Plans, *events: worker_pb2.PlanEvent, running: list[int] | None = None) -> None:
    message = worker_pb2.FollowPlansResponse(events=events)
    if running is not None:
        message.running.ids.extend(bytes([number]) for number in running)
        message.running.SetInParent()
    plans.hear(WORKER, ADDRESS, message)


def started(number: int = 1) -> worker_pb2.PlanEvent:
    return worker_pb2.PlanEvent(id=bytes([number]), started=worker_pb2.PlanStarted())


def first_token(number: int = 1) -> worker_pb2.PlanEvent:
    ledger = common_pb2.Ledger(prefill_ms=20.0, total_ms=25.0)
    told = worker_pb2.PlanFirstToken(ledger=ledger)
    return worker_pb2.PlanEvent(id=bytes([number]), first_token=told)


def ended(number: int = 1, **fields: Any) -> worker_pb2.PlanEvent:
    return worker_pb2.PlanEvent(id=bytes([number]), ended=worker_pb2.PlanEnded(**fields))


def finished() -> common_pb2.Finished:
    return common_pb2.Finished(
        usage=common_pb2.Usage(completion_tokens=3), ledger=common_pb2.Ledger(total_ms=25.0)
    )


ENDED = ["released", "lease given back"]


async def test_a_plan_lives_until_its_worker_says_that_it_has_ended() -> None:
    plans = Plans()
    held = add(plans)
    hear(plans, started(), first_token())
    assert (plans.num_open, held.told) == (1, ["first token"])
    # Its own second, and what the worker had.
    assert held.ledger.total_s == pytest.approx(1.025)
    assert held.ledger.residual_s == pytest.approx(1.005)
    hear(plans, ended(finished=finished()))

    assert held.told == ["first token", "learned 3", *ENDED, "recorded"]
    assert plans.counts.answered == 1
    plans.check_idle()


async def test_an_answer_of_one_message_has_a_first_token_too() -> None:
    plans = Plans()
    held = add(plans)
    hear(plans, started(), ended(finished=finished()))
    assert held.told == ["first token", "learned 3", *ENDED, "recorded"]


async def test_why_it_failed_is_recorded() -> None:
    plans = Plans()
    held = add(plans)
    ledger = common_pb2.Ledger(queue_ms=5.0, total_ms=5.0)
    hear(plans, started(), ended(error_reason="SLOW_CLIENT", error="too slow", ledger=ledger))
    assert held.told == ENDED
    plans.close()
    assert held.told == [*ENDED, "recorded SLOW_CLIENT"]
    assert held.ledger.total_s == pytest.approx(1.005)
    assert held.ledger.first_token_s is None


async def test_a_plan_that_nobody_begins_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "LIFETIME_S", 0.0)
    monkeypatch.setattr(plans_module, "EXPIRY_GRACE_S", 0.05)
    plans = Plans()
    left, begun = add(plans, 1), add(plans, 2)
    hear(plans, started(2))
    await eventually(lambda: left.told)

    assert left.told == [*ENDED, "recorded PLAN_EXPIRED"]
    assert left.ledger.first_token_s is None
    assert left.ledger.total_s == pytest.approx(1.0)
    assert (begun.told, plans.num_open) == ([], 1)
    # Its client came very late: nobody waits for it any more.
    hear(plans, started(1), ended(1, finished=finished()))
    assert plans.counts.expired == 1


async def test_a_plan_whose_client_has_come_back_is_no_request_of_its_own() -> None:
    plans = Plans()
    held = add(plans)
    plans.resumed(bytes([1]))
    plans.resumed(b"nobody's")
    hear(plans, started(), ended(error_reason="CANCELLED"))
    assert held.told == [*ENDED, "plan recorded CANCELLED"]


async def test_a_client_may_come_back_with_its_plan_after_its_worker_has_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = Plans()
    back = add(plans, 1)
    hear(plans, started(1), ended(1, error_reason="CANCELLED"))
    assert (back.told, plans.num_open) == (ENDED, 0)
    plans.resumed(bytes([1]))
    plans.resumed(bytes([1]))
    assert back.told == [*ENDED, "plan recorded CANCELLED"]

    monkeypatch.setattr(plans_module, "RESUMPTION_GRACE_S", 0.0)
    left = add(plans, 2)
    hear(plans, started(2), ended(2, error_reason="CANCELLED"))
    assert left.told == ENDED
    await eventually(lambda: left.told == [*ENDED, "recorded CANCELLED"])


async def test_what_ended_while_nobody_heard_is_lost() -> None:
    plans = Plans()
    runs, lost, waits, elsewhere = (add(plans, number) for number in range(4))
    hear(plans, started(0), started(1))
    plans.deaf(WORKER)
    hear(plans, running=[0])
    plans.resumed(bytes([1]))

    assert lost.told == [*ENDED, "plan recorded PLAN_LOST"]
    assert not runs.told
    assert not waits.told
    assert not elsewhere.told
    assert plans.address_of(WORKER) == ADDRESS


async def test_what_began_while_nobody_heard_does_not_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tickets, "LIFETIME_S", 0.0)
    monkeypatch.setattr(plans_module, "EXPIRY_GRACE_S", 0.02)
    plans = Plans()
    runs, left = add(plans, 1), add(plans, 2)
    hear(plans, running=[1])
    await eventually(lambda: left.told)

    assert (runs.told, plans.num_open) == ([], 1)
    hear(plans, ended(1, finished=finished()))
    assert plans.counts.answered == 1


async def test_a_worker_that_has_left_holds_nothing() -> None:
    plans = Plans()
    held, planned = add(plans, 1), add(plans, 2)
    hear(plans, started(1))
    plans.gone(WORKER)

    assert held.told == ENDED
    assert not planned.told
    assert plans.address_of(WORKER) == ""
    plans.close()
    assert held.told == [*ENDED, "recorded PLAN_LOST"]


async def test_a_worker_that_says_nothing_for_long_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans_module, "DEAF_S", 0.05)
    monkeypatch.setattr(plans_module, "RESUMPTION_GRACE_S", 0.0)
    plans = Plans()
    held = add(plans)
    hear(plans, started())
    plans.deaf(WORKER)
    assert plans.address_of(WORKER) == ""
    await eventually(lambda: held.told == [*ENDED, "recorded PLAN_LOST"])


async def test_another_workers_word_counts_for_nothing() -> None:
    plans = Plans()
    held = add(plans, worker_id="worker-2")
    hear(plans, started(), ended(finished=finished()))
    assert (held.told, plans.num_open) == ([], 1)
    plans.close()


async def test_closing_ends_all() -> None:
    plans = Plans()
    held = add(plans)
    plans.deaf(WORKER)
    plans.close()
    assert held.told == [*ENDED, "recorded PLAN_LOST"]
    assert plans.counts.lost == plans.counts.planned == 1
    plans.check_idle()
