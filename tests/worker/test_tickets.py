from __future__ import annotations

import pytest

from firsttoken.direct.v1 import direct_pb2
from services.core.errors import PermissionDenied
from services.core.tickets import KeyRing, derive_ring
from services.runtime import tickets
from worker.tickets import CLOCK_SKEW_S, TicketDesk

NOW_S = 1e9
RING = derive_ring(b"secret", NOW_S, 3600.0)
CALL = b"what is to be done"


def request(
    *, ring: KeyRing = RING, call: bytes = CALL, number: int = 1, worker_id: str = "here"
) -> direct_pb2.GenerateRequest:
    plan = direct_pb2.Plan(
        id=bytes([number]) * tickets.PLAN_ID_BYTES,
        worker_id=worker_id,
        call_digest=tickets.digest(CALL),
        expires_s=NOW_S + tickets.LIFETIME_S,
    )
    return direct_pb2.GenerateRequest(call=call, ticket=tickets.issue(ring, plan))


def refusal(
    desk: TicketDesk,
    asked: direct_pb2.GenerateRequest,
    *,
    ring: KeyRing = RING,
    now_s: float = NOW_S,
) -> str:
    with pytest.raises(PermissionDenied) as raised:
        desk.admit(ring, asked, now_s)
    assert desk.refused[raised.value.reason] == 1
    return raised.value.reason


def test_a_plan_begins_once() -> None:
    desk = TicketDesk("here")
    assert desk.admit(RING, request(), NOW_S).worker_id == "here"
    assert desk.admit(RING, request(number=2), NOW_S)
    assert refusal(desk, request()) == "TICKET_USED"


def test_a_ticket_is_for_one_worker_and_one_call() -> None:
    assert refusal(TicketDesk("here"), request(worker_id="there")) == "TICKET_FOREIGN_WORKER"
    assert refusal(TicketDesk("here"), request(call=b"something else")) == "TICKET_CALL_CHANGED"


def test_a_ticket_expires() -> None:
    end_s = NOW_S + tickets.LIFETIME_S + CLOCK_SKEW_S
    assert TicketDesk("here").admit(RING, request(), end_s)
    assert refusal(TicketDesk("here"), request(), now_s=end_s + 0.1) == "TICKET_EXPIRED"


def test_only_routers_of_this_mesh_make_tickets() -> None:
    desk = TicketDesk("here")
    asked = request()
    asked.ticket = b"no ticket at all"
    assert refusal(desk, asked) == "TICKET_FORGED"

    told = direct_pb2.Ticket.FromString(request().ticket)
    told.signature = bytes(len(told.signature))
    asked.ticket = told.SerializeToString()
    with pytest.raises(PermissionDenied, match="was not made by a router"):
        desk.admit(RING, asked, NOW_S)

    other = derive_ring(b"another secret", NOW_S, 3600.0)
    assert refusal(desk, request(ring=other)) == "TICKET_KEY_UNKNOWN"
    with pytest.raises(PermissionDenied, match="not known here"):
        TicketDesk("here").admit(KeyRing(), request(), NOW_S)


def test_a_changed_plan_is_no_plan() -> None:
    told = direct_pb2.Ticket.FromString(request(worker_id="there").ticket)
    plan = direct_pb2.Plan.FromString(told.plan)
    plan.worker_id = "here"
    told.plan = plan.SerializeToString()
    asked = direct_pb2.GenerateRequest(call=CALL, ticket=told.SerializeToString())
    assert refusal(TicketDesk("here"), asked) == "TICKET_FORGED"


def test_used_tickets_are_remembered_until_they_expire() -> None:
    desk = TicketDesk("here")
    for number in range(5):
        desk.admit(RING, request(number=number), NOW_S)
    assert desk.num_remembered == 5
    later_s = NOW_S + tickets.LIFETIME_S + CLOCK_SKEW_S + 1
    assert refusal(desk, request(number=1), now_s=later_s) == "TICKET_EXPIRED"
    assert desk.num_remembered == 0
