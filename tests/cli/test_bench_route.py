from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from services.cli.main import main
from services.core.settings import ROUTING_STRATEGIES

SMALL = ["bench", "route", "--requests", "60", "--prefix-tokens", "500", "--workers", "3"]


def test_a_table_of_all_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--strategies", "round_robin,kv_aware"]) == 0
    out = capsys.readouterr().out

    assert "384 blocks of 64 tokens" in out
    assert "an offline router that knows all such caches" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("  ")]
    assert [row[0] for row in rows[1:]] == ["round_robin", "kv_aware"]


def test_a_document_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "a.html"
    trace = tmp_path / "<trace>.jsonl"
    header = {"format": "firsttoken-trace", "version": 1, "block_tokens": 16}
    request = {"at_s": 0.5, "prompt_tokens": 40, "output_tokens": 4, "blocks": [[0, 1]]}
    trace.write_text("".join(json.dumps(row) + "\n" for row in (header, request, request)))
    arguments = ["--trace", str(trace), "--strategies", "random", "--plot", str(page), "--json"]

    assert main(["bench", "route", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workload"]["requests"] == 2
    assert document["workload"]["rate_per_s"] is None  # all at once
    assert document["mesh"]["block_tokens"] == 16
    assert [row["strategy"] for row in document["strategies"]] == ["random"]
    text = page.read_text(encoding="utf-8")
    assert "<trace>" not in text
    assert _Page(text).open_tags == []


def test_some_workers_compute_prompts_for_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--strategies", "kv_aware", "--prefill-workers", "2"]

    assert main(arguments) == 0
    assert "workers: 3 (2 of them prefill)" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["mesh"]["workers"], document["mesh"]["prefill_workers"]) == (3, 2)
    assert document["strategies"][0]["served"] == 60


def test_routing_alone_beside_a_router_that_knows_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--part", "offline", "--blocks", "90", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert (document["benchmark"], document["workers"], document["block_tokens"]) == (
        *("offline", 3),
        64,
    )
    rows = document["rows"]
    assert [(row["router"], row["num_blocks"]) for row in rows] == [
        ("oracle", 90),
        ("kv_aware", 90),
    ]
    assert all(0 < row["hit_rate"] < 1 for row in rows)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (["--live"], "--live"),
        (["--set", "router.max_queue=3"], "--set"),
        (["--plot", "a.html"], "--plot"),
        (["--routers", "2"], "--routers"),
        (["--prefill-workers", "1"], "--prefill-workers"),
        (["--strategies", "random"], "--strategies"),
    ],
)
def test_what_is_of_no_use_without_time_is_refused(
    option: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--part", "offline", *option]) != 0
    assert f"{named}: is of no use with --part offline" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_run_that_fails_leaves_no_page(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    assert main([*SMALL, "--blocks", "1", "--plot", str(path)]) == 1
    assert not path.exists()

    path.write_text("mine")
    assert main([*SMALL, "--blocks", "1", "--plot", str(path)]) == 1
    assert path.read_text() == "mine"


class _Page(HTMLParser):
    """Nothing may come from elsewhere, and what is opened is closed."""

    VOID = ("meta", "rect", "line")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--strategies", "fastest"], f"there are {', '.join(ROUTING_STRATEGIES)}"),
        (["--prefill-workers", "8"], "--prefill-workers: must be in [0, 7]"),
        (["--prefill-workers", "1", "--live"], "--prefill-workers: must be 0 with --live"),
        (["--strategies", ","], "--strategies: must name some of"),
        (["--trace", "nowhere"], "known: mooncake, agents, azure, tau"),
        (["--trace", "tau", "--zipf", "2"], "--zipf: is of no use with --trace"),
        (["--trace", "azure", "--prefixes", "5"], "--prefixes: is of no use with --trace"),
        (["--rate", "1e-6"], "--rate: is so small that 9 requests would take more than 30 days"),
        (["--trace", "tau", "--rate", "1e-6"], "--rate: is so small that 9 requests would take"),
        (["--workload", "chats", "--prefixes", "2"], "--prefixes: is of no use with chats"),
        (["--workload", "chats", "--low-tokens", "400"], "--low-tokens: must be at most 300"),
        (["--set", "worker.num_slot=3"], "did you mean worker.num_slots?"),
        (["--set", "worker.num_slots=0"], "worker.num_slots: must be in [1, 256]"),
        (
            ["--set", "worker.num_slots=x", "--blocks", "unlimited"],
            "worker.num_slots: must be a whole number; got 'x'",
        ),
        (["--set", "router.routing_strategy=random"], "is set by --strategies"),
        (["--trace", "tau", "--set", "mesh.block_tokens=64"], "must be the workload's, 16"),
        (["--blocks", "8"], "worker.simulated.num_blocks: must be at least 65"),
        (["--plot", "/nowhere/a.html"], "--plot: cannot write /nowhere/a.html"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "route", "--requests", "9", *arguments]) == 1
    assert problem in capsys.readouterr().err
