from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from firsttoken.worker.v1 import worker_pb2
from router.workers import METHOD, count_tokens, is_finished
from services.core.tokens import pack

chunks = st.builds(
    common_pb2.Chunk,
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=200).map(pack),
    text=st.text(max_size=200),
    logprobs=st.lists(
        st.builds(
            common_pb2.PositionLogprobs,
            chosen=st.builds(common_pb2.TokenLogprob, token_id=st.integers(0, 9)),
        ),
        max_size=3,
    ),
)


@given(chunks)
def test_counts_the_tokens_of_a_chunk_without_parsing_it(chunk: common_pb2.Chunk) -> None:
    message = worker_pb2.GenerateResponse(chunk=chunk).SerializeToString()

    assert not is_finished(message)
    assert count_tokens(message) == len(chunk.token_ids) // 4


@given(st.builds(common_pb2.Finished, stop_string=st.text(max_size=9), attempts=st.integers(0, 9)))
def test_knows_the_last_message_by_its_first_byte(finished: common_pb2.Finished) -> None:
    message = worker_pb2.GenerateResponse(finished=finished).SerializeToString()

    assert is_finished(message)
    assert inference_pb2.GenerateResponse.FromString(message).finished == finished


def test_calls_the_method_that_workers_serve() -> None:
    service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]

    assert f"/{service.full_name}/{service.methods_by_name['Generate'].name}" == METHOD
