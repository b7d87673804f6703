from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from services.bench.ladder import NAMES
from services.cli import ladder_tables
from services.cli.main import main

SMALL = ["bench", "ladder", "--seconds", "1", "--rungs", "cache,split"]


def test_tables_a_document_and_a_page_of_the_same_ladder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ladder.html"
    assert main([*SMALL, "--json", "--plot", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    lines = [*ladder_tables.lines_of(document)]
    page = path.read_text(encoding="utf-8")

    assert [row["rung"] for row in document["rungs"]] == ["baseline", "cache", "split"]
    names = ["baseline", "cache", "split", ladder_tables.WITHOUT_SPLIT]
    starts = [line.strip() for line in lines if line.startswith("  ")]
    for name in names:
        assert sum(line.startswith(f"{name} ") for line in starts) == 2
        assert f"<td>{name}</td>" in page
    assert f"Completed on every rung: {document['requests']} of {document['requests']}" in lines
    whole = document["whole"]["ttft_mean_ms"]
    assert any(f"mean TTFT {whole:+.1%}" in line for line in lines)
    assert _OpenTags(page).left == []
    assert any(line.startswith("So few requests") for line in lines)

    document["equal_completions"] = False
    document["rungs"][1]["errors"] = {"QUEUE_FULL": 3}
    lines = [*ladder_tables.lines_of(document)]
    assert any(line.startswith("NOT the same number completed") for line in lines)
    assert "cache: 3 requests not served: QUEUE_FULL" in lines


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--engine", "vllm"], "--engine: 'vllm' is no engine; there are simulated, real"),
        (["--rungs", "cache,magic"], f"'magic' is no rung; there are {', '.join(NAMES)}"),
        (["--rungs", ","], "--rungs: must name some of"),
        (["--seconds", "0"], "--seconds: must be above 0, and at most 3600; got 0"),
        (["--seconds", "nan"], "--seconds: must be above 0"),
        (["--plot", "/nowhere/a.html"], "--plot: cannot write /nowhere/a.html"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ladder", *arguments]) == 1
    assert problem in capsys.readouterr().err


class _OpenTags(HTMLParser):
    """What is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.left: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.left.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Has no end."""

    def handle_endtag(self, tag: str) -> None:
        assert self.left.pop() == tag
