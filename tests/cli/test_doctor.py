"""firsttoken doctor and firsttoken config diff --effect: saved windows, bad files, a live mesh."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from firsttoken.client import MeshClient
from services.cli import effects
from services.cli.doctor_replay import NO_RECORD, expect
from services.cli.main import main
from services.core.errors import InvalidArgument
from services.observer.doctor import examine
from services.observer.effects import Effects
from services.observer.saved import dump
from services.simulation.mesh import MeshPlan, replay
from services.simulation.router import Timing
from tests.cli.running import Endpoints, run_to_end
from tests.cli.test_replay import first_line, outcome_line, workers
from tests.observer.doctor.scenarios import blind_routing, healthy
from tests.observer.test_effects import effects as some_effects
from tests.observer.windows import Seen
from tests.simulation.loads import configure, shared_prefixes

PATIENCE_S = 30.0


def saved(folder: Path, seen: Seen, name: str = "w.jsonl") -> str:
    path = folder / name
    path.write_bytes(b"".join(dump(seen.window, seen.clues)))
    return str(path)


@pytest.fixture(scope="module")
def blind() -> Seen:
    return blind_routing("round_robin")


def test_a_finding_says_what_to_change(
    tmp_path: Path, blind: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", saved(tmp_path, blind)]) == 1
    printed = capsys.readouterr().out
    assert "1. long_prefill_from_misses" in printed
    assert 'change: router.routing_strategy from "round_robin" to "kv_aware"' in printed
    assert NO_RECORD in printed

    assert main(["doctor", saved(tmp_path, blind), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["findings"][0]["after"] == "kv_aware"
    assert document["findings"][0]["replay"] is None


def test_a_healthy_window_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", saved(tmp_path, healthy(24, share=0.2, num_workers=4))]) == 0
    assert "Healthy: " in capsys.readouterr().out


def test_a_bad_file_is_refused_with_its_place(
    tmp_path: Path, blind: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(saved(tmp_path, blind))
    path.write_bytes(path.read_bytes().replace(b'"num_dropped":0', b'"num_dropped":"0"'))
    assert main(["doctor", str(path)]) == 2
    assert "w.jsonl, line 1: num_dropped: must be a whole number" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_file_cannot_move_the_cursor(
    tmp_path: Path, blind: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(saved(tmp_path, blind))
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"trace_id":"', b'"trace_id":"\\u001b[2J'))
    assert main(["doctor", str(path)]) == 1
    path.write_bytes(data.replace(b'"hidden_s":{}', b'"hidden_s":{"\\u009b2J":""}'))
    assert main(["doctor", str(path)]) == 2
    told = capsys.readouterr()
    assert "traces: \\x1b[2J" in told.out
    assert "hidden_s.\\x9b2J" in told.err


def test_without_a_mesh_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--control", "127.0.0.1:1"]) == 2
    assert "no control service at 127.0.0.1:1" in capsys.readouterr().err


def test_a_record_says_what_the_change_would_bring(tmp_path: Path, blind: Seen) -> None:
    record = tmp_path / "decisions.jsonl"
    plan = MeshPlan(config=configure(), num_workers=2, timing=Timing(hop_s=0.0))
    outcomes = replay(shared_prefixes(num_requests=60, rate=20), plan).outcomes
    ended = sorted(outcomes, key=lambda each: each.finished_s)
    record.write_bytes(b"".join([first_line(), workers(0, 1), *map(outcome_line, ended)]))
    diagnosis = examine(blind.window, blind.clues)
    expected, note = expect(diagnosis.findings, {}, record)
    assert note == ""
    assert expected[0] is not None
    assert expected[0].hit_rate_after > 0
    again, _ = expect(diagnosis.findings, {"router.record_decisions": str(record)}, None)
    assert again == expected
    nothing, note = expect(diagnosis.findings, {"router.record_decisions": "/no/such"}, None)
    assert nothing == [None for _ in diagnosis.findings]
    assert note == NO_RECORD


def test_a_record_that_nobody_named_is_not_needed(tmp_path: Path, blind: Seen) -> None:
    findings = examine(blind.window, blind.clues).findings
    other = tmp_path / "**[a].log"
    other.write_text("hello")
    expected, note = expect(findings, {"router.record_decisions": str(other)}, None)
    assert expected == [None for _ in findings]
    assert f"{other} is no record that can be replayed" in note
    (tmp_path / "a.log").write_text("of somebody else")
    other.unlink()
    assert expect(findings, {"router.record_decisions": str(other)}, None).note == NO_RECORD
    with pytest.raises(InvalidArgument):
        expect(findings, {}, tmp_path / "a.log")


def test_effects_are_shown_for_people() -> None:
    shown = "\n".join(effects.show(some_effects(0.1, 0.05).report()))
    assert 'router.routing_strategy = "new"  (was "old")' in shown
    assert "against generation 1: TTFT -" in shown
    assert "Mann-Whitney" in shown
    assert [*effects.show(Effects().report())] == ["Nothing is known of any configuration yet."]


async def send(router: str, num_requests: int) -> None:
    async with MeshClient(router) as client:
        for number in range(num_requests):
            await client.complete(f"number {number}", max_tokens=2)


def waited_for(arguments: Sequence[str], mesh: Endpoints, num_requests: int) -> Any:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        result = run_to_end(*arguments, "--json", env=mesh.env)
        document = result.json
        rows = document.get("generations", [document])
        if sum(row["requests"] for row in rows) >= num_requests:
            return document
        time.sleep(0.1)
    pytest.fail(f"the observer never had {num_requests} requests")


def test_a_live_mesh_is_judged_and_its_changes_told(mesh: Endpoints, tmp_path: Path) -> None:
    asyncio.run(send(mesh.router, 3))
    kept = tmp_path / "kept.jsonl"
    live = waited_for(["doctor", "--save", str(kept)], mesh, 3)
    again = run_to_end("doctor", str(kept), "--json", env=mesh.env)
    assert again.json["findings"] == live["findings"]
    told = waited_for(["config", "diff", "--effect"], mesh, 3)
    assert {"ttft_mean_ms", "hit_rate", "effect"} <= told["generations"][-1].keys()
