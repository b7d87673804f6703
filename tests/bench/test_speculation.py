from __future__ import annotations

import json
from dataclasses import replace

import pytest

from firsttoken.worker.v1 import worker_pb2
from services.bench import speculation
from services.cli.plans import run_quiet_mesh


async def test_drafts_are_measured_beside_answers_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "WORKLOADS", speculation.WORKLOADS[:1])
    worker = replace(speculation.CONFIG.worker, num_slots=2)
    config = replace(speculation.CONFIG, worker=worker)
    said: list[str] = []
    async with run_quiet_mesh(config, num_workers=1, with_kvstore=False) as mesh:
        [row] = await speculation.measure(
            mesh.router,
            mesh.control,
            max_draft_tokens=4,
            num_turns=1,
            answer_tokens=40,
            concurrencies=[1],
            tell=said.append,
        )

    assert said == ["copy, 1 at a time"]
    assert row["identical"]
    assert 0 < row["accepted"] <= row["drafted"]
    assert row["mean_length"] > 1
    assert min(row["ratio"], row["on_tokens_per_s"], row["off_tokens_per_s"]) > 0
    assert json.loads(json.dumps(row)) == row


def test_what_was_never_drafted_has_no_share() -> None:
    found = speculation.describe(worker_pb2.Drafts())

    assert found["accepted_of_drafted"] is found["mean_length"] is None
