"""A request in the core, and how far it has come. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.core.ledger import Segment
from services.core.tokens import TokenArray
from worker.engines.contract import EngineInfo
from worker.messages import (
    Compute,
    FirstToken,
    LoadingEnded,
    MoreCredit,
    Source,
    StagedBlock,
    Submit,
)
from worker.phases import Phases
from worker.pool import Claim, NewBlock
from worker.prompt_lookup import PromptLookup
from worker.sampling import Row


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the core, and how far it has come."""

    submit: Submit
    request_id: int
    phases: Phases
    # Tokens to be computed before the first token that is sampled here.
    num_input: int
    # It ends with the first token, and its KV goes elsewhere.
    for_another: bool
    # The answer so far, what another worker gave of it included.
    answer: list[int]
    row: Row
    slot: int = -1
    # What it has of the pool, in a paged engine, while it has a slot.
    claim: Claim = field(default_factory=Claim)
    # Its first blocks, as far as somebody asked for their names.
    chain: list[NewBlock] = field(default_factory=list)
    # Of the prompt's blocks, from the first: what the pool has or is about to get.
    num_known: int = 0
    # From the first: blocks that went to the pool, and those that others wait for.
    num_kept: int = 0
    num_awaited: int = 0
    # Some of its prompt has been in a step: it does not wait for others any more.
    begun: bool = False
    # Tokens whose KV is in the slot, prompt and answer together.
    num_computed: int = 0
    num_cached: int = 0
    # Prompt tokens that went through the engine, counted as they go.
    num_evaluated: int = 0
    # Blocks that lie in the inbox, by their index.
    staged: dict[int, StagedBlock] = field(default_factory=dict)
    # Blocks are coming, and nothing is to be computed meanwhile.
    held: bool = False
    # More blocks may come.
    loading: bool = False
    # Join what is staged, however little: its slots are needed.
    flush: bool = False
    finished: bool = False
    # It ends with the step that it is in.
    cancelled: bool = False
    # Engines move its KV, and nobody else may touch it.
    transferring: bool = False
    # The next block to export for another worker, and how many it has room for. What
    # lies in the outbox can always leave it: else two workers could wait for each other.
    export_next: int = 0
    export_credit: int = 0
    # When its turn came.
    started_s: float = 0.0
    # Sequences in its first step, itself included.
    batch_size: int = 0
    # What may follow its answer: the next step, or the one that it is in, verifies it.
    draft: list[int] = field(default_factory=list)
    # Where that comes from, once it was asked for.
    lookup: PromptLookup | None = None

    @classmethod
    def of(cls, submit: Submit) -> Sequence:
        answer = list(submit.answer_ids)
        return cls(
            submit,
            submit.request_id,
            Phases(submit.submitted_s),
            num_input=len(submit.token_ids) + len(submit.answer_ids),
            for_another=submit.export_from is not None,
            answer=answer,
            row=Row.of(submit.sampling, submit.token_ids, answer),
            held=submit.source is Source.HOLD,
            loading=submit.source is not Source.COMPUTE,
            export_next=submit.export_from or 0,
            export_credit=submit.export_credit,
        )

    @property
    def input_ids(self) -> TokenArray:
        if not self.submit.answer_ids:
            return self.submit.token_ids
        given = np.array(self.submit.answer_ids, dtype=np.uint32)
        return np.concatenate([self.submit.token_ids, given])

    @property
    def started(self) -> bool:
        return self.started_s > 0.0

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.num_input

    @property
    def num_answered(self) -> int:
        """Tokens of the answer that came since it was submitted."""
        return len(self.answer) - len(self.submit.answer_ids)

    @property
    def has_first_token(self) -> bool:
        return len(self.answer) > len(self.submit.answer_ids)

    def advise(self, command: Compute | LoadingEnded | FirstToken | MoreCredit) -> None:
        match command:
            case MoreCredit():
                self.export_credit += command.num_blocks
            case Compute():
                self.held = False
            case LoadingEnded():
                self.loading = False
            case FirstToken():
                self.answer.append(command.token_id)

    def wait(self, now_s: float) -> None:
        """From now on: for KV where it is held for that, else for its turn."""
        self.phases.enter(Segment.KV_LOAD if self.held else Segment.PREFILL_QUEUE, now_s)

    def end_if_answering(self, now_s: float) -> None:
        """Another worker gave the first token, and now all of its KV is here."""
        if self.has_first_token and not self.prefilling:
            self.phases.end(now_s)

    def wants(self, block: StagedBlock, block_tokens: int) -> bool:
        return block.block_index not in self.staged and (
            block.block_index * block_tokens >= self.num_computed or not self.started
        )

    def ready_run(self, block_tokens: int) -> list[StagedBlock]:
        """Staged blocks that follow what is computed, without a gap."""
        index, rest = divmod(self.num_computed, block_tokens)
        run: list[StagedBlock] = []
        while not rest and index + len(run) in self.staged:
            run.append(self.staged[index + len(run)])
        return run

    def barrier(self, block_tokens: int) -> int:
        """The position up to which to compute: from there on, blocks are in the inbox."""
        return min(self.staged) * block_tokens if self.staged else self.num_input

    def left(self, info: EngineInfo) -> int:
        """Tokens until generation ends by its length."""
        room = info.max_context_tokens - len(self.submit.token_ids)
        return min(self.submit.sampling.max_tokens or room, room) - len(self.answer)

    def finish_after(self, token_id: int, info: EngineInfo) -> str:
        """Whether generation ends with this token, not yet appended: "stop", "length" or ""."""
        sampling = self.submit.sampling
        ends = token_id in info.eos_token_ids and not sampling.ignore_eos
        if ends or token_id in sampling.stop_token_ids:
            return "stop"
        count = len(self.answer) + 1
        full = len(self.submit.token_ids) + count >= info.max_context_tokens
        return "length" if count == sampling.max_tokens or full else ""
