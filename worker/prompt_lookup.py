"""Drafts from what is there already: where the last tokens stood before, what followed them. Pure.

Answers that copy, quote or edit their prompt say much of it again (prompt lookup decoding:
https://github.com/apoorvumang/prompt-lookup-decoding). A draft costs no model.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.core.tokens import TokenArray

# So many tokens must have stood there before. With fewer, more drafts are wrong than pay.
NGRAM = 3
FIRST_DRAFT = 2


class PromptLookup:
    """Of one sequence. `length`: tokens of the next draft at most; it follows what came true."""

    def __init__(self, prompt_ids: TokenArray) -> None:
        self.length = FIRST_DRAFT
        self._ids: list[int] = []
        self._num_prompt = len(prompt_ids)
        # What follows the last place of an n-gram that something follows.
        self._next: dict[tuple[int, ...], int] = {}
        self._extend(prompt_ids.tolist())

    def draft(self, answer_ids: Sequence[int], most: int) -> list[int]:
        """What may follow the answer, `most` tokens and `length` at most; often nothing."""
        self._extend(answer_ids[len(self._ids) - self._num_prompt :])
        start = self._next.get(tuple(self._ids[-NGRAM:]))
        if start is None:
            return []
        return self._ids[start : start + max(min(most, self.length), 0)]

    def learn(self, num_drafted: int, num_accepted: int, most: int) -> None:
        if num_accepted == num_drafted:
            self.length = min(2 * self.length, most)
        else:
            self.length = max(num_accepted, FIRST_DRAFT)

    def _extend(self, token_ids: Sequence[int]) -> None:
        first = max(len(self._ids) - NGRAM, 0)
        self._ids += token_ids
        for start in range(first, len(self._ids) - NGRAM):
            self._next[tuple(self._ids[start : start + NGRAM])] = start + NGRAM
