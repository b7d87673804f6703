from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.settings import parse_assignments, to_toml
from services.core.config import flatten, nest, parse
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig


def test_values_take_the_type_of_their_setting() -> None:
    assert parse_assignments(
        ["router.max_queue=7", "router.batch_ageing_s=0.5", "tokenizer.nfc=true", "mesh.model=1"]
    ) == {
        "router.max_queue": 7,
        "router.batch_ageing_s": 0.5,
        "tokenizer.nfc": True,
        "mesh.model": "1",
    }


def test_a_section_that_has_a_name_is_made_and_removed() -> None:
    assert parse_assignments(
        ["tenants.acme.max_concurrent=3", "tenants.acme.salt=3", "tenants.bee=null"]
    ) == {"tenants.acme.max_concurrent": 3, "tenants.acme.salt": "3", "tenants.bee": None}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("tenants.acme.max_concurent=3", r"did you mean tenants\.acme\.max_concurrent\?"),
        ("tenants.acme=3", "is no setting but a section"),
        ("tenants=null", "is no setting but a section"),
        ("router=null", "is no setting but a section"),
        ("tenants.a.b.salt=x", "is no setting"),
    ],
)
def test_what_is_no_setting_of_a_named_section_is_refused(assignment: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_assignments([assignment])


def test_a_value_may_hold_an_equals_sign() -> None:
    assert parse_assignments(["control.redis_url=redis://h/?a=b"]) == {
        "control.redis_url": "redis://h/?a=b"
    }


def test_a_value_of_no_type_is_left_for_the_bounds_to_refuse() -> None:
    values = parse_assignments(["router.max_queue=many"])

    with pytest.raises(InvalidArgument, match=r"router\.max_queue: must be a whole number"):
        parse(nest(values))


def test_a_value_nested_too_deeply_to_be_read_is_refused_as_text() -> None:
    values = parse_assignments(["router.max_queue=" + "[" * 100_000])

    with pytest.raises(InvalidArgument, match=r"must be a whole number; got '\[\["):
        parse(nest(values))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("router.max_queue", "must be KEY=VALUE"),
        ("router.max_que=1", r"did you mean router\.max_queue\?"),
        ("zzz=1", "known here: mesh, control,"),
        ("router={}", r"a section; known in it: router\.routing_strategy,"),
    ],
)
def test_what_is_no_assignment_of_a_setting_is_refused(assignment: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_assignments([assignment])


def test_a_configuration_survives_toml() -> None:
    config = MeshConfig()

    assert parse(tomllib.loads(to_toml(flatten(config)))) == config


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2**60), st.booleans())
def test_every_value_survives_toml(text: str, number: int, flag: bool) -> None:
    values: dict[str, Any] = {"a.b.text": text, "a.number": number, "a.flag": flag, "a.x": 0.25}

    assert tomllib.loads(to_toml(values)) == nest(values)
