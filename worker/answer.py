"""From the core's tokens to the chunks of one answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from firsttoken.common.v1 import common_pb2
from services.core.errors import InvalidArgument
from services.core.sampling import Sampling
from services.core.tokens import pack
from services.models.vocabulary import Vocabulary
from worker.detokenizer import Detokenizer
from worker.messages import Token, TokenLogprobs

_FINISH_REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}


class Answer:
    """What has been said so far, and whether it has ended."""

    def __init__(self, vocabulary: Vocabulary, sampling: Sampling) -> None:
        self._vocabulary = vocabulary
        self._sampling = sampling
        self._detokenizer = self._new_detokenizer()
        # Characters of the text to come that the client has already.
        self._num_given = 0
        self.num_tokens = 0
        self.finished: common_pb2.Finished | None = None

    def resume(self, answer_ids: Sequence[int], num_characters: int) -> common_pb2.Chunk:
        """Go on behind what the client has of an answer that another worker began.

        Before anything is pushed. The chunk brings what these ids say and the client
        lacks: nothing, as a rule. Sets `finished` when they are the whole answer.
        Raises InvalidArgument when their text has fewer than `num_characters`.
        """
        if num_characters:
            self._check_characters(answer_ids, num_characters)
        self._num_given = num_characters
        self.num_tokens = len(answer_ids)
        text, stop_string = self._detokenizer.push(answer_ids)
        if stop_string is not None:
            self._finish("stop", stop_string=stop_string)
        elif self.num_tokens and self.num_tokens >= (self._sampling.max_tokens or math.inf):
            self._finish("length")
        if self.finished is not None:
            text += self._detokenizer.flush()
        return common_pb2.Chunk(text=self._lacking(text))

    def push(self, tokens: Sequence[Token]) -> common_pb2.Chunk:
        """One chunk with all that the tokens bring; empty when they bring nothing yet.

        Sets `finished` when the answer ends among them; what comes after is dropped.
        """
        token_ids, text = self._say(tokens)
        if self.finished is not None:
            text += self._detokenizer.flush()
        if self._num_given:
            text = self._lacking(text)
        self.num_tokens += len(token_ids)
        chunk = common_pb2.Chunk(token_ids=pack(token_ids), text=text)
        if self._sampling.logprobs is not None:
            chunk.logprobs.extend(
                logprobs_to_proto(token.token_id, token.logprobs)
                for token in tokens[: len(token_ids)]
                if token.logprobs is not None
            )
        return chunk

    def _say(self, tokens: Sequence[Token]) -> tuple[list[int], str]:
        """The ids of the tokens that belong to the answer, and their text.

        Without stop strings all are put into text at once.
        """
        token_ids: list[int] = []
        texts: list[str] = []
        for token in tokens:
            if token.finish == "stop":
                self._finish("stop", token_id=token.token_id)
                break
            token_ids.append(token.token_id)
            if self._sampling.stop:
                text, stop_string = self._detokenizer.push((token.token_id,))
                texts.append(text)
                if stop_string is not None:
                    self._finish("stop", stop_string=stop_string)
                    break
            if token.finish:
                self._finish(token.finish)
                break
        if not self._sampling.stop:
            return token_ids, self._detokenizer.push(token_ids).text
        return token_ids, "".join(texts)

    def _new_detokenizer(self) -> Detokenizer:
        sampling = self._sampling
        return Detokenizer(
            self._vocabulary, sampling.stop, skip_special_tokens=sampling.skip_special_tokens
        )

    def _lacking(self, text: str) -> str:
        """What of it the client does not have yet."""
        num_given = min(self._num_given, len(text))
        self._num_given -= num_given
        return text[num_given:]

    def _check_characters(self, answer_ids: Sequence[int], num_characters: int) -> None:
        # What was held back counts: the client has it when the answer had ended.
        whole = self._new_detokenizer()
        most = len(whole.push(answer_ids).text + whole.flush())
        if num_characters > most:
            raise InvalidArgument.of(
                "answer_characters",
                f"must be at most {most}, the length of the text of answer_ids;"
                f" got {num_characters}",
            )

    def _finish(
        self, reason: str, *, stop_string: str | None = None, token_id: int | None = None
    ) -> None:
        self.finished = common_pb2.Finished(finish_reason=_FINISH_REASONS[reason])
        if stop_string is not None:
            self.finished.stop_string = stop_string
        elif token_id is not None and token_id in self._sampling.stop_token_ids:
            self.finished.stop_token_id = token_id


def logprobs_to_proto(token_id: int, logprobs: TokenLogprobs) -> common_pb2.PositionLogprobs:
    top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=top_id, logprob=value) for top_id, value in top],
    )
