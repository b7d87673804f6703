from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from firsttoken.control.v1 import control_pb2
from services.control.state import MAX_CHANGES, MeshState, changed_config, first_snapshot
from services.core.config import Snapshot, settings
from services.core.errors import Conflict, InvalidArgument
from services.core.settings import MeshConfig


def member(member_id: str, **fields: object) -> control_pb2.Member:
    known: dict[str, object] = {
        "role": control_pb2.MEMBER_ROLE_WORKER,
        "address": "127.0.0.1:7000",
        **fields,
    }
    return control_pb2.Member(id=member_id, **known)  # type: ignore[arg-type]


def state() -> MeshState:
    return MeshState(snapshot=first_snapshot(MeshConfig()))


def ids(state: MeshState) -> list[str]:
    return [member.id for member in state.members]


def test_the_first_generation_is_one() -> None:
    assert first_snapshot(MeshConfig()) == Snapshot(1, MeshConfig())


def test_a_member_is_listed_from_its_announcement_to_its_end() -> None:
    before = state()
    joined = before.seat(1, member("a"))
    left = joined.unseat(1, "a")

    assert ids(before) == []
    assert ids(joined) == ["a"]
    assert left == before


def test_an_update_replaces_the_whole_member() -> None:
    joined = state().seat(1, member("a", detail="loading", pid=7))
    updated = joined.report(1, member("a", pid=7))

    assert updated.members[0].detail == ""


def test_members_are_ordered_by_role_and_id() -> None:
    router = member("a", role=control_pb2.MEMBER_ROLE_ROUTER)
    joined = state().seat(1, router).seat(2, member("c")).seat(3, member("b"))

    assert ids(joined) == ["b", "c", "a"]


def test_a_member_that_came_back_survives_the_end_of_its_older_stream() -> None:
    joined = state().seat(1, member("a", pid=1)).seat(2, member("a", pid=2))

    assert joined.unseat(1, "a") == joined
    assert joined.report(1, member("a", pid=1)) == joined
    assert ids(joined.unseat(2, "a")) == []


