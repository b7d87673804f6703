"""Tickets: a router's word to a worker, carried by a caller.

A ticket covers the plan and, by its digest, every byte of the call. Whoever carries it can
change nothing, and learns nothing that is not its own request's.
"""

from __future__ import annotations

import hashlib

from google.protobuf.message import DecodeError

from firsttoken.control.v1 import control_pb2
from firsttoken.direct.v1 import direct_pb2
from services.core.errors import PermissionDenied
from services.core.tickets import KeyRing, SigningKey

PLAN_ID_BYTES = 16
# From the plan on, until it must have begun.
LIFETIME_S = 1.0
# Why a plan has ended that no client has come for.
EXPIRED = "PLAN_EXPIRED"


def ring_to_proto(ring: KeyRing) -> control_pb2.TicketKeys:
    keys = [control_pb2.TicketKey(id=key.id, secret=key.secret) for key in ring.keys]
    return control_pb2.TicketKeys(keys=keys, current_id=ring.current_id)


def ring_from_proto(message: control_pb2.TicketKeys) -> KeyRing:
    return KeyRing(
        tuple(SigningKey(key.id, key.secret) for key in message.keys), message.current_id
    )


def digest(call: bytes) -> bytes:
    return hashlib.sha256(call).digest()


def issue(ring: KeyRing, plan: direct_pb2.Plan) -> bytes:
    data = plan.SerializeToString()
    ticket = direct_pb2.Ticket(plan=data, key_id=ring.current_id, signature=ring.sign(data))
    return ticket.SerializeToString()


def read(ring: KeyRing, ticket: bytes, call: bytes) -> direct_pb2.Plan:
    """The plan of a ticket that some router signed for this call.

    Raises PermissionDenied. Whether it is still in time, and for whom, is left to the reader.
    """
    try:
        told = direct_pb2.Ticket.FromString(ticket)
        is_good = ring.verifies(told.plan, told.key_id, told.signature)
        plan = direct_pb2.Plan.FromString(told.plan)
    except DecodeError:
        is_good = False
    except LookupError:
        raise PermissionDenied(
            "the ticket is signed with a key that is not known here: plan anew",
            reason="TICKET_KEY_UNKNOWN",
        ) from None
    if not is_good:
        raise PermissionDenied(
            "the ticket was not made by a router of this mesh: pass on what Plan gives",
            reason="TICKET_FORGED",
        )
    if digest(call) != plan.call_digest:
        raise PermissionDenied(
            "the ticket is for another call: pass on both as Plan gives them",
            reason="TICKET_CALL_CHANGED",
        )
    return plan
