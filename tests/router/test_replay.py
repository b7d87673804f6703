from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2
from router.replay import Told, replay
from services.core.tokens import pack

pieces = st.lists(
    st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=5), st.text(max_size=9)), max_size=9
)


def make_message(token_ids: list[int], text: str) -> bytes:
    logprobs = [
        common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=token_id))
        for token_id in token_ids
    ]
    chunk = common_pb2.Chunk(token_ids=pack(token_ids), text=text, logprobs=logprobs)
    return worker_pb2.GenerateResponse(chunk=chunk).SerializeToString()


@given(pieces)
def test_reads_back_all_ids_and_counts_characters_not_bytes(
    pieces: list[tuple[list[int], str]],
) -> None:
    told = replay(make_message(*piece) for piece in pieces)

    assert told.answer_ids == pack([token_id for ids, _ in pieces for token_id in ids])
    assert told.num_characters == len("".join(text for _, text in pieces))
    assert told.num_tokens == sum(len(ids) for ids, _ in pieces)


def test_nothing_has_been_told_before_the_first_chunk() -> None:
    assert replay([]) == Told(b"", 0)
