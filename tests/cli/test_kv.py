from __future__ import annotations

import json
import re
import shlex
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.main import main
from tests.cli.running import COMMAND, Endpoints, Result, Run, run_to_end, wait_for

Start = Callable[..., Run]
Kv = Callable[..., Result]

FIRSTTOKEN = shlex.join(COMMAND)
SMALL = ("--engine", "simulated", "--workers", "1", "--no-gateway", "--no-observer")


@pytest.fixture
def kv(mesh: Endpoints, capsys: pytest.CaptureFixture[str]) -> Kv:
    """The command, without a process of its own for each of the many looks."""

    def run(*arguments: str) -> Result:
        status = main(["kv", *arguments, "--control", mesh.control])
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def prompt(mesh: Endpoints) -> str:
    """One that was answered."""
    return _answered(mesh)


def _answered(mesh: Endpoints) -> str:
    text = f"{uuid.uuid4()} " + "way " * 300
    answer = run_to_end("generate", "--raw", "--max-tokens", "1", "--json", text, env=mesh.env)
    assert answer.status == 0, answer
    return text


def until_stored(kv: Kv, prompt: str) -> None:
    """In both tiers: evicting from L2 waits until nothing is on its way there."""

    def is_stored() -> bool:
        result = kv("match", "--json", "--raw", prompt)
        return bool(matched(result)["l1_blocks"] == result.json["blocks"] >= 4)

    wait_for(is_stored, 60, lambda: "the prompt's blocks are not in the store")
    assert kv("evict", "--tenant", "nobody", "--tier", "l2").status == 0


def matched(result: Result) -> Any:
    [store] = result.json["stores"]
    [engine] = store["engines"]
    return engine


def test_match_says_how_much_of_a_prompt_is_in_which_tier(
    mesh: Endpoints, kv: Kv, prompt: str
) -> None:
    until_stored(kv, prompt)
    result = run_to_end("kv", "match", "--json", "--raw", prompt, env=mesh.env)
    document = result.json
    found = matched(result)

    assert result.status == 0
    assert len(result.stdout.splitlines()) == 1
    assert document["tokens"] > 4 * 64
    assert document["blocks"] == document["tokens"] // 64
    assert found["engine"] == "simulated"
    assert found["l1_blocks"] == found["blocks"] == document["blocks"]
    assert found["tokens"] == found["l1_tokens"] == 64 * document["blocks"]


def test_match_in_words(kv: Kv, prompt: str) -> None:
    first, line = kv("match", "--raw", prompt).stdout.splitlines()

    assert re.fullmatch(r"\d+ tokens, \d+ full blocks of 64", first)
    assert "simulated engine: " in line
    assert re.search(r"\d+ tokens \(\d+ blocks\) in L1, \d+ \(\d+\) in L1 or L2$", line)


def test_a_prompt_may_be_token_ids_or_a_chat(kv: Kv, tmp_path: Path) -> None:
    ids = kv("match", "--json", "--ids", ",".join(["5"] * 200)).json
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "Hello"}]))
    chat = kv("match", "--json", "--chat", str(file))

    assert (ids["tokens"], ids["blocks"]) == (200, 3)
    assert chat.json["tokens"] > 1
    assert matched(chat)["blocks"] == 0


def test_another_tenant_and_another_salt_have_nothing_of_it(kv: Kv, prompt: str) -> None:
    for other in (("--tenant", "other"), ("--cache-salt", "s")):
        assert matched(kv("match", "--json", "--raw", *other, prompt))["blocks"] == 0


def test_stats_by_tier_and_tenant(kv: Kv, prompt: str) -> None:
    until_stored(kv, prompt)
    result = kv("stats", "--json")
    [store] = result.json["stores"]

    assert result.status == 0
    assert store["l1"]["num_blocks"] >= 4
    assert store["l1"]["num_reserved"] == 0
    assert store["l1"]["bytes_written"] > 0
    assert store["l2"]["connected"]
    assert store["l2"]["bytes_written"] > 0
    [tenant] = [each for each in store["tenants"] if each["tenant"] == ""]
    assert tenant["num_blocks"] >= 4
    # On a busy machine Redis may answer later than it is waited for: that is counted, no more.
    assert store["rejected"].keys() <= {"l2_late"}


