from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench import trace_lines
from services.bench.workload_traces import FOLDER, TRACES, read_trace
from services.core.errors import InvalidArgument
from services.core.workload import Arrival, Workload

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = {"format": "firsttoken-trace", "version": 1, "block_tokens": 16}
REQUEST = {"at_s": 1, "prompt_tokens": 40, "output_tokens": 8, "blocks": [[0, 1]]}
MOONCAKE = {"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
CALL = {"t": 2.0, "agent": "main", "kind": "main", "in": 200, "out": 5, "blocks": [[1, 3]]}
SESSION = {"session": "a", "block_size": 64, "requests": [CALL]}
AZURE = "t_seconds,context_tokens,generated_tokens\n0.000,374,44\n4.315,64,109\n"


def write(folder: Path, *rows: dict[str, Any] | str, name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def arrivals(workload: Workload) -> list[Arrival]:
    return list(workload.arrivals)


@pytest.mark.parametrize(
    ("name", "num_requests", "prompt_tokens", "block_tokens"),
    [
        ("mooncake", 5719, 12_870, 512),
        ("agents", 21_041, 123_710, 64),
        ("azure", 10_108, 1_243, 64),
        ("tau", 702, 5_668, 16),
    ],
)
def test_the_traces_that_are_here_are_what_their_readme_says(
    name: str, num_requests: int, prompt_tokens: int, block_tokens: int
) -> None:
    workload = read_trace(name)
    assert workload.num_requests == num_requests
    assert workload.block_tokens == block_tokens
    total = last_s = 0.0
    for arrival in workload.arrivals:
        total += arrival.prompt_tokens
        assert arrival.at_s >= last_s
        last_s = arrival.at_s
    assert total / num_requests == pytest.approx(prompt_tokens, abs=0.6)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"| `{name}` | `{TRACES[name]}` | {num_requests:,}" in readme


def test_all_formats_become_one_form(tmp_path: Path) -> None:
    [mooncake] = arrivals(read_trace(write(tmp_path, MOONCAKE)))
    [own] = arrivals(read_trace(write(tmp_path, HEADER, REQUEST)))
    calls = arrivals(read_trace(write(tmp_path, SESSION, SESSION)))
    azure = arrivals(read_trace(write(tmp_path, AZURE, name="a.csv")))

    assert (mooncake.at_s, mooncake.prompt_tokens, mooncake.output_tokens) == (0.0, 1030, 5)
    assert len(mooncake.chain) == 2  # the third block is not full
    assert (own.at_s, len(own.chain), own.request_class) == (0.0, 2, "interactive")
    assert [call.at_s for call in calls] == [0.0, 60.0]
    # Ids are a session's own.
    assert not {*calls[0].chain} & {*calls[1].chain}
    assert [(each.at_s, len(each.chain)) for each in azure] == [(0.0, 5), (4.315, 1)]
    assert azure[0].chain[0] != azure[1].chain[0]


def test_equal_ids_are_equal_blocks_at_each_reading(tmp_path: Path) -> None:
    other = {**REQUEST, "at_s": 2, "prompt_tokens": 70, "blocks": [[0, 0], [7, 9]]}
    path = write(tmp_path, HEADER, REQUEST, other)
    workload = read_trace(path)
    first, second = arrivals(workload)

    assert first.chain[0] == second.chain[0]
    assert len({*first.chain, *second.chain}) == 5
    assert arrivals(workload) == [first, second] == arrivals(read_trace(path))


def test_own_requests_carry_tenant_class_and_deadline(tmp_path: Path) -> None:
    fields = {"tenant": "acme", "request_class": "batch", "deadline_s": 30}
    path = write(tmp_path, HEADER, {**REQUEST, **fields}, name="b.jsonl")
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))

    [arrival] = arrivals(read_trace(packed))
    assert (arrival.tenant, arrival.request_class, arrival.deadline_s) == ("acme", "batch", 30.0)


