from __future__ import annotations

from collections.abc import Callable

from tests.cli.running import Endpoints, Run, run_to_end

Start = Callable[..., Run]


def test_members_have_plain_fields_and_workers_their_load(mesh: Endpoints) -> None:
    result = run_to_end("status", "--json", env=mesh.env)

    members = result.json["members"]
    workers = [member for member in members if member["role"] == "worker"]
    kvstores = [member for member in members if member["role"] == "kvstore"]
    assert len(result.stdout.splitlines()) == 1
    assert len(members) == 7
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
        assert worker["load"]["num_handoffs_taken"] == 0
        assert worker["load"]["kv"]["blocks_loaded"] == 0
        assert worker["load"]["kv"]["rejected"] == {}
    [router] = [member for member in members if member["role"] == "router"]
    assert router["routing"]["strategy"] == "kv_aware"
    assert router["routing"]["num_feeds"] == 3
    assert router["routing"]["num_not_recorded"] == 0
    for kvstore in kvstores:
        assert kvstore["kvstore"]["l1"]["num_blocks"] >= 0
        assert kvstore["kvstore"]["l2"]["num_dropped_writes"] == 0
        # Redis is waited for as long as computing takes; nothing else may be refused.
        [store] = run_to_end("kv", "stats", "--json", env=mesh.env).json["stores"]
        assert kvstore["kvstore"]["num_rejected"] <= store["rejected"].pop("l2_late", 0)
        assert store["rejected"] == {}
    assert len(kvstores) == 1


def test_the_table_has_a_line_a_member(mesh: Endpoints) -> None:
    lines = run_to_end("status", env=mesh.env).stdout.splitlines()

    assert lines[0].endswith("7 members")
    assert [line.split()[0] for line in lines[2:]] == [
        *("role", "observer", "gateway", "kvstore", "router", "worker", "worker", "tokenizer")
    ]
    assert sum("blocks in memory" in line for line in lines) == 1
    assert sum("kv_aware, 0 in flight" in line for line in lines) == 1
    assert sum("0 running and 0 waiting for 8 slots" in line for line in lines) == 2


def test_hand_offs_and_blocks_are_counted(start: Start) -> None:
    """A worker that decodes, one that prefills, and a prompt of several blocks."""
    settings = ("mesh.block_tokens=16", "worker.handoff_min_tokens=1")
    assignments = [part for setting in settings for part in ("--set", setting)]
    prompt = "One two three four five six seven eight nine ten. " * 4
    generate = f"firsttoken generate --max-tokens 4 '{prompt}'"
    wait = "until firsttoken status | grep -q '[1-9] of [0-9]* blocks in memory'; do :; done"
    run = start(
        *("up", "--engine", "simulated", "--workers", "1", "--prefill-workers", "1"),
        *("--no-gateway", "--no-observer"),
        *(*assignments, "--exec", f"{generate} && {wait} && firsttoken status"),
    )

    result = run.finish()

    assert result.status == 0, result.stderr
    assert "for decode" in result.stdout
    assert "prompts computed by others: 1" in result.stdout
    assert "for prefill" in result.stdout
    assert "prompts computed for others: 1" in result.stdout


def test_no_control_service_is_one_line_of_json_with_json() -> None:
    result = run_to_end("status", "--json", "--control", "127.0.0.1:1")

    assert result.status == 1
    assert result.json["error"]["code"] == "UNAVAILABLE"
    assert result.stderr == ""
