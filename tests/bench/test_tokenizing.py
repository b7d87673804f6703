from __future__ import annotations

import pytest

from services.bench.tokenizing import measure
from services.cli.bench_tokenize import show
from services.core.settings import MeshSettings


def test_prompts_are_as_long_as_their_names_say(capsys: pytest.CaptureFixture[str]) -> None:
    document = measure(num_rounds=2)
    show(document)

    assert document["model"] == MeshSettings().model
    assert [round(row["tokens"], -2) for row in document["rows"]] == [100, 4100, 4000, 4100, 4000]
    assert all(row["whole_cpu_us"] > 0 and row["kept_us"] > 0 for row in document["rows"])
    lines = capsys.readouterr().out.splitlines()
    assert [row["prompt"] in line for row, line in zip(document["rows"], lines[3:8], strict=True)]
    assert "the template" in lines[8]
