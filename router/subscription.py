"""A stream from a peer that is opened again for as long as it is wanted."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import grpc

from router.peers import PeerLost
from services.runtime.logs import event

Call: TypeAlias = "grpc.aio.UnaryStreamCall[Any, Any] | grpc.aio.StreamStreamCall[Any, Any]"

BACKOFF_S = (0.05, 2.0)  # first, longest

logger = logging.getLogger(__name__)


class Subscription(ABC):
    def __init__(self, peer_id: str, name: str) -> None:
        self._task: asyncio.Task[None] | None = None
        # The one that is open.
        self._call: Call | None = None
        self._peer_id = peer_id
        self._name = name
        self._problem = ""
        self._stopped = False

    @abstractmethod
    async def _listen(self) -> None:
        """One stream, from opening it, as `_call`, to its end. Returns where it is to be opened
        anew, as one that has left something out.
        """

    @abstractmethod
    def _lost(self) -> None:
        """The peer is gone, or has ended it."""

    @property
    def _longest_backoff_s(self) -> float:
        return BACKOFF_S[1]

    def start(self) -> None:
        if not self._stopped:
            self._task = asyncio.create_task(self._follow(), name=f"{self._name} {self._peer_id}")

    def stop(self, ending: set[asyncio.Task[None]]) -> None:
        """Its call ends now: the channel may be closed next. Its task is in `ending` until that
        has ended too.
        """
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            ending.add(self._task)
            self._task.add_done_callback(ending.discard)
        if self._call is not None:
            self._call.cancel()

    async def _follow(self) -> None:
        clock = asyncio.get_running_loop().time
        backoff_s, settled_s = BACKOFF_S
        while True:
            opened_s = clock()
            try:
                await self._listen()
            except (PeerLost, TimeoutError) as lost:
                self._lose(str(lost), logging.DEBUG)
            except grpc.aio.AioRpcError as error:
                self._lose(f"{error.code().name}: {error.details()}", logging.WARNING)
            except ValueError as error:
                self._lose(str(error), logging.WARNING)
            except Exception:  # a defect: better to ask again than to be deaf from now on
                self._lose("a defect", logging.DEBUG)
                logger.exception("%s %s failed", self._name, self._peer_id)
            finally:
                if self._call is not None:
                    self._call.cancel()
                self._call = None
            if clock() - opened_s > settled_s:
                backoff_s = BACKOFF_S[0]
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, self._longest_backoff_s)

    def _lose(self, problem: str, level: int) -> None:
        """Said once for each problem: it may go on for long."""
        self._lost()
        if problem != self._problem:
            self._problem = problem
            event(
                logger, level, "stream lost", stream=self._name, peer=self._peer_id, reason=problem
            )
