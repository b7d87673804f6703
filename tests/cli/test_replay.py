"""firsttoken replay: records of a virtual mesh, of a real one, and files that are neither."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.decisions import (
    Anonymous,
    Decision,
    decision_line,
    dropped_line,
    end_line,
    header,
    workers_line,
)
from router.fleet import Announced
from router.prompt import Choice
from services.cli.main import main
from services.core.config import Snapshot
from services.core.keys import join_keys
from services.core.workload import Arrival
from services.simulation.mesh import MeshPlan, replay
from services.simulation.recorded import Recording, read_recording
from services.simulation.router import Outcome, Timing
from services.simulation.what_if import Spell, measured, recorded, replayed, worker_spells
from tests.conftest import MeshFactory
from tests.router.fleets import announce, make_worker
from tests.router.test_following import ask, settings
from tests.runtime.waiting import eventually
from tests.simulation.loads import BLOCK_TOKENS, configure, shared_prefixes

NUM_WORKERS = 4
SNAPSHOT = Snapshot(1, configure())
ROOT = b"r" * 32
NAMES = Anonymous(b"salt")


def worker(number: int, **announced: Any) -> Announced:
    capacity = {"num_slots": 16, "max_context_tokens": 8192} | announced
    return announce(f"worker-{number}", **capacity)._replace(num_blocks=384)


def workers(*numbers: int, at_s: float = 0.0) -> bytes:
    return workers_line(at_s, [worker(number) for number in numbers])


def first_line(snapshot: Snapshot = SNAPSHOT, sample: float = 1.0) -> bytes:
    return header("router-1", snapshot, started="2026-11-30T00:00:00.000+00:00", sample=sample)


def decision(arrival: Arrival, **changes: Any) -> Decision:
    made = Decision(
        arrived_s=arrival.at_s,
        prefix_keys=ROOT + join_keys(arrival.chain),
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=arrival.output_tokens,
        request_class=arrival.request_class,
        tenant=arrival.tenant,
        strategy="kv_aware",
        generation=1,
    )
    return made._replace(**changes)


def line(arrival: Arrival, **changes: Any) -> bytes:
    return decision_line(decision(arrival, **changes), NAMES, start_s=0.0)


def outcome_line(outcome: Outcome) -> bytes:
    """As a router would record what became of it."""
    chosen = make_worker(outcome.worker)
    return line(
        outcome.arrival,
        choice=Choice(chosen, NUM_WORKERS, "least cost", outcome.predicted_tokens),
        attempts=1,
        ttft_s=outcome.ttft_s,
        tpot_s=outcome.tpot_s,
        cached_tokens=outcome.cached_tokens,
        evaluated_tokens=outcome.arrival.prompt_tokens - outcome.cached_tokens,
        prefill_s=0.01,
        overhead_s=0.0,
    )


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    """Chains of keys of any kind: a record has their names alone."""
    return shared_prefixes(num_requests=200, rate=40)


@pytest.fixture(scope="module")
def record(arrivals: Sequence[Arrival], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = MeshPlan(config=SNAPSHOT.config, num_workers=NUM_WORKERS, timing=Timing(hop_s=0.0))
    done = replay(arrivals, plan)
    ended = sorted(done.outcomes, key=lambda each: each.finished_s)
    lines = [first_line(), workers(*range(NUM_WORKERS)), *map(outcome_line, ended)]
    path = tmp_path_factory.mktemp("record") / "decisions.jsonl"
    path.write_bytes(b"".join([*lines, end_line(100.0, "stopped")]))
    return path


def write(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["replay", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["replay", *arguments]) == 1
    return capsys.readouterr().err


def test_what_was_comes_out_again(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, str(record))

    assert found["faithful"]
    assert found["caveats"] == []
    was, again = found["recorded"], found["replayed"]
    assert again["answered"] == was["answered"] == 200
    assert again["hit_rate"] == pytest.approx(was["hit_rate"], abs=0.02)
    assert again["ttft_p50_ms"] == pytest.approx(was["ttft_p50_ms"], rel=0.1)
    assert "changed" not in found


def test_what_would_have_been_is_one_more_column(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = "router.routing_strategy=round_robin"
    found = run_json(capsys, str(record), "--set", strategy)
    assert found["changes"] == {"router.routing_strategy": "round_robin"}
    assert found["changed"]["hit_rate"] < found["replayed"]["hit_rate"] - 0.05

    assert main(["replay", str(record), "--set", strategy]) == 0
    shown = capsys.readouterr().out
    assert "recorded  replayed  changed" in shown
    assert "hit rate" in shown
    assert 'Changed: router.routing_strategy = "round_robin"' in shown


def test_a_change_that_comes_to_nothing_is_said_so(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(record), "--set", "router.max_deadline_s=599"]) == 0
    assert "max_deadline_s = 599. It changes nothing here." in capsys.readouterr().out


def test_more_workers_can_be_tried(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, str(record), "--workers", "1")
    assert found["changed"]["ttft_p95_ms"] > 2 * found["replayed"]["ttft_p95_ms"]


def test_a_worker_that_died_dies_again(
    arrivals: Sequence[Arrival], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memberships = [workers(0, 1), workers(0, at_s=1.0), workers(0, 2, at_s=3.0)]
    path = write(tmp_path, first_line(), *memberships, *map(line, arrivals[:100]))

    spells = worker_spells(read_recording(path))
    assert spells == [Spell(0.0, 1.0), Spell(0.0, math.inf), Spell(3.0, math.inf)]
    assert run_json(capsys, str(path))["replayed"]["answered"] == 100


def test_what_a_replay_cannot_know_is_said(
    arrivals: Sequence[Arrival], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = arrivals[1]._replace(chain=(), prompt_tokens=0)
    hit = line(arrivals[0], cached_tokens=1024, evaluated_tokens=128)
    path = write(
        tmp_path,
        *(first_line(sample=0.5), workers(0), hit, dropped_line(1.0, 7)),
        *(line(refused, error="INVALID_ARGUMENT"), line(arrivals[2])[:-20]),
    )
    caveats = " / ".join(run_json(capsys, str(path))["caveats"])
    for words in (
        "share of 0.5 of the requests",
        "7 requests are missing",
        "1 requests were refused before",
        "the last line is cut",
        "88.9% of the prompt tokens were found in caches",
    ):
        assert words in caveats


def test_a_real_engine_is_as_fast_as_it_was(arrivals: Sequence[Arrival], tmp_path: Path) -> None:
    told = [
        line(each, evaluated_tokens=1000, cached_tokens=0, prefill_s=0.25, tpot_s=0.02)
        for each in arrivals[:9]
    ]
    found = measured(read_recording(write(tmp_path, first_line(), workers(0), *told)).requests)
    assert found["worker.simulated.prefill_tokens_per_s"] == pytest.approx(4000)
    assert found["worker.simulated.decode_step_ms"] == pytest.approx(20)


GOOD = Arrival(1.0, (b"k" * 32,), BLOCK_TOKENS + 1, 3)


def spoilt(**fields: Any) -> bytes:
    return json.dumps({**json.loads(line(GOOD)), **fields}).encode() + b"\n"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "decisions.jsonl: is empty"),
        ([b"PK\x03\x04 not text\n"], "line 1: is no JSON: give a file that a router wrote"),
        ([b'{"timestamp": 0, "hash_ids": [1]}\n'], "line 1: kind: give a file that a router wrote"),
        ([b"[]\n"], "line 1: is no JSON object"),
        (
            [b'{"kind":"header","program":"firsttoken","format":99}\n'],
            "line 1: format: this firsttoken reads format 1; the file has 99",
        ),
        ([first_line(), b" " * (1 << 24), b"{}\n"], "line 2: is no JSON: the file is damaged"),
        ([first_line(), b"{]\n"], "line 2: is no JSON: the file is damaged"),
        ([first_line(), b'{"kind":"gossip"}\n'], "line 2: kind: must be one of workers, settings"),
        ([first_line(), spoilt(at_s=-1)], "line 2: at_s: must be a number of at least 0; got -1"),
        ([first_line(), spoilt(at_s=1_732_960_000)], "line 2: at_s: must be at most 2.592e+06"),
        ([first_line(), spoilt(prompt_tokens="9")], "prompt_tokens: must be a whole number"),
        ([first_line(), spoilt(prompt_tokens=10**9)], "in [0, 1048576]; got 1000000000"),
        ([first_line(), spoilt(chain="?")], "line 2: chain: must be base64"),
        ([first_line(), spoilt(chain="AAAA")], "chain: must be whole names of 8 bytes; got 3"),
        ([first_line(), spoilt(prompt_tokens=8)], "chain: has more blocks than the prompt"),
        ([first_line(), spoilt(**{"class": "vip"})], "class: must be one of"),
        (
            [first_line(), b'{"kind":"workers","at_s":0,"workers":[{}]}\n'],
            "workers[0]: id: must be",
        ),
        ([first_line(), workers(0)], "has no request that got as far as a prompt"),
        ([first_line(), line(GOOD)], "no worker was ready in it: use --workers"),
    ],
)
def test_a_broken_or_foreign_file_is_named_with_line_and_field(
    lines: list[bytes], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error_of(capsys, str(write(tmp_path, *lines)))


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none")
    assert f"cannot read {missing}: No such file" in error_of(capsys, missing)
    assert "Is a directory" in error_of(capsys, str(tmp_path))


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("router.routing_strategy=fastest", "must be one of round_robin, random"),
        ("router.prefix_lenght=1", "did you mean router.prefix_length"),
        ("router.prefix_length=1", "router.prefix_length"),
        ("mesh.block_tokens=32", "only settings of router. and worker."),
        ("router", "must be KEY=VALUE"),
        ("worker.engine=llamacpp", "--set worker.engine: it has no part in a replay"),
        ("worker.num_cache_blocks=9", "those that have: worker.max_batch_tokens"),
        ("router.record_decisions=/x", "those that have: router.batch_ageing_s"),
    ],
)
def test_a_change_that_cannot_be_is_refused(
    assignment: str, words: str, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error_of(capsys, str(record), "--set", assignment)


def test_settings_that_this_version_does_not_know_are_passed_over(tmp_path: Path) -> None:
    known = json.loads(first_line())
    known["settings"]["router.of_the_future"] = 1
    path = write(tmp_path, json.dumps(known).encode() + b"\n", workers(0), line(GOOD))
    assert main(["replay", str(path)]) == 0


async def test_a_real_mesh_s_record_gives_the_hits_that_it_had(
    mesh_of: MeshFactory, tmp_path: Path
) -> None:
    """By a strategy that a slow machine cannot sway."""
    path = tmp_path / "decisions.jsonl"
    config = settings(record_decisions=str(path), routing_strategy="prefix_aware", prefix_length=64)
    async with mesh_of(config, num_workers=2) as mesh:
        for number in range(30):
            await ask(mesh.client, ("moss", "fern", "oak")[number % 3], f"And {number}?")
    await eventually(lambda: '"end"' in path.read_text())
    recording = read_recording(path)
    was, again = await in_thread(recording)
    assert was.answered == again.answered == 30
    assert abs(was.hit_rate - again.hit_rate) <= 0.02
    assert was.hit_rate > 0.5


async def in_thread(recording: Recording) -> Any:
    """A virtual loop cannot run inside of a real one."""
    return await asyncio.to_thread(lambda: (recorded(recording), replayed(recording)))
