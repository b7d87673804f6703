"""What the membership means to a router."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from firsttoken.control.v1 import control_pb2
from router.fleet import Announced, Role

_ROLES = {
    control_pb2.WORKER_ROLE_PREFILL: Role.PREFILL,
    control_pb2.WORKER_ROLE_DECODE: Role.DECODE,
}


class Tokenizer(NamedTuple):
    id: str
    address: str


class Store(NamedTuple):
    """A KV store, in the memory of the node at `host`."""

    id: str
    address: str

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


class Roster(NamedTuple):
    # The model that the mesh serves; "" while nobody is there to say it.
    model: str
    # Those that are ready.
    tokenizers: tuple[Tokenizer, ...]
    workers: tuple[Announced, ...]
    # Those that are ready.
    stores: tuple[Store, ...] = ()


def read_members(members: Iterable[control_pb2.Member]) -> Roster:
    """A mesh serves one model, the tokenizers'; a worker of another one is never ready."""
    ready, workers, stores = [], [], []
    for member in members:
        if member.role == control_pb2.MEMBER_ROLE_WORKER:
            workers.append(member)
        elif member.role == control_pb2.MEMBER_ROLE_TOKENIZER and _is_ready(member):
            ready.append(member)
        elif member.role == control_pb2.MEMBER_ROLE_KVSTORE and _is_ready(member):
            stores.append(Store(member.id, member.address))
    model = next((member.model for member in (*ready, *workers) if member.model), "")
    return Roster(
        model,
        tuple(Tokenizer(member.id, member.address) for member in ready if member.model == model),
        tuple(_announced(member, model) for member in workers),
        tuple(stores),
    )


def _is_ready(member: control_pb2.Member) -> bool:
    return member.state == control_pb2.MEMBER_STATE_READY


def _announced(member: control_pb2.Member, model: str) -> Announced:
    return Announced(
        id=member.id,
        address=member.address,
        ready=_is_ready(member) and member.model == model,
        num_slots=member.worker.num_slots,
        max_context_tokens=member.worker.max_context_tokens,
        role=_ROLES.get(member.worker.role, Role.BOTH),
        fingerprint=member.worker.fingerprint,
        num_blocks=member.worker.num_blocks,
        direct_address=member.direct_address,
    )
