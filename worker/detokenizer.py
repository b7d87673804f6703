"""From generated token ids to text, as they come.

Pure. Text lags behind ids for two reasons: a character may be spread over several
tokens, and the end of the text so far may be the beginning of a stop string. The
cost of a push is proportional to what it adds, whatever the length of the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.models.vocabulary import Vocabulary

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class DetokenizedText(NamedTuple):
    """New text, and the stop string that ended the answer, which is not part of it."""

    text: str
    stop_string: str | None


class Detokenizer:
    """The text of one answer.

    All texts joined, that of `flush` included, are the text of all ids at once,
    with U+FFFD for bytes that are no UTF-8, cut before the first stop string.
    First is the one that is complete first; of several that end at the same
    character, the longest. So neither the split into pushes nor the order of
    `stop` matters. Ids after a stop string give no text.

    Control tokens give no text unless `skip_special_tokens` is False.
    """

    def __init__(
        self, vocabulary: Vocabulary, stop: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = _new_utf8_decoder(errors="replace")
        self._stop = tuple(stop)
        self._stop_string: str | None = None
        self._prefixes = {string[:end] for string in stop for end in range(len(string) + 1)}
        # Text not yet given: the longest end of the text so far that begins a stop string.
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> DetokenizedText:
        added = self._vocabulary.join(token_ids, skip_special_tokens=self._skip_special_tokens)
        return self._advance(self._utf8.decode(added))

    def flush(self) -> str:
        """The text held back; no more ids come. May be called twice."""
        text = self._advance(self._utf8.decode(b"", final=True)).text + self._held
        self._held = ""
        return text

    def _advance(self, added: str) -> DetokenizedText:
        if not self._stop:
            return DetokenizedText(added, None)
        if self._stop_string is not None:
            return DetokenizedText("", self._stop_string)
        pending = self._held + added
        for end, character in enumerate(added, start=len(self._held) + 1):
            self._held = self._longest_prefix(self._held + character)
            if self._held.endswith(self._stop):
                self._stop_string = max(filter(self._held.endswith, self._stop), key=len)
                self._held = ""
                return DetokenizedText(pending[: end - len(self._stop_string)], self._stop_string)
        return DetokenizedText(pending[: len(pending) - len(self._held)], None)

    def _longest_prefix(self, text: str) -> str:
        # Each character is added once and dropped once: the loop is amortised.
        while text not in self._prefixes:
            text = text[1:]
        return text
