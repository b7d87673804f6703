"""What is recorded of a decision, and how it gets to the disk."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import recording
from router.decisions import FORMAT, NAME_BYTES, Anonymous, Decision, decision_line
from router.prompt import Choice, Considered
from router.recording import Recorder, RecordFile
from services.core import config
from services.core.config import Snapshot
from services.core.keys import extend_keys, join_keys, root_key
from services.core.tokens import pack
from tests.router.fleets import announce, make_worker
from tests.runtime.waiting import eventually

ROOT = root_key(model="m", block_tokens=8, tenant="acme")
KEYS = join_keys([ROOT, *extend_keys(ROOT, pack(list(range(24))), 8)])


def decide(**changes: Any) -> Decision:
    choice = Choice(
        make_worker("w-1"), 2, "least cost", 16, 8, 0.001, 0.0015, (Considered("w-1", 3, 16, 0.5),)
    )
    whole = Decision(
        arrived_s=101.5,
        prefix_keys=KEYS,
        prompt_tokens=24,
        output_tokens=5,
        request_class="interactive",
        tenant="acme",
        strategy="kv_aware",
        generation=3,
        choice=choice,
        attempts=1,
        queue_s=0.002,
        ttft_s=0.02,
        tpot_s=0.01,
        cached_tokens=16,
        evaluated_tokens=8,
        prefill_s=0.004,
    )
    return whole._replace(**changes)


def decide_now() -> Decision:
    return decide(arrived_s=time.monotonic())


def snapshot(generation: int = 1, **router: Any) -> Snapshot:
    tenants = {"acme": {"salt": "secret-salt"}}
    return Snapshot(generation, config.parse({"router": router, "tenants": tenants}))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kinds(path: Path) -> list[str]:
    return [line["kind"] for line in read(path)]


def test_a_decision_is_a_line_of_figures() -> None:
    line = json.loads(decision_line(decide(), Anonymous(b"salt"), start_s=100.0))

    assert line["at_s"] == 1.5
    assert line["ttft_ms"] == 20
    assert line["predicted_tokens"] == line["cached_tokens"] == 16
    assert line["chosen"] == "w-1"
    assert line["candidates"] == [["w-1", 3, 16, 500.0]]
    assert len(base64.b64decode(line["chain"])) == 3 * NAME_BYTES


def test_a_request_without_a_worker_is_a_line_too() -> None:
    line = decision_line(
        decide(choice=None, ttft_s=None, error="OVERLOADED"), Anonymous(b"s"), start_s=0
    )
    assert json.loads(line)["error"] == "OVERLOADED"
    assert "chosen" not in json.loads(line)


@given(st.text(min_size=1, max_size=20), st.integers(0, 2**32 - 1))
def test_no_key_id_or_tenant_is_in_a_line(tenant: str, token_id: int) -> None:
    root = root_key(model="m", block_tokens=8, tenant=tenant)
    keys = join_keys([root, *extend_keys(root, pack([token_id] * 8), 8)])
    line = decision_line(
        decide(prefix_keys=keys, tenant=f"<{tenant}>"), Anonymous(b"salt"), start_s=0.0
    )
    key = keys[32:]
    found = json.loads(line)
    assert found["tenant"] != f"<{tenant}>"
    assert key.hex() not in line.decode()
    assert base64.b64encode(key)[:12] not in line
    assert base64.b64decode(found["chain"]) not in key


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_chains_share_names_as_far_as_they_share_blocks(one: list[int], two: list[int]) -> None:
    names = Anonymous(b"salt")
    chains = [
        base64.b64decode(names.chain(join_keys([ROOT, *extend_keys(ROOT, pack(ids), 4)])))
        for ids in (one, two)
    ]
    blocks = [[ids[at : at + 4] for at in range(0, len(ids) - 3, 4)] for ids in (one, two)]
    shared = 0
    while blocks[0][shared : shared + 1] == blocks[1][shared : shared + 1] != []:
        shared += 1
    common = 0
    size = NAME_BYTES
    while (first := chains[0][common * size : (common + 1) * size]) and first == chains[1][
        common * size : (common + 1) * size
    ]:
        common += 1
    assert common == shared
    assert [len(chain) // size for chain in chains] == [len(each) for each in blocks]


def test_names_of_two_files_have_nothing_in_common() -> None:
    assert Anonymous(b"one").chain(KEYS) != Anonymous(b"two").chain(KEYS)
    assert Anonymous(b"one").tenant("acme") != Anonymous(b"two").tenant("acme")
    assert Anonymous(b"one").tenant("") == ""


async def test_a_file_has_a_header_workers_decisions_and_an_end(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    recorder = Recorder("router-1")
    recorder.configure(snapshot(record_decisions=str(path)))
    recorder.update_workers([announce("w-1"), announce("w-2", ready=False)])
    recorder.record(decide_now())
    recorder.configure(snapshot(2, record_decisions=str(path), prefix_length=512))
    await recorder.close()
    await recorder.close()

    assert kinds(path) == ["header", "workers", "workers", "decision", "settings", "end"]
    header, _, workers, _, settings, end = read(path)
    assert header["format"] == FORMAT
    assert header["router"] == "router-1"
    assert header["settings"]["router.prefix_length"] == 256
    assert [each["id"] for each in workers["workers"]] == ["w-1"]
    assert settings["settings"]["router.prefix_length"] == 512
    assert end["reason"] == "stopped"
    assert "secret-salt" not in path.read_text()
    assert "acme" not in path.read_text()
    assert str(tmp_path) not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_request_that_came_before_the_file_is_not_in_it(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    recorder = Recorder("r")
    early = decide_now()
    recorder.configure(snapshot(record_decisions=str(path)))
    recorder.record(early)
    recorder.record(decide_now())
    await recorder.close()

    assert [line["at_s"] >= 0 for line in read(path) if line["kind"] == "decision"] == [True]
    assert recorder.num_dropped == 0


async def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text("mine")
    recorder = Recorder("r")
    recorder.configure(snapshot(record_decisions=str(path)))
    await recorder.close()

    assert path.read_text() == "mine"
    assert kinds(tmp_path / "decisions-2.jsonl") == ["header", "workers", "end"]


async def test_recording_ends_at_its_bound_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "decisions.jsonl"
    recorder = Recorder("r")
    caplog.set_level("INFO")
    recorder.configure(snapshot(record_decisions=str(path), record_max_bytes=8192))
    while recorder.active:
        recorder.record(decide_now())
        await asyncio.sleep(0)
    await recorder.close()

    assert path.stat().st_size < 8192 + 200
    assert read(path)[-1]["reason"] == "router.record_max_bytes, 8192, is reached"
    assert "recording ended" in caplog.text


async def test_a_sample_is_a_share_of_the_requests(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    recorder = Recorder("r")
    recorder.configure(snapshot(record_decisions=str(path), record_sample=0.25))
    for _ in range(2000):
        recorder.record(decide_now())
    await recorder.close()

    assert 350 < kinds(path).count("decision") < 650
    assert read(path)[0]["sample"] == 0.25


async def test_what_the_disk_is_too_slow_for_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_QUEUED", 4)
    path = tmp_path / "decisions.jsonl"
    recorder = Recorder("r")
    recorder.configure(snapshot(record_decisions=str(path)))
    for _ in range(3000):
        recorder.record(decide_now())
    await recorder.close()

    lines = read(path)
    missing = sum(line["count"] for line in lines if line["kind"] == "dropped")
    assert missing + kinds(path).count("decision") == 3000
    assert missing == recorder.num_dropped > 0


@pytest.mark.parametrize("path", ["none/d.jsonl", "/", ".", "", "a\0b", "/dev/full"])
async def test_a_place_that_cannot_be_written_is_an_error_in_the_log_and_no_more(
    path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder("r")
    where = str(tmp_path / path) if path in ("none/d.jsonl", "") else path
    recorder.configure(snapshot(record_decisions=where))
    recorder.record(decide_now())
    await eventually(lambda: "decisions are not recorded" in caplog.text)
    recorder.record(decide_now())
    await recorder.close()
    assert len(caplog.records) == 1
    assert (recorder.num_written, recorder.num_dropped) == (0, 2)
    assert list(tmp_path.iterdir()) == []
    assert not tmp_path.with_name(f"{tmp_path.name}-2").exists()


class FullDisk(RecordFile):
    """Whatever its path: all that is written goes to /dev/full."""

    def _create(self) -> tuple[Path, int]:
        return Path("/dev/full"), os.open("/dev/full", os.O_WRONLY)


async def test_what_a_full_disk_loses_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "RecordFile", FullDisk)
    recorder = Recorder("r")
    recorder.configure(snapshot(record_decisions="d.jsonl"))
    for _ in range(300):
        recorder.record(decide_now())
    await eventually(lambda: "decisions are not recorded" in caplog.text)
    for _ in range(50):
        recorder.record(decide_now())
    await recorder.close()
    assert (recorder.num_written, recorder.num_dropped) == (0, 350)


async def test_another_path_is_another_file(tmp_path: Path) -> None:
    recorder = Recorder("r")
    recorder.update_workers([announce("w-1")])
    for name in ("a", "b"):
        recorder.configure(snapshot(record_decisions=str(tmp_path / name)))
        recorder.record(decide_now())
    recorder.configure(snapshot())
    assert not recorder.active
    await recorder.close()
    assert kinds(tmp_path / "a") == kinds(tmp_path / "b")
    assert kinds(tmp_path / "a") == ["header", "workers", "decision", "end"]
