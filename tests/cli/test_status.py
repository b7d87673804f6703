from __future__ import annotations

from tests.cli.running import Endpoints, run_to_end


def test_members_have_plain_fields_and_workers_their_load(mesh: Endpoints) -> None:
    result = run_to_end("status", "--json", env=mesh.env)

    members = result.json["members"]
    workers = [member for member in members if member["role"] == "worker"]
    assert len(result.stdout.splitlines()) == 1
    assert len(members) == 4
    for member in members:
        assert member["state"] == "ready"
        assert member["generation"] == result.json["generation"]
        assert ":" in member["address"]
        assert member["pid"] > 0
    for worker in workers:
        assert worker["worker"]["engine"] == "simulated"
        assert worker["worker"]["role"] == "both"
        assert worker["load"]["num_running"] == 0
        assert worker["worker"]["num_blocks"] == 2048


def test_the_table_has_a_line_a_member(mesh: Endpoints) -> None:
    lines = run_to_end("status", env=mesh.env).stdout.splitlines()

    assert lines[0].endswith("4 members")
    assert [line.split()[0] for line in lines[2:]] == [
        *("role", "router", "worker", "worker", "tokenizer")
    ]
    assert sum("0 running and 0 waiting for 8 slots" in line for line in lines) == 2


def test_no_control_service_is_one_line_of_json_with_json() -> None:
    result = run_to_end("status", "--json", "--control", "127.0.0.1:1")

    assert result.status == 1
    assert result.json["error"]["code"] == "UNAVAILABLE"
    assert result.stderr == ""
