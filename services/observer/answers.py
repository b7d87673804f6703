"""Answers that take a while: worked out in a thread, and remembered for some seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from services.core.errors import InvalidArgument
from services.observer import doctor, hygiene, saved, why
from services.observer.books import Books
from services.observer.doctor.clues import clues_of
from services.observer.doctor.finding import Clues
from services.observer.model import Window
from services.observer.past import read_past
from services.observer.spelling import Spelling
from services.runtime.logs import event

# The page asks every few seconds. An answer is kept so long at most, and
DOCTOR_AGE_S = 5.0
HYGIENE_AGE_S = 30.0
# so many times as long as it took: what costs nothing is always new.
AGE_PER_COST = 20.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Answers:
    """Of one mesh. The event loop goes on meanwhile; one answer is worked out at a time."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._one_at_a_time = asyncio.Lock()
        self._saving = asyncio.Lock()
        self._spelling: Spelling | None = None
        self._spelling_tried = False
        self._doctor = _Remembered(DOCTOR_AGE_S)
        # By whether it shows text: what could be shown a moment ago may not be shown now.
        self._hygiene = {shows: _Remembered(HYGIENE_AGE_S) for shows in (False, True)}

    async def why(self, trace_id: str) -> dict[str, Any]:
        """Raises UnknownTrace."""
        async with self._one_at_a_time:
            # Not before: each that waits would hold all that was known when it came.
            window, prompts = self._books.window(), self._books.prompts.snapshot()
            show_text = self._books.shows_text

            def explain() -> dict[str, Any]:
                return why.explain(
                    trace_id, window, prompts, spelling=self._load_spelling(), show_text=show_text
                )

            return await asyncio.to_thread(explain)

    async def hygiene(self) -> dict[str, Any]:
        show_text = self._books.shows_text
        if not self._spelling_tried:  # once, and so no part of what an answer costs
            await self._work_out(self._load_spelling)
        return await self._hygiene[show_text].get(lambda: self._report_hygiene(show_text))

    async def doctor(self) -> dict[str, Any]:
        return await self._doctor.get(self._diagnose)

    async def saved_window(self) -> bytes:
        """As `firsttoken doctor FILE` reads it."""
        async with self._saving:
            window, clues = await self._known()
            return await self._work_out(lambda: b"".join(saved.dump(window, clues)))

    async def _report_hygiene(self, show_text: bool) -> dict[str, Any]:
        window, prompts = self._books.window(), self._books.prompts.snapshot()
        cache_blocks = self._books.cache_blocks

        def report() -> dict[str, Any]:
            return hygiene.report(
                window,
                prompts,
                spelling=self._load_spelling(),
                show_text=show_text,
                cache_blocks=cache_blocks,
            )

        return await self._work_out(report)

    async def _diagnose(self) -> dict[str, Any]:
        window, clues = await self._known()
        return await self._work_out(lambda: doctor.report(window, clues))

    async def _known(self) -> tuple[Window, Clues]:
        window, prompts = self._books.window(), self._books.prompts.snapshot()
        try:
            report = await self.hygiene()
            clues = await self._work_out(
                lambda: clues_of(read_past(window, prompts), window.members, report)
            )
        except Exception:  # a defect: what the requests tell is worth saying without
            logger.exception("what the prompts tell could not be worked out")
            clues = Clues()
        return window, clues

    async def _work_out(self, work: Callable[[], T]) -> T:
        async with self._one_at_a_time:
            return await asyncio.to_thread(work)

    def _load_spelling(self) -> Spelling | None:
        """Once: the model is the mesh's for as long as it runs."""
        if not self._spelling_tried:
            self._spelling_tried = True
            try:
                self._spelling = Spelling.load(self._books.model)
            except (InvalidArgument, OSError, ValueError) as error:
                event(logger, logging.WARNING, "prompts cannot be read", reason=str(error))
        return self._spelling


class _Remembered:
    """An answer, until it is too old. Those who ask meanwhile get the same."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._answer: dict[str, Any] = {}
        self._until_s = 0.0
        self._asking = asyncio.Lock()

    async def get(self, ask: Callable[[], Any]) -> dict[str, Any]:
        async with self._asking:
            began_s = time.monotonic()
            if began_s >= self._until_s:
                self._answer = await ask()
                now_s = time.monotonic()
                self._until_s = now_s + min(self._age_s, AGE_PER_COST * (now_s - began_s))
            return self._answer
