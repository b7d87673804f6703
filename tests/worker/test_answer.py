from __future__ import annotations

from typing import NamedTuple

import pytest

from firsttoken.common.v1 import common_pb2
from services.core.errors import InvalidArgument
from services.core.sampling import Sampling
from services.core.tokens import unpack
from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.vocabulary import Vocabulary, build_tokenizer
from worker.answer import Answer
from worker.messages import Token, TokenLogprobs

MODEL = "smollm2-135m-instruct"
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


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


@pytest.mark.parametrize("skipped", [True, False])
def test_control_tokens_are_text_only_when_asked_for(
    vocabulary: Vocabulary, tokens: list[Token], skipped: bool
) -> None:
    control = vocabulary.eos_token_ids[0]
    sampling = Sampling(ignore_eos=True, skip_special_tokens=skipped)

    chunk = Answer(vocabulary, sampling).push([*tokens, Token(1, control, "", None, None)])

    spelled = "" if skipped else vocabulary.spelling(control)
    assert chunk.text == f"One two three.{spelled}"


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


# Told in pieces of a few tokens each, with characters of several tokens, and stop strings
# that begin and come to nothing.
TEXT = "Ünïcödé — 漢字かな 🙂👩‍🚀 stop? stopp. ß end"
STOPS = [(), ("stopp.",), ("🙂👩‍🚀 s", "end"), ("never said",), (" ß end!",)]


@pytest.fixture(scope="module")
def told(metadata: dict[str, object]) -> list[Token]:
    ids = build_tokenizer(metadata).encode(TEXT, add_special_tokens=False).ids
    return [Token(1, token_id, "", None, None) for token_id in ids]


class Telling(NamedTuple):
    token_ids: list[int]
    text: str
    finished: common_pb2.Finished | None


def tell(answer: Answer, tokens: list[Token], said: Telling) -> Telling:
    """`said` and what the answer makes of `tokens`, one at a time, until it ends."""
    token_ids, text = list(said.token_ids), said.text
    for token in tokens:
        if answer.finished is None:
            chunk = answer.push([token])
            token_ids += ids_of(chunk)
            text += chunk.text
    return Telling(token_ids, text, answer.finished)


@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("stop", STOPS)
def test_an_answer_broken_off_anywhere_goes_on_as_if_it_had_not_been(
    vocabulary: Vocabulary, told: list[Token], stop: tuple[str, ...], finish: str
) -> None:
    max_tokens = len(told) if finish == "length" else len(told) + 1
    end = Token(1, vocabulary.eos_token_ids[0], "stop", None, None)
    last = [told[-1]._replace(finish="length")] if finish == "length" else [told[-1], end]
    tokens = [*told[:-1], *last]
    sampling = Sampling(stop=stop, max_tokens=max_tokens)
    nothing = Telling([], "", None)
    whole = tell(Answer(vocabulary, sampling), tokens, nothing)

    assert whole.finished is not None
    for num_before in range(len(tokens) + 1):
        before = tell(Answer(vocabulary, sampling), tokens[:num_before], nothing)
        answer = Answer(vocabulary, sampling)
        owed = answer.resume(before.token_ids, len(before.text))
        after = tell(answer, tokens[len(before.token_ids) :], before)

        assert owed == common_pb2.Chunk()
        assert after == whole
        assert answer.num_tokens == len(whole.token_ids)


def test_resuming_brings_text_that_the_client_lacks(
    vocabulary: Vocabulary, told: list[Token]
) -> None:
    answer = Answer(vocabulary, Sampling())
    owed = answer.resume([token.token_id for token in told], 3)

    assert owed.text == TEXT[3:]
    assert not owed.token_ids
    assert answer.push(told[:2]).text == TEXT[0]


def test_an_answer_that_was_whole_ends_at_once(vocabulary: Vocabulary, told: list[Token]) -> None:
    ids = [token.token_id for token in told]
    by_length = Answer(vocabulary, Sampling(max_tokens=len(ids)))
    by_length.resume(ids, len(TEXT))
    by_string = Answer(vocabulary, Sampling(stop=("end",)))
    by_string.resume(ids, len(TEXT) - len("end"))

    assert by_length.finished == common_pb2.Finished(finish_reason=LENGTH)
    assert by_string.finished == common_pb2.Finished(finish_reason=STOP, stop_string="end")


def test_refuses_more_characters_than_the_ids_say(
    vocabulary: Vocabulary, tokens: list[Token]
) -> None:
    ids = [token.token_id for token in tokens]
    with pytest.raises(InvalidArgument, match=r"at most 14.* got 15") as refusal:
        Answer(vocabulary, Sampling()).resume(ids, 15)

    assert refusal.value.violations[0].field == "answer_characters"
    Answer(vocabulary, Sampling()).resume(ids, 14)
