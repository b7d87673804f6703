from __future__ import annotations

import pytest

from firsttoken.common.v1 import common_pb2
from services.core.sampling import Sampling
from services.core.tokens import unpack
from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.vocabulary import Vocabulary, build_tokenizer
from worker.answer import Answer
from worker.messages import Token, TokenLogprobs

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def metadata() -> dict[str, object]:
    return read_metadata(find_model(MODEL).gguf_path)


@pytest.fixture(scope="module")
def vocabulary(metadata: dict[str, object]) -> Vocabulary:
    return Vocabulary.from_metadata(metadata)


@pytest.fixture(scope="module")
def tokens(metadata: dict[str, object]) -> list[Token]:
    """The tokens of an answer that ends with the model's end token."""
    ids = build_tokenizer(metadata).encode("One two three.", add_special_tokens=False).ids
    return [Token(1, token_id, "", None, None) for token_id in ids]


def ids_of(chunk: common_pb2.Chunk) -> list[int]:
    return list(unpack(chunk.token_ids, field="token_ids"))


def test_a_chunk_carries_all_tokens_that_are_ready(
    vocabulary: Vocabulary, tokens: list[Token]
) -> None:
    chunk = Answer(vocabulary, Sampling()).push(tokens)

    assert chunk.text == "One two three."
    assert ids_of(chunk) == [token.token_id for token in tokens]


def test_the_end_token_ends_the_answer_and_is_not_part_of_it(
    vocabulary: Vocabulary, tokens: list[Token]
) -> None:
    answer = Answer(vocabulary, Sampling())
    chunk = answer.push([*tokens, Token(1, vocabulary.eos_token_ids[0], "stop", None, None)])

    assert answer.finished is not None
    assert answer.finished.finish_reason == common_pb2.FINISH_REASON_STOP
    assert answer.finished.WhichOneof("stop_cause") is None
    assert answer.num_tokens == len(tokens) == len(ids_of(chunk))


def test_a_stop_token_id_is_named(vocabulary: Vocabulary, tokens: list[Token]) -> None:
    last = tokens[-1].token_id
    answer = Answer(vocabulary, Sampling(stop_token_ids=(last,)))
    answer.push([*tokens[:-1], tokens[-1]._replace(finish="stop")])

    assert answer.finished is not None
    assert answer.finished.stop_token_id == last


@pytest.mark.parametrize("together", [True, False])
def test_a_stop_string_ends_the_answer_before_it(
    vocabulary: Vocabulary, tokens: list[Token], together: bool
) -> None:
    answer = Answer(vocabulary, Sampling(stop=("wo th",)))
    text = ""
    for batch in [tokens] if together else [[token] for token in tokens]:
        if answer.finished is None:
            text += answer.push(batch).text

    assert text == "One t"
    assert answer.finished is not None
    assert answer.finished.stop_string == "wo th"


def test_text_held_back_for_a_stop_string_comes_at_the_end(
    vocabulary: Vocabulary, tokens: list[Token]
) -> None:
    answer = Answer(vocabulary, Sampling(stop=("three. And",)))
    before = answer.push(tokens[:-1]).text
    after = answer.push([tokens[-1]._replace(finish="length")]).text

    assert before + after == "One two three."
    assert answer.finished is not None
    assert answer.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH


def test_logprobs_come_one_for_each_token(vocabulary: Vocabulary, tokens: list[Token]) -> None:
    logprobs = TokenLogprobs(-0.5, (7, 8), (-0.5, -1.5))
    answer = Answer(vocabulary, Sampling(logprobs=2))
    chunk = answer.push([token._replace(logprobs=logprobs) for token in tokens])

    assert len(chunk.logprobs) == len(tokens)
    assert chunk.logprobs[0].chosen.token_id == tokens[0].token_id
    assert [top.token_id for top in chunk.logprobs[0].top] == [7, 8]
