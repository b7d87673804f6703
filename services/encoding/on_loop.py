"""Encoding in a process whose event loop serves requests: what is quick there, the rest in threads.

Handing a short prompt to a thread costs as much as encoding it, and of the work only the
library's own, on what is new, runs beside the loop at all.
"""

from __future__ import annotations

import asyncio
import string
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np

from firsttoken.tokenizer.v1 import tokenizer_pb2
from services.core.settings import TokenizerSettings
from services.encoding.encoder import Encoder
from services.encoding.metrics import CacheCounts
from services.encoding.requests import begin, check_model, to_response

T = TypeVar("T")

# For so long the loop may be held by encoding what is new: some 2,000 characters of prose, 500
# of code, 350 of digits and letters in turn.
MAX_FINISH_S = 0.5e-3
# And by the template. Its work holds the GIL: from a thread it holds the loop up as well, for
# the 5 ms after which threads take turns.
MAX_BEGIN_S = 1e-3
# As first assumed, of a unit: SmolLM2's.
_BEGIN_S, _FINISH_S = 8e-6, 0.9e-6
_BYTES_PER_UNIT = 512
# Of more it need not be known how much.
_MAX_WEIGHED = 1 << 13


class Pace:
    """What a unit of some work has lately cost. Pure."""

    WEIGHT = 0.1
    # One that is much slower, such as the first, says little of the next.
    MOST_GROWTH = 3.0

    def __init__(self, unit_s: float, max_s: float) -> None:
        self._unit_s = unit_s
        self._max_s = max_s

    def is_quick(self, num_units: float) -> bool:
        return self._unit_s * num_units <= self._max_s

    def learn(self, num_units: float, spent_s: float) -> None:
        seen_s = min(spent_s / num_units, self._unit_s * self.MOST_GROWTH)
        self._unit_s += self.WEIGHT * (seen_s - self._unit_s)


class LoopEncoder:
    """Of one event loop. `threads` are the caller's, to be closed after the last call."""

    def __init__(self, encoder: Encoder, threads: Executor) -> None:
        self._encoder = encoder
        self._threads = threads
        # By the form of the prompt; a unit is a message, or half a kilobyte.
        forms = ("text", "chat", "token_ids", None)
        self._begin = {form: Pace(_BEGIN_S, MAX_BEGIN_S) for form in forms}
        self._finish = Pace(_FINISH_S, MAX_FINISH_S)

    @property
    def counts(self) -> CacheCounts:
        return self._encoder.counts

    async def encode(
        self, request: tokenizer_pb2.EncodeRequest, settings: TokenizerSettings
    ) -> tokenizer_pb2.EncodeResponse:
        """Raises InvalidArgument naming the fields of the request."""
        check_model(request.model, self._encoder)
        size = 1 + request.ByteSize() / _BYTES_PER_UNIT
        pace = self._begin[request.WhichOneof("input")]
        begun = await self._run(
            lambda: begin(self._encoder, request, settings), pace, size + len(request.chat.messages)
        )
        # Others may have their turn in between.
        await asyncio.sleep(0)
        # Prefix keys are made of all of it.
        num_units = effort(begun.new) + size
        encoded = await self._run(begun.finish, self._finish, num_units)
        return to_response(encoded, self._encoder, request)

    async def _run(self, work: Callable[[], T], pace: Pace, num_units: float) -> T:
        def timed() -> tuple[T, float]:
            # Of the thread's own: others may run on this core.
            began_s = time.thread_time()
            return work(), time.thread_time() - began_s

        if pace.is_quick(num_units):
            result, spent_s = timed()
        else:
            loop = asyncio.get_running_loop()
            result, spent_s = await loop.run_in_executor(self._threads, timed)
        pace.learn(num_units, spent_s)
        return result


def effort(texts: Sequence[str] | None) -> float:
    """What the time to encode them goes by: about one for each word of prose and for each
    space, more for digits and marks, which are tokens each. Of very much, or where it is not known
    how much, as good as infinite.
    """
    if texts is None or sum(map(len, texts)) > _MAX_WEIGHED:
        return 1e9
    characters = np.frombuffer("".join(texts).encode(), np.uint8)
    return float(_WEIGHTS[characters].sum())


def _weights() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """By byte. Of characters that have several, each is a part of a token or none."""
    weights = np.full(256, 0.25)
    for characters, weight in (
        (string.ascii_letters, 0.125),
        (string.digits, 3.0),
        (string.punctuation, 2.0),
        (string.whitespace, 1.0),
    ):
        weights[list(characters.encode())] = weight
    return weights


_WEIGHTS = _weights()
