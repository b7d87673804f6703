from __future__ import annotations

import pytest

from services.core.config import flatten
from services.core.settings import MeshConfig
from tests.cli.running import Endpoints, run_to_end


def test_get_prints_every_setting(mesh: Endpoints) -> None:
    result = run_to_end("config", "get", "--json", env=mesh.env)

    assert result.json["config"].keys() == flatten(MeshConfig()).keys()
    assert result.json["config"]["worker.engine"] == "simulated"
    assert len(result.stdout.splitlines()) == 1


def test_get_prints_one_value_plainly(mesh: Endpoints) -> None:
    assert run_to_end("config", "get", "worker.num_slots", env=mesh.env).stdout == "8\n"
    assert run_to_end("config", "get", "worker.engine", env=mesh.env).stdout == "simulated\n"


def test_get_prints_a_section(mesh: Endpoints) -> None:
    lines = run_to_end("config", "get", "worker.simulated", env=mesh.env).stdout.splitlines()

    assert "worker.simulated.num_blocks = 2048" in lines
    assert all(line.startswith("worker.simulated.") for line in lines)


def test_get_of_an_unknown_setting_names_the_nearest(mesh: Endpoints) -> None:
    result = run_to_end("config", "get", "router.max_que", env=mesh.env)

    assert result.status == 1
    assert result.stderr == (
        "firsttoken: router.max_que: is no setting; did you mean router.max_queue?\n"
    )


def test_a_change_reaches_every_member_and_shows_in_diff(mesh: Endpoints) -> None:
    before = run_to_end("status", "--json", env=mesh.env).json
    change = run_to_end("config", "set", "--json", "router.max_attempts=2", env=mesh.env).json
    after = run_to_end("status", "--json", env=mesh.env).json
    diff = run_to_end("config", "diff", "--json", env=mesh.env).json

    assert change["generation"] == before["generation"] + 1
    assert change["changes"] == {"router.max_attempts": 2}
    assert change["members"] == change["applied"] == 7
    assert {member["generation"] for member in after["members"]} == {change["generation"]}
    assert [member["pid"] for member in after["members"]] == [
        member["pid"] for member in before["members"]
    ]
    assert diff["changed"]["router.max_attempts"] == {"value": 2, "default": 3}


@pytest.mark.parametrize(
    ("assignment", "field", "said"),
    [
        ("router.max_attempts=0", "router.max_attempts", "must be in [1, 16]; got 0"),
        ("router.routing_strategy=fifo", "router.routing_strategy", "must be one of round_robin"),
        ("worker.num_slots=2", "worker.num_slots", "is read at start"),
        ("router.max_que=1", "router.max_que", "did you mean router.max_queue?"),
    ],
)
def test_a_bad_change_is_refused_with_field_and_reason(
    mesh: Endpoints, assignment: str, field: str, said: str
) -> None:
    before = run_to_end("config", "get", "--json", env=mesh.env).json
    refused = run_to_end("config", "set", "--json", assignment, env=mesh.env)
    after = run_to_end("config", "get", "--json", env=mesh.env).json

    assert refused.status == 1
    (violation,) = refused.json["error"]["violations"]
    assert violation["field"] == field
    assert said in violation["description"]
    assert after == before


def test_no_control_service_is_one_line_that_says_what_to_do() -> None:
    result = run_to_end("config", "get", "--control", "127.0.0.1:1")

    assert result.status == 1
    assert result.stderr == (
        "firsttoken: no control service at 127.0.0.1:1: start a mesh with `firsttoken up`,"
        " or name another address with --control\n"
    )


def test_docs_print_the_reference() -> None:
    assert run_to_end("config", "docs").stdout.startswith("# Configuration\n")
