"""Speculative decoding: which drafts a step verifies, and whether they pay. Pure.

A step that goes on with answers may take a draft of what comes next along: the engine gives
logits behind each of its tokens, and those that are sampled there anyway are accepted, so that
answers are the same bit for bit. A drafted token makes the step longer, by what is measured, and
pays where as much time brings fewer tokens otherwise. Requests are told apart by class: where
drafts do not pay they stop, and are tried again later, ever later, but never for the last time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Some

from worker.engines.contract import EngineInfo
from worker.messages import DraftCounts
from worker.prompt_lookup import PromptLookup
from worker.sequence import Sequence

# Of what is known of a class, half counts after so many more drafted tokens.
HALF_LIFE_TOKENS = 64.0
# Drafted tokens before a class is judged.
TRIAL_TOKENS = 24
# Tokens of answers without drafts until the next trial: first, and at most.
REST_TOKENS = (128, 8192)
# Steps with drafts until one without is measured again.
REFRESH_STEPS = 64
# What a new measurement counts.
BLEND = 0.25


class StepCosts:
    """What steps take, with drafts and without."""

    def __init__(self) -> None:
        # By the number of answers in a step.
        self._plain_s: dict[int, float] = {}
        self._num_since: dict[int, int] = defaultdict(int)
        # Of a drafted token; 0: not known.
        self.token_s = 0.0

    def is_known(self, num_answers: int) -> bool:
        """What a step without drafts takes, as of late."""
        return num_answers in self._plain_s and self._num_since[num_answers] < REFRESH_STEPS

    def observe(self, num_answers: int, num_drafted: int, step_s: float) -> None:
        plain_s = self._plain_s.get(num_answers)
        if not num_drafted:
            self._plain_s[num_answers] = _blend(plain_s, step_s)
            self._num_since[num_answers] = 0
        elif plain_s is not None:
            self._num_since[num_answers] += 1
            token_s = max(step_s - plain_s, 0.0) / num_drafted
            self.token_s = _blend(self.token_s or None, token_s)

    def price(self, num_answers: int) -> float:
        """Tokens that the time of a drafted one would bring without drafts."""
        plain_s = self._plain_s.get(num_answers)
        return self.token_s * num_answers / plain_s if plain_s else 0.0


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + BLEND * (new - old)


class DraftClass:
    """Whether drafts pay for one class of requests."""

    def __init__(self) -> None:
        self.counts = DraftCounts()
        # Tokens won, less those that the same time would have brought; and drafted in this trial.
        self._balance = 0.0
        self._num_tried = 0
        self._rest_tokens = 0
        self._next_rest_tokens = REST_TOKENS[0]

    @property
    def is_on(self) -> bool:
        return self._rest_tokens <= 0

    def rest(self, num_tokens: int) -> None:
        """So many tokens came without drafts."""
        self._rest_tokens = max(self._rest_tokens - num_tokens, 0)

    def learn(self, num_drafted: int, num_accepted: int, price: float, spent_s: float) -> None:
        won = num_accepted - num_drafted * price
        counts = self.counts
        self._balance = self._balance * 0.5 ** (num_drafted / HALF_LIFE_TOKENS) + won
        self._num_tried += num_drafted
        num_rests = counts.num_rests
        if self._num_tried >= TRIAL_TOKENS and self._balance < 0:
            self._rest_tokens = self._next_rest_tokens
            self._next_rest_tokens = min(2 * self._next_rest_tokens, REST_TOKENS[1])
            self._balance, self._num_tried = 0.0, 0
            num_rests += 1
        elif self._num_tried >= 2 * TRIAL_TOKENS:
            self._next_rest_tokens = REST_TOKENS[0]
        # Another tuple: what was reported stays as it was.
        self.counts = DraftCounts(
            counts.num_drafts + 1,
            counts.num_drafted + num_drafted,
            counts.num_accepted + num_accepted,
            counts.spent_s + spent_s,
            counts.won_tokens + won,
            num_rests,
            self.is_on,
        )


class Speculation:
    """`max_draft`: tokens of a draft at most; 0: none."""

    def __init__(self, info: EngineInfo, *, max_draft: int, max_batch_tokens: int) -> None:
        self._info = info
        self.max_draft = max_draft
        self._max_batch_tokens = max_batch_tokens
        self._costs = StepCosts()
        self._classes: dict[str, DraftClass] = defaultdict(DraftClass)

    @property
    def counts(self) -> dict[str, DraftCounts]:
        """By class, since the start."""
        return {name: each.counts for name, each in self._classes.items()}

    def propose(self, answering: Some[Sequence]) -> None:
        """Set the draft of each of those that the next step is about, and nothing else is."""
        if not self.max_draft or not self._costs.is_known(len(answering)):
            return
        room = self._max_batch_tokens // len(answering) - 1
        for sequence in answering:
            if self._classes[draft_class(sequence)].is_on:
                sequence.draft = self._draft(sequence, min(room, self.max_draft))

    def observe(self, num_answers: int, num_drafted: int, step_s: float) -> None:
        """A step that went on with answers, and did nothing else."""
        if self.max_draft:
            self._costs.observe(num_answers, num_drafted, step_s)

    def rest(self, sequence: Sequence) -> None:
        """A step without drafts went on with its answer."""
        if self.max_draft:
            self._classes[draft_class(sequence)].rest(1)

    def learn(self, sequence: Sequence, num_accepted: int, num_answers: int) -> None:
        """What became of its part of a step with drafts, of so many answers."""
        draft_ids, sequence.draft = sequence.draft, []
        if not draft_ids or sequence.lookup is None:
            self.rest(sequence)
            return
        sequence.lookup.learn(len(draft_ids), num_accepted, self.max_draft)
        self._classes[draft_class(sequence)].learn(
            len(draft_ids),
            num_accepted,
            price=self._costs.price(num_answers),
            spent_s=len(draft_ids) * self._costs.token_s,
        )

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(sequence.submit.token_ids)
        return sequence.lookup.draft(sequence.answer, min(most, sequence.left(self._info) - 1))


def draft_class(sequence: Sequence) -> str:
    request_class = "batch" if sequence.submit.batch_class else "interactive"
    kind = "sampled" if sequence.submit.sampling.temperature > 0 else "greedy"
    return f"{request_class}, {kind}"
