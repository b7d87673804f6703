from __future__ import annotations

import pytest

from firsttoken.control.v1 import control_pb2
from router.fleet import Announced, Role
from router.roster import Roster, Store, Tokenizer, read_members

STARTING = control_pb2.MEMBER_STATE_STARTING
READY = control_pb2.MEMBER_STATE_READY
DRAINING = control_pb2.MEMBER_STATE_DRAINING
CAPACITY = control_pb2.WorkerCapacity(num_slots=4, max_context_tokens=512)


def make_worker(
    name: str, *, state: control_pb2.MemberState.ValueType = READY, model: str = "small"
) -> control_pb2.Member:
    return control_pb2.Member(
        id=name,
        role=control_pb2.MEMBER_ROLE_WORKER,
        address=f"{name}:1",
        state=state,
        model=model,
        worker=CAPACITY,
    )


def make_tokenizer(
    name: str, *, state: control_pb2.MemberState.ValueType = READY, model: str = "small"
) -> control_pb2.Member:
    return control_pb2.Member(
        id=name,
        role=control_pb2.MEMBER_ROLE_TOKENIZER,
        address=f"{name}:1",
        state=state,
        model=model,
    )


ROUTER = control_pb2.Member(id="r", role=control_pb2.MEMBER_ROLE_ROUTER, state=READY)


def test_reads_who_does_what() -> None:
    assert read_members([ROUTER, make_worker("w"), make_tokenizer("t")]) == Roster(
        "small", (Tokenizer("t", "t:1"),), (Announced("w", "w:1", True, 4, 512),)
    )


@pytest.mark.parametrize(
    ("announced", "role"),
    [
        (control_pb2.WORKER_ROLE_UNSPECIFIED, Role.BOTH),
        (control_pb2.WORKER_ROLE_BOTH, Role.BOTH),
        (control_pb2.WORKER_ROLE_PREFILL, Role.PREFILL),
        (control_pb2.WORKER_ROLE_DECODE, Role.DECODE),
    ],
)
def test_reads_the_role_and_fingerprint_of_a_worker(
    announced: control_pb2.WorkerRole.ValueType, role: Role
) -> None:
    member = make_worker("w")
    member.worker.role = announced
    member.worker.fingerprint = "abc"

    [worker] = read_members([member]).workers
    assert worker.role is role
    assert worker.fingerprint == "abc"


def test_knows_workers_that_are_not_ready_as_such() -> None:
    roster = read_members(
        [make_worker("a", state=STARTING), make_worker("b", state=DRAINING), make_worker("c")]
    )

    assert [worker.ready for worker in roster.workers] == [False, False, True]


def test_leaves_out_tokenizers_that_are_not_ready() -> None:
    roster = read_members([make_tokenizer("a", state=STARTING, model=""), make_tokenizer("b")])

    assert roster.tokenizers == (Tokenizer("b", "b:1"),)


def test_a_worker_of_another_model_than_the_tokenizers_is_never_ready() -> None:
    roster = read_members([make_worker("w", model="big"), make_tokenizer("t", model="small")])

    assert roster.model == "small"
    assert not roster.workers[0].ready


def test_an_empty_mesh_has_no_model() -> None:
    assert read_members([]) == Roster("", (), ())


@pytest.mark.parametrize(("state", "num_known"), [(READY, 1), (STARTING, 0), (DRAINING, 0)])
def test_knows_the_stores_that_are_ready_and_their_hosts(
    state: control_pb2.MemberState.ValueType, num_known: int
) -> None:
    store = control_pb2.Member(
        id="s", role=control_pb2.MEMBER_ROLE_KVSTORE, address="[::1]:7000", state=state
    )
    assert read_members([store]).stores == (Store("s", "[::1]:7000"),) * num_known
    assert Store("s", "[::1]:7000").host == "[::1]"
