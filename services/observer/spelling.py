"""What a prompt's token ids mean: text, and the messages of a chat. Pure, but for `load`."""

from __future__ import annotations

import bisect
import re
from typing import NamedTuple

from services.core.tokens import TokenArray
from services.models.catalog import find_model
from services.models.loading import load_vocabulary
from services.models.vocabulary import Vocabulary

# What chat templates put before a message: its role, or "" where the role follows.
OPENERS = {
    "<|im_start|>": "",
    "<|start_header_id|>": "",
    "<|header_start|>": "",
    "<start_of_turn>": "",
    "<|start|>": "",
    "[SYSTEM_PROMPT]": "system",
    "[AVAILABLE_TOOLS]": "tools",
    "[INST]": "user",
    "<|system|>": "system",
    "<|user|>": "user",
    "<|assistant|>": "assistant",
}
# After the role: up to its end, all before a message's own text.
_AFTER_ROLE = ("<|end_header_id|>", "<|header_end|>", "<|message|>")
MAX_ROLE_TOKENS = 12
# Those that templates know. A caller may write anything there, and that is text of a prompt.
ROLES = frozenset(
    (
        *("system", "developer", "user", "assistant", "model"),
        *("tool", "tools", "function", "functions", "ipython"),
    )
)
OTHER_ROLE = "other"


class Message(NamedTuple):
    """One message of a rendered chat, a template's own system message among them."""

    role: str
    # Of its opener, and of its text.
    start: int
    text_start: int
    # Of the text before it in the token of `text_start`: the newline after a role may be in one.
    skipped_characters: int


class Place(NamedTuple):
    """Where a token is. `message` counts from 0; None: the prompt is no chat."""

    message: int | None
    role: str
    # From the start of the message's text, or of the prompt.
    character: int


class Spelling:
    """Of one model's vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._roles: dict[int, str] = {}
        self._after_role: set[int] = set()
        for token_id in vocabulary.special_token_ids:
            spelling = vocabulary.spelling(token_id)
            if spelling in OPENERS:
                self._roles[token_id] = OPENERS[spelling]
            if spelling in _AFTER_ROLE:
                self._after_role.add(token_id)

    @classmethod
    def load(cls, model: str) -> Spelling:
        """`model`: the setting mesh.model. Takes tenths of a second.

        Raises InvalidArgument, OSError or ValueError where the model's files are not here.
        """
        return cls(load_vocabulary(find_model(model)))

    def text(self, token_ids: TokenArray) -> str:
        known = token_ids[token_ids < self._vocabulary.vocabulary_size]
        joined = self._vocabulary.join(known.tolist(), skip_special_tokens=False)
        return joined.decode(errors="replace")

    def messages(self, token_ids: TokenArray) -> list[Message]:
        return [
            self._message(token_ids, start)
            for start, token_id in enumerate(token_ids.tolist())
            if token_id in self._roles
        ]

    def place(self, token_ids: TokenArray, token: int) -> Place:
        messages = self.messages(token_ids[: token + 1])
        number = bisect.bisect_right([each.start for each in messages], token) - 1
        if number < 0:
            return Place(None, "", len(self.text(token_ids[:token])))
        message = messages[number]
        before = len(self.text(token_ids[message.text_start : token]))
        return Place(number, message.role, max(0, before - message.skipped_characters))

    def _message(self, token_ids: TokenArray, start: int) -> Message:
        role = self._roles[int(token_ids[start])]
        if role:
            return Message(role, start, start + 1, 0)
        spelled = ""
        for place in range(start + 1, min(start + 1 + MAX_ROLE_TOKENS, len(token_ids))):
            if int(token_ids[place]) in self._after_role:
                # Llama's templates leave two newlines behind it.
                behind = self.text(token_ids[place + 1 : place + 3])
                skipped = 2 if behind.startswith("\n\n") else 0
                return Message(_role(spelled), start, place + 1, skipped)
            piece = self.text(token_ids[place : place + 1])
            name, newline, _ = piece.partition("\n")
            spelled += name
            if newline:
                return Message(_role(spelled), start, place, len(name) + 1)
        return Message(_role(spelled), start, min(start + 1, len(token_ids)), 0)


def _role(spelled: str) -> str:
    """Its first word: templates may put more behind it."""
    match = re.match("[a-z]*", spelled)
    return match[0] if match is not None and match[0] in ROLES else OTHER_ROLE
