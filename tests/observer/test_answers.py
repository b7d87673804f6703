"""Answers that are remembered, and what they may hold."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.config import Snapshot, parse
from services.observer import hygiene
from services.observer.answers import Answers
from services.observer.books import Books


def snapshot(generation: int, *, show_text: bool) -> Snapshot:
    return Snapshot(generation, parse({"observer": {"show_text": show_text}}))


async def test_text_is_not_remembered_beyond_the_permission_to_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def report(*_: Any, show_text: bool, **__: Any) -> dict[str, Any]:
        return {"text": "secret" if show_text else ""}

    monkeypatch.setattr(hygiene, "report", report)
    books = Books(snapshot(1, show_text=True), None)
    answers = Answers(books)
    assert await answers.hygiene() == {"text": "secret"}

    books.configure(snapshot(2, show_text=False))
    assert await answers.hygiene() == {"text": ""}
