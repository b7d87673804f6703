from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from firsttoken.worker.v1 import worker_pb2
from router.admission import RequestClass
from router.checks import Checked
from router.prompt import Prompt
from router.workers import METHOD, is_finished, make_request
from services.core.tokens import pack

CHECKED = Checked("text", "acme", "acme", RequestClass.BATCH)
PROMPT = Prompt(pack([1, 2, 3]), bytes(32), 64)

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
def test_tells_a_chunk_from_the_last_message(chunk: common_pb2.Chunk) -> None:
    assert not is_finished(worker_pb2.GenerateResponse(chunk=chunk).SerializeToString())


@given(st.builds(common_pb2.Finished, stop_string=st.text(max_size=9), attempts=st.integers(0, 9)))
def test_knows_the_last_message_by_its_first_byte(finished: common_pb2.Finished) -> None:
    message = worker_pb2.GenerateResponse(finished=finished).SerializeToString()

    assert is_finished(message)
    assert inference_pb2.GenerateResponse.FromString(message).finished == finished


def test_calls_the_method_that_workers_serve() -> None:
    service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]

    assert f"/{service.full_name}/{service.methods_by_name['Generate'].name}" == METHOD


def seeds(**sampling: Any) -> set[int | None]:
    """Of the same request, made five times."""
    request = inference_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(**sampling))
    made = [make_request(request, PROMPT, CHECKED).sampling for _ in range(5)]
    return {each.seed if each.HasField("seed") else None for each in made}


def test_what_is_drawn_has_a_seed_that_every_worker_gets() -> None:
    assert len(seeds(temperature=0.7)) == 5
    assert None not in seeds(temperature=0.7)
    assert seeds(temperature=0.7, seed=0) == {0}
    assert seeds(temperature=0.0) == seeds() == {None}


def test_passes_on_the_class_that_the_tenant_may_have() -> None:
    asked_for_none = inference_pb2.GenerateRequest(text="hi")

    made = make_request(asked_for_none, PROMPT, CHECKED)
    assert made.request_class == common_pb2.REQUEST_CLASS_BATCH


def test_passes_on_the_tenant_and_what_the_tokenizer_made() -> None:
    request = inference_pb2.GenerateRequest(
        text="hi", model="m", request_class=common_pb2.REQUEST_CLASS_BATCH
    )

    assert make_request(request, PROMPT, CHECKED) == worker_pb2.GenerateRequest(
        model="m",
        token_ids=PROMPT.token_ids,
        prefix_keys=PROMPT.prefix_keys,
        sampling=common_pb2.SamplingParams(),
        request_class=common_pb2.REQUEST_CLASS_BATCH,
        tenant="acme",
    )