def test_stats_in_words(kv: Kv, prompt: str) -> None:
    until_stored(kv, prompt)
    lines = kv("stats").stdout.splitlines()

    assert lines[0].startswith("kvstore-")
    assert [re.split(r"  +", line)[1] for line in lines[1:6]] == [
        *("tier", "L1 (memory)", "L2 (Redis)", "tenant in L1", '""')
    ]


def test_evicted_blocks_leave_their_tier_and_no_other(mesh: Endpoints, kv: Kv) -> None:
    prompt = _answered(mesh)
    until_stored(kv, prompt)
    nobody = kv("evict", "--tenant", "nobody").stdout
    [from_l1] = kv("evict", "--tenant", "", "--tier", "l1", "--json").json["stores"]
    found = matched(kv("match", "--json", "--raw", prompt))
    [from_all] = kv("evict", "--all", "--json").json["stores"]
    left = matched(kv("match", "--json", "--raw", prompt))
    [stats] = kv("stats", "--json").json["stores"]

    assert nobody.endswith(": 0 blocks from L1, 0 from L2\n")
    assert from_l1["l1_blocks"] >= 4
    assert from_l1["l2_blocks"] == 0
    assert found["l1_blocks"] == 0
    assert found["blocks"] >= 4
    assert from_all["l2_blocks"] >= 4
    assert left["blocks"] == stats["l1"]["num_blocks"] == 0


def test_an_eviction_names_whose_blocks_go(kv: Kv, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        kv("evict")

    assert caught.value.code == 2
    assert "one of the arguments --tenant --all is required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("match", "--ids", "4000000000"), "token_ids"),
        (("match", "--ids=-1"), "the prompt makes no sense"),
        (("match", "--chat", "/no/such/file"), "cannot be read"),
    ],
)
def test_a_prompt_that_is_none_is_one_line(
    kv: Kv, arguments: tuple[str, ...], message: str
) -> None:
    result = kv(*arguments, "--json")

    assert result.status == 1
    assert message in json.dumps(result.json["error"])
    assert len(result.stdout.splitlines()) == 1


def test_without_a_mesh_it_says_so() -> None:
    nobody = run_to_end("kv", "stats", "--control", "127.0.0.1:1")

    assert nobody.status == 1
    assert nobody.stderr.startswith("firsttoken: no control service at 127.0.0.1:1: start a mesh")


def test_without_a_store_it_says_so(start: Start) -> None:
    command = f"{FIRSTTOKEN} kv stats; {FIRSTTOKEN} kv match x --json"
    run = start("up", *SMALL, "--no-kvstore", "--exec", command)
    result = run.finish()

    assert result.status == 1
    assert "firsttoken: no KV store in this mesh is ready\n" in result.stderr
    assert result.json["error"]["code"] == "FAILED_PRECONDITION"


def test_a_store_that_hangs_is_named_and_is_no_success(start: Start) -> None:
    """The store's pid comes out of `status`."""
    find = (
        "import json, sys; members = json.load(sys.stdin)['members'];"
        " print(*[m['pid'] for m in members if m['role'] == 'kvstore'])"
    )
    command = (
        f'pid=$({FIRSTTOKEN} status --json | {sys.executable} -c "{find}"); kill -STOP $pid;'
        f" {FIRSTTOKEN} kv stats --json; status=$?; kill -CONT $pid; exit $status"
    )
    run = start("up", *SMALL, "--exec", command)
    result = run.finish()

    [store] = result.json["stores"]
    assert result.status == 1
    assert store["error"]["code"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert store["id"].startswith("kvstore-")
