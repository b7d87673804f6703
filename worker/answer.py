"""From the core's tokens to the chunks of one answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from firsttoken.common.v1 import common_pb2
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
        self._detokenizer = Detokenizer(vocabulary, sampling.stop)
        self._sampling = sampling
        self.num_tokens = 0
        self.finished: common_pb2.Finished | None = None

    def push(self, tokens: Sequence[Token]) -> common_pb2.Chunk:
        """One chunk with all that the tokens bring; empty when they bring nothing yet.

        Sets `finished` when the answer ends among them; what comes after is dropped.
        """
        token_ids: list[int] = []
        texts: list[str] = []
        logprobs: list[common_pb2.PositionLogprobs] = []
        for token in tokens:
            if token.finish == "stop":
                self._finish("stop", token_id=token.token_id)
                break
            token_ids.append(token.token_id)
            if token.logprobs is not None:
                logprobs.append(_to_proto(token.token_id, token.logprobs))
            text, stop_string = self._detokenizer.push((token.token_id,))
            texts.append(text)
            if stop_string is not None:
                self._finish("stop", stop_string=stop_string)
                break
            if token.finish:
                self._finish(token.finish)
                break
        if self.finished is not None:
            texts.append(self._detokenizer.flush())
        self.num_tokens += len(token_ids)
        return common_pb2.Chunk(token_ids=pack(token_ids), text="".join(texts), logprobs=logprobs)

    def _finish(
        self, reason: str, *, stop_string: str | None = None, token_id: int | None = None
    ) -> None:
        self.finished = common_pb2.Finished(finish_reason=_FINISH_REASONS[reason])
        if stop_string is not None:
            self.finished.stop_string = stop_string
        elif token_id is not None and token_id in self._sampling.stop_token_ids:
            self.finished.stop_token_id = token_id


def _to_proto(token_id: int, logprobs: TokenLogprobs) -> common_pb2.PositionLogprobs:
    top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=logprobs.logprob),
        top=[common_pb2.TokenLogprob(token_id=top_id, logprob=value) for top_id, value in top],
    )
