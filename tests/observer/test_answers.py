"""Answers that are remembered, and what they may hold."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from services.core.config import Snapshot, parse
from services.observer import answers as answers_module
from services.observer import hygiene, saved, why
from services.observer.answers import Answers
from services.observer.books import Books
from services.observer.model import Window
from tests.runtime.waiting import eventually


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


async def test_the_doctor_sees_requests_also_where_prompts_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> dict[str, Any]:
        raise ZeroDivisionError

    monkeypatch.setattr(hygiene, "report", fail)
    report = await Answers(Books(snapshot(1, show_text=False), None)).doctor()
    assert report["findings"] == []


@pytest.mark.parametrize("asked", ["why", "saved_window"])
async def test_those_that_wait_hold_nothing_of_what_is_known(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    books = Books(snapshot(1, show_text=False), None)
    look, begun, go_on = books.window, threading.Event(), threading.Event()
    num_looks = 0

    def window() -> Window:
        nonlocal num_looks
        num_looks += 1
        return look()

    def work(*_: Any, **__: Any) -> dict[str, Any]:
        begun.set()
        assert go_on.wait(20)
        return {}

    answers = Answers(books)
    monkeypatch.setattr(answers_module, "AGE_PER_COST", 1e9)  # it looks at the books too
    await answers.hygiene()
    monkeypatch.setattr(books, "window", window)
    monkeypatch.setattr(why, "explain", work)
    monkeypatch.setattr(saved, "dump", work)
    ask = answers.saved_window if asked == "saved_window" else lambda: answers.why("0123456")
    asking = [asyncio.create_task(ask()) for _ in range(9)]
    await eventually(begun.is_set)
    held = num_looks
    go_on.set()
    await asyncio.gather(*asking)

    assert held == 1
    assert num_looks == 9
