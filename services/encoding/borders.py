"""Where a text may be taken apart so that its pieces' ids, joined, are the ids of the whole. Pure.

`tokenizers` first takes out the added tokens that are matched as they are spelled, and
does all else to each text between them by itself: a border on either side of such a
token changes nothing. Inside of these texts, a border is safe where the tokenizer's own regular
expression always ends a match, and where no match looks beyond it. For the ones known
here that is so between a letter and a space:

- A letter is followed by a space within no match: in all of them, a space may be the first of
  a match, or follow other spaces. So a match ends there in the whole text as well.
- None looks back: what follows is matched as if it were all there is.
- What ends with a letter looks ahead only for more of it, which a space is not, just as
  the end of a text is not. `\\s+(?!\\S)` looks ahead of spaces alone.

The same holds for the full stops and commas of Chinese and Japanese. Normal form C composes
nothing with them. Of any tokenizer for which this is not known, the text stays whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, models

from services.core.tokens import pack

# A split holds the GIL: for 10 ms, where a text is nothing but so many added tokens.
_ADDED_AT_ONCE = 8192
# About 200 tokens: what is behind a long text's last border is encoded again as it grows, and
# each piece costs a look into the cache.
PIECE_CHARACTERS = 1024

# Letters that normal form C does not touch, in every version of Unicode.
_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u0391-\u03a1\u03b1-\u03c9\u0410-\u044f"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_ENDS = " \u3001\u3002\uff0c"
_BORDER = re.compile(f"[{_ENDS}](?<=[{_LETTERS}].)")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTER_RUN = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED_RUN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_CONTRACTIONS}?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{_CONTRACTIONS}?"
)
_KNOWN_PATTERNS = frozenset(
    (
        # Qwen 2 and 3; Llama 3; GPT-4o and gpt-oss.
        rf"{_CONTRACTIONS}|{_LETTER_RUN}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
        rf"{_CONTRACTIONS}|{_LETTER_RUN}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}",
        rf"{_CASED_RUN}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",
    )
)
# Of these, each changes or takes apart what is between two added tokens by itself.
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Replace", "Lowercase", "Strip", "StripAccents")
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Split", "Whitespace", "WhitespaceSplit", "Punctuation")
# Without special tokens to add, these leave the ids alone.
_POST_PROCESSORS = ("ByteLevel", "TemplateProcessing")


class Borders:
    """`added_ids`: the packed id of each spelling that is a token wherever it stands.

    `inside`: texts between them may be taken apart as well, behind `piece_characters` each.
    """

    def __init__(
        self,
        added_ids: Mapping[str, bytes],
        *,
        inside: bool,
        piece_characters: int = PIECE_CHARACTERS,
    ) -> None:
        self.added_ids = added_ids
        self.inside = inside
        self._piece_characters = piece_characters
        # The longest of those that begin at a place, as in `tokenizers`.
        longest_first = sorted(added_ids, key=len, reverse=True)
        spellings = "|".join(map(re.escape, longest_first))
        self._added = re.compile(f"({spellings})") if added_ids else None

    def pieces(self, text: str) -> list[str]:
        """Joined they are `text`. None is empty; each added token is one of its own."""
        parts = self._split(text)
        if not self.inside or max(map(len, parts)) <= self._piece_characters:
            return [part for part in parts if part]
        return [piece for part in parts for piece in self._cut(part)]

    def _split(self, text: str) -> list[str]:
        """At the added tokens, which are in it."""
        parts = [text]
        while self._added:
            found = self._added.split(parts.pop(), maxsplit=_ADDED_AT_ONCE)
            parts += found
            if len(found) <= 2 * _ADDED_AT_ONCE:
                break
        return parts

    def _cut(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > self._piece_characters:
            border = _BORDER.search(text, start + self._piece_characters)
            if border is None:
                break
            yield text[start : border.start()]
            start = border.start()
        if start < len(text):
            yield text[start:]


def read_borders(tokenizer: Tokenizer) -> Borders | None:
    """None where it is not known that any border is safe: the text is to stay whole."""
    normalizers = _parts(tokenizer.normalizer, "normalizers")
    pre_tokenizers = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    processors = _parts(tokenizer.post_processor, "processors")
    added = tokenizer.get_added_tokens_decoder()
    as_spelled = {id_: token for id_, token in added.items() if not token.normalized}
    if (
        not isinstance(tokenizer.model, models.BPE)
        or tokenizer.model.dropout
        or tokenizer.encode_special_tokens
        or tokenizer.truncation
        or any(token.lstrip or token.rstrip or token.single_word for token in as_spelled.values())
        or not _are_all(normalizers, _NORMALIZERS)
        or not _are_all(pre_tokenizers, _PRE_TOKENIZERS)
        or not _are_all(processors, _POST_PROCESSORS)
    ):
        return None
    normalized = [token for token in added.values() if token.normalized]
    inside = (
        _are_all(normalizers, ("NFC",))
        and _ends_matches_at_borders(pre_tokenizers)
        and not any(token.lstrip or token.rstrip or token.single_word for token in normalized)
        and not any(set(_ENDS) & set(token.content) for token in normalized)
    )
    added_ids = {token.content: pack([id_]) for id_, token in as_spelled.items() if token.content}
    return Borders(added_ids, inside=inside)


def _ends_matches_at_borders(pre_tokenizers: Sequence[Mapping[str, Any]]) -> bool:
    """One of a sequence that does is enough when the others never look beyond a letter."""
    return any(map(_ends_matches, pre_tokenizers)) and all(
        _ends_matches(part) or _is_blind(part) for part in pre_tokenizers
    )


def _ends_matches(part: Mapping[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part["use_regex"]) and not part["add_prefix_space"]
    return (
        part["type"] == "Split"
        and part["pattern"].get("Regex") in _KNOWN_PATTERNS
        and part["behavior"] == "Isolated"
        and not part["invert"]
    )


def _is_blind(part: Mapping[str, Any]) -> bool:
    """It sees digits alone, or nothing at all."""
    is_spelling = part["type"] == "ByteLevel" and not part["add_prefix_space"]
    return is_spelling or part["type"] == "Digits"


def _are_all(parts: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> bool:
    return all(part["type"] in kinds for part in parts)


def _parts(component: Any, sequence_field: str) -> list[dict[str, Any]]:
    """Of a component that may be a sequence of others, as the library writes them to a file."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    return list(_flatten(described, sequence_field))


def _flatten(described: dict[str, Any], sequence_field: str) -> Iterator[dict[str, Any]]:
    if described["type"] != "Sequence":
        yield described
        return
    for part in described[sequence_field]:
        yield from _flatten(part, sequence_field)
