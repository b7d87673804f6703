"""Spans on their way out, with the reason for which a prompt was not in a cache on them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeAlias

from services.core import attributes as names
from services.observer.model import Hop
from services.observer.why import UnknownTrace
from services.runtime.resource import Resource
from services.runtime.tasks import end_tasks

# Requests that wait to be explained; with more, spans go out without.
MAX_WAITING = 256
# Of one core, explaining takes this share at most.
SHARE = 0.25
ROUTER_HOP = "router.generate"

Explain: TypeAlias = Callable[[str], Awaitable[dict[str, Any]]]

logger = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    hops: Sequence[Hop]
    # Of the routers' hops among them, those whose prompts missed.
    missed: frozenset[str]


class ExplainedSpans(Resource):
    """An async context manager. `export`: of one hop. `explain`: by the id of a router's span."""

    def __init__(self, export: Callable[[Hop], None]) -> None:
        self._export = export
        self.explain: Explain | None = None
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue(MAX_WAITING)

    async def _open(self, stack: AsyncExitStack) -> None:
        stack.callback(self._export_all)
        explaining = asyncio.create_task(self._keep_explaining(), name="explain misses")
        stack.push_async_callback(end_tasks, [explaining])

    def export(self, hops: Sequence[Hop], missed: frozenset[str]) -> None:
        """`missed`: span ids of hops whose prompts were not all cached that could have been."""
        waiting = _Waiting(hops, missed & {hop.span_id for hop in hops if hop.name == ROUTER_HOP})
        if not waiting.missed or self.explain is None or self._waiting.full():
            self._export_hops(waiting)
        else:
            self._waiting.put_nowait(waiting)

    async def _keep_explaining(self) -> None:
        while True:
            waiting = await self._waiting.get()
            began_s = time.monotonic()
            reasons = {}
            try:
                reasons = {span_id: await self._reason(span_id) for span_id in waiting.missed}
            except UnknownTrace:
                pass  # it has left the window already
            except Exception:  # a defect: the spans go out all the same
                logger.exception("a miss could not be explained")
            finally:
                self._export_hops(waiting, reasons)
            await asyncio.sleep((time.monotonic() - began_s) * (1 / SHARE - 1))

    async def _reason(self, span_id: str) -> dict[str, Any]:
        assert self.explain is not None
        found = await self.explain(span_id)
        reason = {
            names.MISS_CAUSE: found["cause"],
            names.MISS_SUMMARY: found["summary"],
            names.MISS_TOKENS: found["lost_tokens"],
        }
        text = (found.get("change") or {}).get("text")
        return reason if text is None else {**reason, names.MISS_TEXT: text}

    def _export_all(self) -> None:
        while not self._waiting.empty():
            self._export_hops(self._waiting.get_nowait())

    def _export_hops(
        self, waiting: _Waiting, reasons: dict[str, dict[str, Any]] | None = None
    ) -> None:
        for hop in waiting.hops:
            reason = (reasons or {}).get(hop.span_id)
            if reason is not None:
                hop = dataclasses.replace(hop, attributes={**hop.attributes, **reason})
            self._export(hop)
