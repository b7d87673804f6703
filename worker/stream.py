"""One request in the engine core, as the front sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.core.errors import MeshError
from services.core.ledger import Interval
from worker.engines.contract import DisaggregatedParams
from worker.messages import (
    Cancel,
    Command,
    Compute,
    ExportedBlock,
    Fetch,
    FirstToken,
    FreeOutbox,
    LoadingEnded,
    MoreCredit,
    Stage,
    StagedBlock,
    Taken,
    Token,
)


class Arrival(NamedTuple):
    """Tokens that came since the last look, and when this one was."""

    tokens: list[Token]
    taken_s: float


class TokenStream:
    """One request in the core: what comes back of it, and what it is told.

    Tokens are all that is ready at each look, never fewer, never delayed.
    """

    def __init__(self, request_id: int, send: Callable[[Command], None]) -> None:
        self.request_id = request_id
        self.finished = False
        # Blocks that the core found in its own pool; None before the request has a slot.
        self.num_cached_blocks: int | None = None
        # In the core, until it had its slot and these blocks in it.
        self.phases: tuple[Interval, ...] = ()
        # Prompt tokens whose KV is in the slot, while blocks may come or go.
        self.num_computed = 0
        # Tokens of drafts that the core has verified, and those of them that came true.
        self.num_drafted = self.num_accepted = 0
        self._send = send
        self._tokens: list[Token] = []
        self._exported: list[ExportedBlock] = []
        self._error: MeshError | None = None
        self._awake = asyncio.Event()
        self._started = asyncio.Event()
        self._has_exported = asyncio.Event()
        self._transfer_ended = asyncio.Event()
        self._transfer_error = ""

    @property
    def num_unread(self) -> int:
        """Tokens that nobody has taken yet."""
        return len(self._tokens)

    async def next(self) -> Arrival:
        """Waits for at least one token. Raises the error that ended the stream."""
        await self._awake.wait()
        self._awake.clear()
        if not self._tokens and self._error is not None:
            raise self._error
        arrival = Arrival(self._tokens, time.monotonic())
        self._tokens = []
        if self._error is not None:
            self._awake.set()  # the tokens first, then the error
        return arrival

    async def started(self) -> int:
        """Waits for the request to have a slot: how many of its blocks the core had.

        Raises the error that ended the stream.
        """
        await self._started.wait()
        if self.num_cached_blocks is None:
            assert self._error is not None
            raise self._error
        return self.num_cached_blocks

    async def next_exported(self) -> list[ExportedBlock]:
        """Waits for blocks in the outbox; give them back with `free_outbox`."""
        await self._has_exported.wait()
        self._has_exported.clear()
        if not self._exported and self._error is not None:
            raise self._error
        return self.take_exported()

    def take_exported(self) -> list[ExportedBlock]:
        exported, self._exported = self._exported, []
        return exported

    async def transferred(self) -> str:
        """Waits until engines have moved the KV; "", or why it did not arrive.

        Raises the error that ended the stream.
        """
        await self._transfer_ended.wait()
        if self._error is not None:
            raise self._error
        return self._transfer_error

    def stage(self, blocks: Sequence[StagedBlock], *, flush: bool = False) -> None:
        """Hand blocks in the inbox to the core, which gives the slots back by itself.

        `flush`: soon, since the caller has no more slots and waits for these.
        """
        self._send(Stage(self.request_id, tuple(blocks), flush))

    def compute(self) -> None:
        """Do not wait for blocks: compute, and join those that come."""
        self._send(Compute(self.request_id))

    def loading_ended(self) -> None:
        """No more blocks come: compute what is missing. May be called twice."""
        self._send(LoadingEnded(self.request_id))

    def first_token(self, token: Token) -> None:
        """Another worker has sampled it: it is passed on at once."""
        if token.finish:  # else the core would go on behind the end
            self._send(Cancel(self.request_id))
        else:
            self._send(FirstToken(self.request_id, token.token_id))
        self.push(token)

    def fetch(self, params: DisaggregatedParams) -> None:
        """Have the engine fetch the prompt's KV from the one that offers it."""
        self._send(Fetch(self.request_id, params))

    def more_credit(self, num_blocks: int) -> None:
        """As many more blocks may be exported."""
        self._send(MoreCredit(self.request_id, num_blocks))

    def taken(self) -> None:
        """The engine that fetches the KV has it."""
        self._send(Taken(self.request_id))

    def free_outbox(self, slots: Sequence[int]) -> None:
        self._send(FreeOutbox(tuple(slots)))

    # What the front tells it.

    def push(self, token: Token) -> None:
        self._tokens.append(token)
        self.finished = bool(token.finish)
        self._awake.set()

    def start(self, num_cached_blocks: int, phases: tuple[Interval, ...]) -> None:
        self.num_cached_blocks, self.phases = num_cached_blocks, phases
        self._started.set()

    def export(self, block: ExportedBlock) -> None:
        self._exported.append(block)
        self._has_exported.set()

    def end_transfer(self, error: str) -> None:
        self._transfer_error = error
        self._transfer_ended.set()

    def fail(self, error: MeshError) -> None:
        self._error = error
        for event in (self._awake, self._started, self._has_exported, self._transfer_ended):
            event.set()