def test_a_member_known_in_two_places_is_listed_once_as_it_is_here() -> None:
    elsewhere = (member("a", detail="old"), member("b"))
    known = state().with_elsewhere(elsewhere).seat(1, member("a", detail="new"))

    assert [(each.id, each.detail) for each in known.members] == [("a", "new"), ("b", "")]
    assert [each.id for each in known.local_members] == ["a"]


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (member(""), "member.id"),
        (member("x" * 129), "member.id"),
        (member("a", role=control_pb2.MEMBER_ROLE_UNSPECIFIED), "member.role"),
        (member("a", role=99), "member.role"),
        (member("a", state=99), "member.state"),
        (member("a", address="nowhere"), "member.address"),
    ],
    ids=["no id", "long id", "no role", "unknown role", "unknown state", "no port"],
)
def test_who_cannot_be_a_member_is_told_why(broken: control_pb2.Member, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        state().seat(1, broken)

    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_report_of_an_unknown_state_is_refused() -> None:
    joined = state().seat(1, member("a"))

    with pytest.raises(InvalidArgument, match=r"member\.state: must be a state .* got 99"):
        joined.report(1, member("a", state=99))


def test_a_member_may_have_no_address_yet() -> None:
    starting = member("a", address="", state=control_pb2.MEMBER_STATE_STARTING)

    assert ids(state().seat(1, starting)) == ["a"]


def test_changes_are_json_values() -> None:
    changed = changed_config(
        first_snapshot(MeshConfig()),
        {
            "router.routing_strategy": '"random"',
            "router.max_queue": "7",
            "router.batch_ageing_s": "1",
            "tokenizer.nfc": "true",
            "debug.delay_ms.router_queue": "20",
        },
        None,
    )

    assert changed.router.routing_strategy == "random"
    assert changed.router.max_queue == 7
    assert changed.router.batch_ageing_s == 1.0
    assert changed.tokenizer.nfc is True
    assert changed.debug.delay_ms.router_queue == 20.0


def test_a_bare_word_will_do_for_a_string() -> None:
    changes = {"router.routing_strategy": "round_robin"}
    changed = changed_config(first_snapshot(MeshConfig()), changes, 1)

    assert changed.router.routing_strategy == "round_robin"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("router.routing_strategi", "random", "did you mean router.routing_strategy?"),
        ("router.routing_strategy", "fastest", "must be one of round_robin, random,"),
        ("router.routing_strategy", "7", "must be a string; got 7"),
        ("router.max_queue", "many", "must be a whole number; got 'many'"),
        ("router.max_queue", "-1", "must be in [0, 1000000]; got -1"),
        ("router.max_queue", "1.5", "must be a whole number; got 1.5"),
        ("router.batch_ageing_s", "NaN", "must be a number; got 'NaN'"),
        ("tokenizer.nfc", "1", "must be true or false; got 1"),
        ("worker.engine", "simulated", "is read at start"),
        ("router", "{}", "is no setting but a section"),
        ("router.max_queue", "[" * 900 + "]" * 900, "must be a whole number; got [[[[[["),
        ("router.max_queue", "[" * 100_000, "must be a whole number; got '[[[["),
        ("", "1", "is no setting"),
    ],
)
def test_a_bad_change_is_refused_with_its_key_and_reason(key: str, value: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        changed_config(first_snapshot(MeshConfig()), {key: value}, None)

    (violation,) = caught.value.violations
    assert violation.field == key
    assert reason in violation.description


def test_every_bad_change_is_named_at_once() -> None:
    changes = {"router.max_queue": "-1", "no.such": "1", "mesh.model": "x", "tokenizer.nfc": "true"}
    with pytest.raises(InvalidArgument) as caught:
        changed_config(first_snapshot(MeshConfig()), changes, None)

    fields = sorted(violation.field for violation in caught.value.violations)
    assert fields == ["mesh.model", "no.such", "router.max_queue"]


def test_no_change_at_all_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one setting"):
        changed_config(first_snapshot(MeshConfig()), {}, None)


def test_more_changes_than_there_are_settings_are_refused_unread() -> None:
    with pytest.raises(InvalidArgument, match=r"changes: must be at most 1000 .* got 500000"):
        changed_config(first_snapshot(MeshConfig()), {f"key{i}": "1" for i in range(500_000)}, None)

    assert len(list(settings())) < MAX_CHANGES


def test_a_setting_read_at_start_may_be_given_the_value_it_has() -> None:
    changes = {"worker.num_slots": "8", "router.max_queue": "7"}

    assert changed_config(first_snapshot(MeshConfig()), changes, None).router.max_queue == 7


def test_another_generation_than_expected_is_a_conflict() -> None:
    with pytest.raises(Conflict, match="at generation 5, not 4"):
        changed_config(Snapshot(5, MeshConfig()), {"router.max_queue": "7"}, 4)


class Joining(RuleBasedStateMachine):
    """Streams come, report and go in any order; the newest of a member speaks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = state()
        self.streams: dict[int, str] = {}
        self.newest: dict[str, int] = {}
        self.next_session = 1

    @rule(member_id=st.sampled_from("abc"))
    def join(self, member_id: str) -> None:
        session, self.next_session = self.next_session, self.next_session + 1
        self.state = self.state.seat(session, member(member_id, pid=session))
        self.streams[session] = member_id
        self.newest[member_id] = session

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        if self.streams:
            session = data.draw(st.sampled_from(sorted(self.streams)))
            self.state = self.state.report(session, member(self.streams[session], pid=session))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.streams:
            session = data.draw(st.sampled_from(sorted(self.streams)))
            self.state = self.state.unseat(session, self.streams.pop(session))

    @invariant()
    def newest_streams_speak(self) -> None:
        self.state.check_integrity()
        listed = {each.id: each.pid for each in self.state.local_members}

        assert listed == {name: s for name, s in self.newest.items() if s in self.streams}


TestJoining = Joining.TestCase
