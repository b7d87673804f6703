"""Sampling parameters as plain values, with their bounds."""

from __future__ import annotations

from typing import NamedTuple

from services.core.errors import Violation

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
DEFAULT_MAX_TOKENS = 128


class Sampling(NamedTuple):
    """Defaults and meanings as in firsttoken/common/v1/common.proto. By keyword only.

    Several are made for each request, and one goes to an engine core: a dataclass takes several
    times as long to make, and to arrive there.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def violations(
        self,
        *,
        max_context_tokens: int,
        vocabulary_size: int | None = None,
        prefix: str = "sampling.",
    ) -> list[Violation]:
        """Every field out of its bounds. Without a `vocabulary_size` any token id will do."""
        found: list[Violation] = []

        def require(ok: bool, field: str, rule: str, value: object) -> None:
            if not ok:
                found.append(Violation(prefix + field, f"{rule}; got {value}"))

        def within(field: str, low: float, high: float, *, open_low: bool = False) -> None:
            value: float = getattr(self, field)
            # What is no number is neither.
            if (low < value if open_low else low <= value) and value <= high:
                return
            bracket = "(" if open_low else "["
            require(False, field, f"must be in {bracket}{low:g}, {high:g}]", value)

        if self.max_tokens is not None:
            require(
                1 <= self.max_tokens <= max_context_tokens,
                "max_tokens",
                f"must be in [1, {max_context_tokens}]",
                self.max_tokens,
            )
        within("temperature", 0, 100)
        within("top_p", 0, 1, open_low=True)
        within("min_p", 0, 1)
        within("repetition_penalty", 0, 10, open_low=True)
        within("presence_penalty", -2, 2)
        within("frequency_penalty", -2, 2)
        if self.logprobs is not None:
            require(
                self.logprobs <= MAX_LOGPROBS,
                "logprobs",
                f"must be in [0, {MAX_LOGPROBS}]",
                self.logprobs,
            )
        require(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"must be at most {MAX_STOP_STRINGS} strings",
            len(self.stop),
        )
        for index, stop in enumerate(self.stop[:MAX_STOP_STRINGS]):
            require(
                1 <= len(stop) <= MAX_STOP_CHARACTERS,
                f"stop[{index}]",
                f"must be 1 to {MAX_STOP_CHARACTERS} characters",
                len(stop),
            )
        require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"must be at most {MAX_STOP_TOKEN_IDS} ids",
            len(self.stop_token_ids),
        )
        for index, token_id in enumerate(self.stop_token_ids[:MAX_STOP_TOKEN_IDS]):
            require(
                vocabulary_size is None or token_id < vocabulary_size,
                f"stop_token_ids[{index}]",
                f"must be below {vocabulary_size}",
                token_id,
            )
        return found
