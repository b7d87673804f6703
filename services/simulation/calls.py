"""A request at a virtual worker: no text, no ids, only how much of it, and under which keys."""

from __future__ import annotations

import asyncio
import enum
import hashlib
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.core.workload import Arrival
from worker.pool import NewBlock


class Fate(enum.Enum):
    """What has become of a call."""

    OPEN = "open"
    FINISHED = "finished"
    # The worker died.
    LOST = "lost"
    # The worker has too many requests.
    REFUSED = "refused"


class Prefix:
    """The names of a request's full blocks, prompt and answer.

    A workload tells those that others may share. All others are the request's own: they
    fill caches and are found by nobody else.
    """

    def __init__(self, number: int, arrival: Arrival, block_tokens: int) -> None:
        self._number = number.to_bytes(8, "little")
        num_prompt = arrival.prompt_tokens // block_tokens
        self._blocks = [NewBlock(key, key) for key in arrival.chain[:num_prompt]]
        # Of the prompt alone.
        self.keys = tuple(block.prefix_key for block in self.blocks(0, num_prompt))

    def blocks(self, first: int, end: int) -> list[NewBlock]:
        while len(self._blocks) < end:
            key = own_key(self._number, len(self._blocks))
            self._blocks.append(NewBlock(key, key))
        return self._blocks[first:end]


class Peer(Protocol):
    """A worker that computes prompts for others."""

    def submit(self, call: Call) -> None: ...
    def cancel(self, call: Call) -> None: ...


class Call:
    """One request at one worker. `first` is done with the first token, `ended` at the end.

    Of a call that fails, both are done, and its fate says why.
    """

    __slots__ = (
        "batch_class",
        "cached_tokens",
        "ended",
        "evaluated_tokens",
        "export_from",
        "fate",
        "first",
        "handed_off",
        "is_cancelled",
        "load_s",
        "loaded_blocks",
        "num_answered",
        "output_tokens",
        "prefill",
        "prefill_failed",
        "prefix",
        "prompt_tokens",
        "request_id",
        "sent_s",
        "submitted_s",
    )

    def __init__(
        self,
        prefix: Prefix,
        *,
        prompt_tokens: int,
        output_tokens: int,
        batch_class: bool,
        num_answered: int,
        prefill: Peer | None = None,
        export_from: int | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        # Given by its worker.
        self.request_id = 0
        self.prefix = prefix
        self.prompt_tokens = prompt_tokens
        # Of the whole answer, what other workers gave of it included.
        self.output_tokens = output_tokens
        self.batch_class = batch_class
        # Tokens of the answer that the caller has.
        self.num_answered = num_answered
        # Who may compute the prompt.
        self.prefill = prefill
        # It is for another worker, which has the tokens before this one; and when the KV
        # that is finished so far has been sent there.
        self.export_from = export_from
        self.sent_s = 0.0
        self.handed_off = False
        self.prefill_failed = False
        self.loaded_blocks = 0
        self.load_s = 0.0
        self.submitted_s = 0.0
        self.cached_tokens = 0
        self.evaluated_tokens = 0
        self.fate = Fate.OPEN
        self.is_cancelled = False
        self.first: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    @property
    def num_input(self) -> int:
        """What is to be computed before the first token that is sampled here."""
        return self.prompt_tokens + self.num_answered

    def for_peer(self, export_from: int) -> Call:
        """What the worker that is to compute its prompt is asked."""
        return Call(
            self.prefix,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            batch_class=self.batch_class,
            num_answered=self.num_answered,
            export_from=export_from,
        )

    def begin(self) -> None:
        if not self.first.done():
            self.first.set_result(None)

    def end(self, fate: Fate) -> None:
        if self.fate is Fate.OPEN:
            self.fate = fate
            self.begin()
            if not self.ended.done():
                self.ended.set_result(None)


def own_key(number: bytes, index: int) -> bytes:
    """Of a block that only the request of this number has."""
    data = number + index.to_bytes(8, "little")
    return hashlib.blake2b(data, digest_size=32, person=b"own block").digest()


def blank_ids(num_tokens: int) -> npt.NDArray[np.uint32]:
    """Ids of no meaning: views of one zero, so that a long prompt takes no memory."""
    return np.broadcast_to(np.uint32(0), (num_tokens,))