@pytest.mark.parametrize(
    ("rows", "where", "problem"),
    [
        ([{**MOONCAKE, "timestamp": -1}], "line 1, timestamp", "must not be negative"),
        ([MOONCAKE, {**MOONCAKE, "timestamp": 2}], "line 2, timestamp", "goes back: 2 after 3000"),
        ([{**MOONCAKE, "input_length": 0}], "line 1, input_length", "at least 1; got 0: leave out"),
        ([{**MOONCAKE, "input_length": True}], "line 1, input_length", "must be a whole number"),
        ([{**MOONCAKE, "input_length": 1e3}], "line 1, input_length", "must be a whole number"),
        ([{**MOONCAKE, "input_length": 1 << 40}], "line 1, input_length", "must be at most"),
        ([{**MOONCAKE, "hash_ids": [0, 1, 2, 3]}], "line 1, hash_ids", "has 4 blocks of 512"),
        ([{**MOONCAKE, "hash_ids": [0, 0]}], "line 1, hash_ids", "where another prefix precedes"),
        ([{**MOONCAKE, "hash_ids": [-1]}], "line 1, hash_ids", "whole numbers that are not neg"),
        ([{**MOONCAKE, "hash_ids": 3}], "line 1, hash_ids", "must be a list"),
        ([{**MOONCAKE, "hash_id": []}], "line 1, hash_id", "did you mean hash_ids?"),
        ([MOONCAKE, {"hash_ids": []}], "line 2, timestamp", "must be there"),
        ([MOONCAKE, "{"], "line 2", "is not JSON"),
        ([MOONCAKE, "[" * 100_000], "line 2", "is not JSON"),
        ([MOONCAKE, "[]"], "line 2", "must be a JSON object"),
        ([{"other": 1}], "line 1", "is no line of a known format"),
        ([HEADER], "a.jsonl", "has a header and no request"),
        ([{**HEADER, "version": 2}, REQUEST], "line 1, version", "must be 1"),
        ([{**HEADER, "format": "x"}, REQUEST], "line 1, format", "must be one of firsttoken-trace"),
        ([HEADER, {**REQUEST, "at_s": "1"}], "line 2, at_s", "must be a number"),
        ([HEADER, {**REQUEST, "blocks": [[0, 2]]}], "line 2, blocks", "40 tokens fills 2"),
        ([HEADER, {**REQUEST, "blocks": [[1, 0]]}], "line 2, blocks", "must be ranges"),
        ([HEADER, {**REQUEST, "blocks": [0]}], "line 2, blocks", "must be ranges"),
        (
            [HEADER, {**REQUEST, "request_class": "x"}],
            "line 2, request_class",
            "interactive, batch",
        ),
        ([HEADER, {**REQUEST, "deadline_s": 0}], "line 2, deadline_s", "must be above 0"),
        ([HEADER, {**REQUEST, "deadline_s": -2}], "line 2, deadline_s", "must not be negative"),
        ([HEADER, {**REQUEST, "tenant": 3}], "line 2, tenant", "must be a text"),
        ([HEADER, {**REQUEST, "at_s": 10**400}], "line 2, at_s", "must not be negative, nor inf"),
        (
            [HEADER, '{"at_s": 1e400}'],
            "line 2, at_s",
            "must not be negative, nor infinite; got inf",
        ),
        ([HEADER, '{"at_s": 1' + "0" * 5_000 + "}"], "line 2", "is not JSON (too long a number)"),
        ([HEADER, {**REQUEST, "prompt_tokens": 10**400}], "line 2, prompt_tokens", "at most"),
        ([HEADER, {**REQUEST, "tenant": "a\ud800"}], "line 2, tenant", "half of a surrogate pair"),
        ([{**HEADER, "block_tokens": 0}], "line 1, block_tokens", "must be at least 1; got 0"),
        (
            [HEADER, REQUEST, {**REQUEST, "at_s": 86_500}],
            "line 3, at_s",
            "is 86499 s after the one before, 86499 s after the first; at most 86400",
        ),
        (
            [HEADER, *({**REQUEST, "at_s": day * 86_400} for day in range(32))],
            "line 33, at_s",
            "check its unit, or cut the trace",
        ),
        (
            [{**SESSION, "requests": [CALL, {**CALL, "t": 31 * 86_400}]}],
            "line 1, requests[1].t",
            "check its unit",
        ),
        ([{**SESSION, "requests": []}], "a.jsonl", "has sessions and no request"),
        ([{**SESSION, "requests": [CALL, 1]}], "line 1, requests[1]", "must be a JSON object"),
        (
            [{**SESSION, "requests": [CALL, {**CALL, "t": 1.0}]}],
            "line 1, requests[1].t",
            "goes back",
        ),
        ([{**SESSION, "requests": [{**CALL, "in": 0}]}], "line 1, requests[0].in", "at least 1"),
        ([SESSION, {**SESSION, "block_size": 16}], "line 2, block_size", "must be the same"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_field(
    tmp_path: Path, rows: list[dict[str, Any] | str], where: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_trace(write(tmp_path, *rows))
    [violation] = caught.value.violations
    assert violation.field.endswith(where), caught.value.message
    assert problem in violation.description


@pytest.mark.parametrize("first_s", [0, 1_732_960_000])
def test_times_count_from_the_first_arrival(tmp_path: Path, first_s: int) -> None:
    own = [{**REQUEST, "at_s": first_s + number} for number in range(3)]
    mooncake = [{**MOONCAKE, "timestamp": 1000 * (first_s + number)} for number in range(3)]
    calls = [{**CALL, "t": first_s + number} for number in range(3)]
    for rows in ([HEADER, *own], mooncake, [{**SESSION, "requests": calls}]):
        times = [each.at_s for each in arrivals(read_trace(write(tmp_path, *rows)))]
        assert times == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (AZURE + "9,-1,5\n", "a.csv, line 4, context_tokens: must be at least 1; got -1"),
        (AZURE + "9,1_0,5\n", "a.csv, line 4, context_tokens: must be a whole number; got '1_0'"),
        (AZURE + "9,٣,5\n", "a.csv, line 4, context_tokens: must be a whole number; got '٣'"),
        (AZURE + "9,x,5\n", "a.csv, line 4, context_tokens: must be a whole number"),
        (AZURE + "1,10,5\n", "a.csv, line 4, t_seconds: goes back"),
        (AZURE + "nan,10,5\n", "a.csv, line 4, t_seconds: must not be negative, nor infinite"),
        (AZURE + "9,10\n", "a.csv, line 4: must have 3 cells; got 2"),
        (AZURE.splitlines()[0], "a.csv: has a header and no request"),
    ],
)
def test_tables_are_checked_too(tmp_path: Path, table: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_trace(write(tmp_path, table, name="a.csv"))
    assert problem in caught.value.message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{}\n", "is not gzip, though its name ends with .gz"),
        (gzip.compress(b"{}\n" * 9, mtime=0)[:-9], "is damaged, or cut off"),
        (b"\x1f\x8b\x08\x00not gzip at all", "is damaged, or cut off"),
        (gzip.compress(b"{}\n\xff\n", mtime=0), "line 2: is not UTF-8"),
        (gzip.compress(b"\n", mtime=0), "is empty"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        read_trace(tmp_path / "a.jsonl.gz")
    assert problem in caught.value.message


@pytest.mark.parametrize("content", [b"x" * 1001, gzip.compress(b"x" * 1001, mtime=0)])
def test_no_more_is_unpacked_than_a_trace_can_have(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_lines, "MAX_BYTES", 1000)
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InvalidArgument, match="a: has more than"):
        read_trace(tmp_path / "a")


def test_a_name_that_is_unknown_is_answered_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="mooncake, agents, azure, tau"):
        read_trace("monkey")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_trace(tmp_path)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("traces") / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument):
        read_trace(path)


def test_the_tau_trace_is_made_from_the_dialogues_in_the_tests_data(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import tau_trace  # type: ignore[import-not-found]

    dialogues = tmp_path / "some.jsonl"
    with gzip.open(ROOT / "tests/data/tau_airline_dialogs_a.jsonl.gz", "rt") as lines:
        dialogues.write_bytes(gzip.compress("".join(next(lines) for _ in range(2)).encode()))
    tools = ROOT / "tests/data/tau_airline_tools.json"
    tau_trace.main(str(dialogues), str(tools), str(qwen3), str(tmp_path / "b.jsonl.gz"))

    made = arrivals(read_trace(tmp_path / "b.jsonl.gz"))
    whole = arrivals(read_trace("tau"))
    lengths = [(each.prompt_tokens, each.output_tokens, len(each.chain)) for each in whole]
    # The first two calls, of the first two dialogues.
    assert [(m.prompt_tokens, m.output_tokens, len(m.chain)) for m in made[:2]] == lengths[:2]
