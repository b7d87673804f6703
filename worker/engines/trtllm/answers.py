"""From what the engine says of an answer so far to the tokens that are new in it. Pure.

An engine's output is one object that changes: its ids are all so far, and may become fewer,
since a stop id that has matched is cut from their end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from services.core.sampling import Sampling
from worker.engines.contract import EngineInfo
from worker.messages import Submit, TokenLogprobs


class NewToken(NamedTuple):
    token_id: int
    # As in worker.messages.Token.
    finish: str
    logprobs: TokenLogprobs | None


class AnswerReader:
    """Of one leg of a request. `known`: tokens of its output that are out already."""

    def __init__(
        self, submit: Submit, info: EngineInfo, *, num_answered: int, known: Sequence[int] = ()
    ) -> None:
        self._sampling = submit.sampling
        self._info = info
        self._num_prompt = len(submit.token_ids)
        # Tokens of the answer that came before this leg.
        self._num_answered = num_answered
        self._known = list(known)
        self._num_read = 0
        self.finished = False

    def read(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: object,
        logprobs: Any,
    ) -> list[NewToken]:
        """Raises EngineLostRequest when the engine ended it for no reason of ours."""
        new: list[NewToken] = []
        # Fewer than before bring nothing new.
        for index in range(self._num_read, len(token_ids)):
            self._num_read = index + 1
            # A decode engine says the first token again that the prefill engine gave.
            if self._known and self._known.pop(0) == token_ids[index]:
                self._num_answered += 1
                continue
            new.append(self._token(token_ids[index], _logprobs_at(logprobs, index, self._sampling)))
            self._num_answered += 1
            if self.finished:
                return new
        if finish_reason is not None and not self.finished:
            new += self._end(finish_reason, stop_reason)
        return new

    def _token(self, token_id: int, logprobs: TokenLogprobs | None) -> NewToken:
        finish = self._finish_after(token_id)
        self.finished = bool(finish)
        return NewToken(token_id, finish, logprobs)

    def _finish_after(self, token_id: int) -> str:
        if token_id in self._ends:
            return "stop"
        count = self._num_answered + 1
        full = self._num_prompt + count >= self._info.max_context_tokens
        return "length" if count == self._sampling.max_tokens or full else ""

    @property
    def _ends(self) -> tuple[int, ...]:
        eos = () if self._sampling.ignore_eos else self._info.eos_token_ids
        return (*eos, *self._sampling.stop_token_ids)

    def _end(self, finish_reason: str, stop_reason: object) -> list[NewToken]:
        """The engine has ended it; the id that did so is cut, or was never said."""
        if finish_reason != "stop":
            raise EngineLostRequest(f"the engine ended the request: {finish_reason}")
        self.finished = True
        ended_by = stop_reason if isinstance(stop_reason, int) else self._ends[0]
        return [NewToken(ended_by, "stop", None)]


class EngineLostRequest(Exception):
    """It is to be answered elsewhere."""


def _logprobs_at(logprobs: Any, index: int, sampling: Sampling) -> TokenLogprobs | None:
    if sampling.logprobs is None or not logprobs or index >= len(logprobs):
        return None
    found: Mapping[int, Any] = logprobs[index]
    if not found:
        return None
    # By rank, likeliest first; the sampled one stands first where it is not among those.
    (sampled, *_), ranked = found.items(), sorted(found.items(), key=lambda each: -_value(each[1]))
    top = ranked[: sampling.logprobs]
    return TokenLogprobs(
        _value(sampled[1]),
        tuple(token_id for token_id, _ in top),
        tuple(_value(each) for _, each in top),
    )


def _value(logprob: Any) -> float:
    return float(getattr(logprob, "logprob", logprob))
