"""The observer over HTTP: the page, and as JSON what it shows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from services.observer import rows
from services.observer.answers import Answers
from services.observer.books import Books
from services.observer.exposition import render
from services.observer.guard import guarded
from services.observer.model import Request
from services.observer.state import make_state
from services.observer.why import UnknownTrace

PAGE = Path(__file__).parent / "page"
DEFAULT_LIMIT, MAX_LIMIT, MAX_LIMIT_DIGITS = 50, 500, 9
NOT_KEPT = "no request with this trace id is kept"


class BadQuery(Exception):
    """What was asked for cannot be. The text names the parameter."""


class Api:
    def __init__(self, books: Books, answers: Answers) -> None:
        self._books = books
        self._answers = answers

    async def state(self, request: HttpRequest) -> Response:
        findings = (await self._answers.doctor())["findings"]
        return as_json(make_state(self._books.window(), findings, self._books.history))

    async def why(self, request: HttpRequest) -> Response:
        """Of the one that had most to compute, or whose outermost span is `span`."""
        span_id = request.query_params.get("span")
        if span_id and not self._asked_for(request):
            return _not_found(NOT_KEPT)
        try:
            return as_json(await self._answers.why(span_id or request.path_params["trace_id"]))
        except UnknownTrace as error:
            return _not_found(str(error))

    async def hygiene(self, request: HttpRequest) -> Response:
        return as_json(await self._answers.hygiene())

    async def doctor(self, request: HttpRequest) -> Response:
        return as_json(await self._answers.doctor())

    async def effects(self, request: HttpRequest) -> Response:
        return as_json(self._books.effects.report())

    async def window(self, request: HttpRequest) -> Response:
        body = await self._answers.saved_window()
        return Response(body, media_type="application/jsonl")

    async def requests(self, request: HttpRequest) -> Response:
        """The newest first; with slow=1 the slowest first."""
        limit = _limit(request)
        newest = list(self._books.requests)[::-1]
        if request.query_params.get("slow") == "1":
            newest.sort(key=lambda each: each.ttft_s or 0.0, reverse=True)
        return as_json([rows.describe(each) for each in newest[:limit]])

    async def metrics(self, request: HttpRequest) -> Response:
        # Of a large mesh it takes longer than others should wait.
        accept = request.headers.get("accept", "")
        rendered = await asyncio.to_thread(render, self._books.families(), accept)
        return Response(rendered.body, headers={"content-type": rendered.content_type})

    async def trace(self, request: HttpRequest) -> Response:
        """The last of the trace, or the one whose outermost span is `span`."""
        found = self._asked_for(request)
        if not found:
            return _not_found(NOT_KEPT)
        return as_json(rows.describe_trace(found[-1]))

    def _asked_for(self, request: HttpRequest) -> list[Request]:
        found = self._books.requests.of_trace(request.path_params["trace_id"])
        span_id = request.query_params.get("span")
        return [each for each in found if not span_id or each.hops[0].span_id == span_id]


def make_app(books: Books, answers: Answers | None = None, *, host: str = "") -> ASGIApp:
    """`host`: where it listens."""
    api = Api(books, answers or Answers(books))
    app = Starlette(
        routes=[
            Route("/api/state", api.state),
            Route("/api/requests", api.requests),
            Route("/api/requests/{trace_id}", api.trace),
            Route("/api/why/{trace_id}", api.why),
            Route("/api/hygiene", api.hygiene),
            Route("/api/doctor", api.doctor),
            Route("/api/effects", api.effects),
            Route("/api/window", api.window),
            Route("/metrics", api.metrics),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ],
        exception_handlers={BadQuery: _bad_query},
    )
    return guarded(app, lambda: books.key_hashes, host=host)


def as_json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value, default=str), status, media_type="application/json")


def _limit(request: HttpRequest) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_LIMIT_DIGITS
    if not (is_number and 1 <= int(text) <= MAX_LIMIT):
        raise BadQuery(f"limit must be in [1, {MAX_LIMIT}]; got {text[:20]!r}")
    return int(text)


async def _bad_query(request: HttpRequest, error: Exception) -> Response:
    return as_json({"error": str(error)}, 400)


def _not_found(text: str) -> Response:
    return as_json({"error": text}, 404)
