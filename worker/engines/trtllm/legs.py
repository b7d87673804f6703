"""A request in this core, and its legs in the engine. A request may have several, one at a time:
KV is fetched, does not come, and the prompt is computed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from worker.engines.trtllm import api
from worker.messages import Source, Submit
from worker.phases import Phases


class Kind(enum.Enum):
    # Prompt and answer.
    WHOLE = enum.auto()
    # `context_only`: the prompt, for another engine.
    CONTEXT = enum.auto()
    # `generation_only`: the answer, behind a prompt whose KV another engine has.
    GENERATION = enum.auto()


@dataclass(slots=True, eq=False)
class Leg:
    kind: Kind
    output: api.RequestOutput
    # Something came of it: whatever was on its way to the engine has arrived.
    heard: bool = False
    # Nobody waits for it any more.
    dropped: bool = False
    _aborted: bool = False

    def drop(self) -> None:
        """End it as soon as that is safe.

        TensorRT-LLM 1.2.1 wedges when a request is aborted while its KV is on the way (#12314,
        #13713): a decode leg's abort waits for its first token.
        """
        self.dropped = True
        if self.kind is not Kind.GENERATION or self.heard:
            self._abort()

    def hear(self) -> None:
        self.heard = True
        if self.dropped:
            self._abort()

    def _abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self.output.abort()


@dataclass(slots=True, eq=False)
class Request:
    submit: Submit
    phases: Phases
    # The answer so far, what another worker gave of it included.
    answer: list[int]
    # It has a place in the engine.
    admitted: bool = False
    # Another worker may compute its prompt: nothing is to be computed here meanwhile.
    held: bool = False
    leg: Leg | None = None
    # Legs that were begun, this one included.
    attempt: int = 0
    # When the engine got it.
    asked_s: float = 0.0
    # Its KV is there for another engine.
    offered: bool = False

    @classmethod
    def of(cls, submit: Submit) -> Request:
        return cls(
            submit,
            Phases(submit.submitted_s),
            list(submit.answer_ids),
            held=submit.source is Source.HOLD,
        )

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def input_ids(self) -> list[int]:
        ids: list[int] = self.submit.token_ids.tolist()
        return ids + self.answer

    @property
    def has_first_token(self) -> bool:
        return len(self.answer) > len(self.submit.answer_ids)

    @property
    def for_another(self) -> bool:
        """An answer of one token is no hand-off: nobody would fetch its KV."""
        left = (self.submit.sampling.max_tokens or 0) - len(self.answer)
        return self.submit.export_from is not None and left > 1
