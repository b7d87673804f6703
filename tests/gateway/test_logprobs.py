from __future__ import annotations

import math

import orjson

from firsttoken.common.v1 import common_pb2
from services.gateway.logprobs import LEAST, ChatLogprobs, CompletionLogprobs
from services.models.vocabulary import Vocabulary

TOKENS = (b"One", b" two", "é".encode()[:1], "é".encode()[1:], b"<|end|>")


def vocabulary() -> Vocabulary:
    return Vocabulary(
        token_bytes=TOKENS,
        special_token_ids=frozenset({4}),
        eos_token_ids=(4,),
        bos_token_id=None,
        context_length=64,
        chat_template="",
    )


def position(token_id: int, *top: int, logprob: float = -1.0) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=logprob),
        top=[common_pb2.TokenLogprob(token_id=each, logprob=-0.5) for each in top],
    )


def test_a_token_is_its_text_and_exactly_its_bytes() -> None:
    first, half = ChatLogprobs(vocabulary()).entries([position(0, 1), position(2)])

    assert first == {
        "token": "One",
        "logprob": -1.0,
        "bytes": [79, 110, 101],
        "top_logprobs": [{"token": " two", "logprob": -0.5, "bytes": [32, 116, 119, 111]}],
    }
    assert (half["token"], half["bytes"]) == ("\\xc3", [0xC3])


def test_bytes_of_a_split_character_make_it_whole_again() -> None:
    entries = ChatLogprobs(vocabulary()).entries([position(2), position(3)])

    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "é"


def test_a_control_token_is_spelled() -> None:
    [entry] = ChatLogprobs(vocabulary()).entries([position(4)])

    assert entry["token"] == "<|end|>"


def test_an_id_beyond_the_vocabulary_is_nothing() -> None:
    [entry] = ChatLogprobs(vocabulary()).entries([position(99)])

    assert (entry["token"], entry["bytes"]) == ("", [])


def test_what_json_cannot_say_is_very_unlikely() -> None:
    [entry] = ChatLogprobs(vocabulary()).entries([position(0, logprob=-math.inf)])

    assert entry["logprob"] == LEAST
    assert b"null" not in orjson.dumps(entry)


def test_lists_lie_side_by_side_and_offsets_count_characters() -> None:
    logprobs = CompletionLogprobs(vocabulary(), offset=10)
    first = logprobs.lists([position(0, 1, 2)])
    then = logprobs.lists([position(2), position(3), position(1)])

    assert first == {
        "tokens": ["One"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{" two": -0.5, "bytes:\\xc3": -0.5}],
        "text_offset": [10],
    }
    assert then["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", " two"]
    assert then["text_offset"] == [13, 13, 14]
