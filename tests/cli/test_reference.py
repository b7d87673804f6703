from __future__ import annotations

from pathlib import Path

from services.cli import reference
from services.core.config import settings

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == reference.render(), (
        "run: firsttoken config docs > docs/configuration.md"
    )


def test_every_setting_has_a_row() -> None:
    rows = [line for line in reference.render().splitlines() if line.startswith("| `")]

    assert len(rows) == len(list(settings()))
