"""Answers over HTTP, as their callers get them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import orjson
import pytest
import pytest_asyncio

from firsttoken.client import MeshError
from services.core.config import Snapshot
from services.core.ledger import Segment
from services.core.settings import MeshConfig
from services.gateway.errors import ApiError, unavailable
from services.gateway.exchange import Exchange
from services.gateway.gateway import Gateway
from services.gateway.generate import Api, Generation
from tests.gateway.edges import (
    CHAT,
    COMPLETION,
    HELLO,
    MODEL,
    Edge,
    chat_body,
    read_events,
    run_edge,
)
from tests.router.meshes import simulated
from tests.runtime.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG = "word " * 200


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def edge() -> AsyncIterator[Edge]:
    async with run_edge(simulated(timing={"decode_step_ms": 1.0})) as edge:
        yield edge


async def test_a_chat_is_answered_in_openai_s_form(edge: Edge) -> None:
    answer = await edge.chat(max_tokens=5, **GREEDY)

    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_completion_is_answered_in_openai_s_form(edge: Edge) -> None:
    answer = await edge.complete(max_tokens=5, **GREEDY)

    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    [choice] = answer["choices"]
    assert choice["text"]
    assert choice["finish_reason"] == "length"


async def test_it_is_what_the_mesh_itself_answers(edge: Edge) -> None:
    direct = await edge.mesh.client.complete(HELLO, max_tokens=9, ignore_eos=True, temperature=0.0)
    answer = await edge.chat(max_tokens=9, **GREEDY)

    assert answer["choices"][0]["message"]["content"] == direct.text


async def test_a_stream_says_what_the_whole_answer_says(edge: Edge) -> None:
    whole = await edge.chat(max_tokens=9, **GREEDY)
    chunks = await edge.chunks(CHAT, chat_body(max_tokens=9, **GREEDY))

    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all(choice["delta"].keys() == {"content"} for choice in middle)
    assert all(choice["finish_reason"] is None for choice in (first, *middle))
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    text = "".join(choice["delta"]["content"] for choice in middle)
    assert text == whole["choices"][0]["message"]["content"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_stream_is_written_byte_by_byte_as_clients_read_it(edge: Edge) -> None:
    body = {"prompt": "Once", "max_tokens": 2, "stream": True, **GREEDY}
    response = await edge.http.post(COMPLETION, json=body)

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["transfer-encoding"] == "chunked"
    *events, done, nothing = response.content.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    for event in events:
        payload = event.removeprefix(b"data: ")
        assert event == b"data: " + payload
        assert orjson.dumps(orjson.loads(payload)) == payload


async def test_usage_comes_in_a_last_chunk_where_that_is_asked(edge: Edge) -> None:
    body = chat_body(max_tokens=4, stream_options={"include_usage": True}, **GREEDY)
    *chunks, last = await edge.chunks(CHAT, body)

    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_cached_tokens_are_told(edge: Edge, stream: bool) -> None:
    body = {"prompt": LONG, "max_tokens": 1, "cache_salt": f"cached {stream}"}

    async def cached() -> int:
        if not stream:
            usage = (await edge.complete(**body))["usage"]
        else:
            options = {"include_usage": True}
            usage = (await edge.chunks(COMPLETION, {**body, "stream_options": options}))[-1][
                "usage"
            ]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert await cached() == 0
    assert await cached() >= 128


async def test_several_choices_are_several_answers(edge: Edge) -> None:
    body = chat_body(n=3, max_tokens=6, seed=11, temperature=1.0, ignore_eos=True)
    answer = await edge.chat(**body)

    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in choices]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 18
    alone = await edge.chat(max_tokens=6, seed=12, temperature=1.0, ignore_eos=True)
    assert alone["choices"][0]["message"]["content"] == texts[1]
    assert alone["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


async def test_streamed_choices_come_as_they_are_ready(edge: Edge) -> None:
    body = chat_body(n=3, max_tokens=20, seed=11, temperature=1.0, ignore_eos=True)
    whole = await edge.chat(**body)
    chunks = await edge.chunks(CHAT, {**body, "stream_options": {"include_usage": True}})

    *told, usage = chunks
    choices = [chunk["choices"][0] for chunk in told]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        text = "".join(choice["delta"].get("content", "") for choice in mine)
        assert text == whole["choices"][index]["message"]["content"]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in mine][-1] == "length"
    assert usage["usage"]["completion_tokens"] == 60
    last_of_0 = max(at for at, choice in enumerate(choices) if choice["index"] == 0)
    assert any(choice["index"] == 2 for choice in choices[:last_of_0]), "they are not one by one"


async def test_prompts_in_a_list_are_answered_in_their_order(edge: Edge) -> None:
    prompts = ["One", [1, 2, 3], "Three"]
    apart = [(await edge.complete(prompt=prompt, max_tokens=3, **GREEDY)) for prompt in prompts]
    together = await edge.complete(prompt=prompts, n=2, max_tokens=3, **GREEDY)

    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [each["choices"][0]["text"] for each in apart for _ in range(2)]
    wanted = sum(each["usage"]["prompt_tokens"] for each in apart)
    assert together["usage"]["prompt_tokens"] == wanted
    assert together["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_begins_with_its_prompt_where_that_is_asked(
    edge: Edge, stream: bool
) -> None:
    body = {"prompt": "Once upon", "max_tokens": 3, **GREEDY}
    plain = (await edge.complete(**body))["choices"][0]["text"]

    if stream:
        chunks = await edge.chunks(COMPLETION, {**body, "echo": True})
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        text = (await edge.complete(**body, echo=True))["choices"][0]["text"]

    assert text == "Once upon" + plain


async def test_an_answer_ends_before_a_stop_string(edge: Edge) -> None:
    free = (await edge.complete(max_tokens=12, **GREEDY))["choices"][0]["text"]
    stop = free[len(free) // 2 :][:3]
    choice = (await edge.complete(max_tokens=12, stop=stop, **GREEDY))["choices"][0]

    assert choice["finish_reason"] == "stop"
    assert choice["text"] == free[: free.index(stop)]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_s_logprobs_spell_each_token_and_its_bytes(edge: Edge, stream: bool) -> None:
    body = chat_body(max_tokens=30, logprobs=True, top_logprobs=2, **GREEDY)
    if stream:
        choices = [chunk["choices"][0] for chunk in await edge.chunks(CHAT, body)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        found = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
        entries = [entry for each in found for entry in each]
    else:
        [choice] = (await edge.chat(**body))["choices"]
        text, entries = choice["message"]["content"], choice["logprobs"]["content"]

    assert len(entries) == 30
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert spelled.decode(errors="replace") == text
    for entry in entries:
        assert entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 2
        for each in (entry, *entry["top_logprobs"]):
            token = bytes(each["bytes"]).decode(errors="ignore")
            assert each["token"] == token or each["token"].startswith("\\x")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_completion_s_logprobs_are_lists_side_by_side(edge: Edge, stream: bool) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "logprobs": 2, **GREEDY}
    lists: dict[str, list[Any]]
    if stream:
        choices = [chunk["choices"][0] for chunk in await edge.chunks(COMPLETION, body)]
        text = "".join(choice["text"] for choice in choices)
        found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        lists = {name: [value for each in found for value in each[name]] for name in found[0]}
    else:
        [choice] = (await edge.complete(**body))["choices"]
        text, lists = choice["text"], choice["logprobs"]

    assert {len(values) for values in lists.values()} == {8}
    assert "".join(lists["tokens"]) == text
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert text[offset:].startswith(token)
    assert all(len(top) == 2 for top in lists["top_logprobs"])


async def test_the_ledger_adds_up(edge: Edge) -> None:
    answer = await edge.chat(max_tokens=2, n=2, include_ledger=True)

    assert [journey["index"] for journey in answer["firsttoken"]] in ([0, 1], [1, 0])
    for journey in answer["firsttoken"]:
        ledger = journey["ledger"]
        owned = sum(ledger[f"{segment}_ms"] for segment in Segment)
        assert owned + ledger["residual_ms"] == pytest.approx(ledger["total_ms"], abs=0.01)
        assert ledger["preprocess_ms"] > 0
        assert journey["engine"] == "simulated"
        assert len(journey["trace_id"]) == 32
        assert journey["routing"]["candidates"] >= 1
        assert journey["routing"]["predicted_cached_tokens"] is not None


def a_generation() -> Generation:
    """With nothing behind it that works."""
    gateway = Mock(Gateway, snapshot=Snapshot(1, MeshConfig()), served=SimpleNamespace(model="m"))
    gateway.metrics, gateway.reporter, gateway.settings = Mock(), Mock(), MeshConfig().gateway
    gateway.authorize.side_effect = ZeroDivisionError
    exchange = Exchange({"type": "http", "method": "POST", "path": CHAT, "headers": []})
    return Generation(gateway, exchange, Mock(Api, operation="chat"))


async def test_a_request_that_meets_a_defect_is_told_as_a_failure() -> None:
    generation = a_generation()
    with pytest.raises(ZeroDivisionError):
        await generation.run()
    [told] = generation._gateway.reporter.record_request.call_args_list  # type: ignore[attr-defined]

    assert told.kwargs["error"] == "internal error"
    assert told.args[-1]["error.type"] == "internal_error"


async def test_a_failed_second_answer_is_no_part_of_the_ledger_of_the_first() -> None:
    generation = a_generation()
    failure = MeshError(
        grpc.StatusCode.UNAVAILABLE, "gone", ledger={"queue": 500.0}, elapsed_ms=500.0
    )
    generation._ledger.mark_first_token(generation._ledger.arrived_s + 1.0)
    generation._note_failure(failure, Mock(called_s=generation._prepared_s + 0.5))

    assert list(generation._ledger.sums_s()) == []


async def test_a_refusal_is_over_before_the_other_answers_are_ended() -> None:
    generation = a_generation()
    begun_s = generation._prepared_s = generation._ledger.arrived_s
    failure = MeshError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", ledger={"queue": 500.0}, elapsed_ms=500.0
    )
    generation._note_failure(failure, Mock(called_s=begun_s + 0.5, first_message_s=0.0))

    assert generation._ledger.total_s == pytest.approx(1.0)
    assert generation._ledger.residual_s == pytest.approx(0.0)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_breaks_off_has_the_first_token_s_ledger(stream: bool) -> None:
    router, timing = {"max_deadline_s": 1.0}, {"decode_step_ms": 10.0}
    settings = simulated(router=router, timing=timing)
    async with run_edge(settings, with_observer=True) as edge:
        assert edge.mesh.observer is not None
        body = {"prompt": LONG, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
        response = await edge.http.post(COMPLETION, json=body)
        assert "router.max_deadline_s" in response.text
        requests = edge.mesh.observer.books.requests
        await eventually(lambda: len(requests) == 1)
    [request] = requests

    assert request.hops[0].name == "gateway.request"
    assert request.hops[0].attributes["error.type"] == "max_deadline"
    assert request.spent_s[Segment.PREFILL] > 0
    assert sum(request.spent_s.values()) < request.duration_s / 2
    if stream:
        assert request.ttft_s is not None
        total_s, residual_s = request.ttft_s, request.residual_s
    else:
        # Its caller never had a token.
        assert request.ttft_s is None
        parts = response.headers["server-timing"].split(";dur=")
        total_s, residual_s = float(parts[-1]) / 1e3, float(parts[-2].partition(",")[0]) / 1e3
    assert abs(residual_s) < total_s / 2


@pytest.mark.parametrize("tell", [Generation._whole, Generation._stream])
async def test_looking_for_a_router_in_vain_is_routing(tell: Any) -> None:
    generation = a_generation()
    generation._prepared_s = time.monotonic() - 1.0
    answer = Mock(read=AsyncMock(side_effect=unavailable("there is none", code="no_router")))
    with pytest.raises(ApiError):
        await tell(generation, Mock(), Mock(), [answer])

    assert generation._ledger.spent_s(Segment.ROUTE) >= 1.0


async def test_the_ledger_ends_a_stream_where_that_is_asked(edge: Edge) -> None:
    options = {"include_ledger": True}
    *chunks, last = await edge.chunks(CHAT, chat_body(max_tokens=2, stream_options=options))

    assert not any("firsttoken" in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["firsttoken"][0]["ledger"]["total_ms"] > 0


async def test_a_whole_answer_says_its_timing(edge: Edge) -> None:
    response = await edge.http.post(CHAT, json=chat_body(max_tokens=2))

    parts = [part.partition(";dur=") for part in response.headers["server-timing"].split(", ")]
    assert [name for name, _, _ in parts] == [*Segment, "residual", "ttft"]
    assert float(parts[-1][2]) > 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETION, {"prompt": "long " * 3000}, "prompt", "context_length_exceeded"),
        (COMPLETION, {"prompt": [5] * 3000}, "prompt", "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 5000}]}, "messages",
         "context_length_exceeded"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages",
         "invalid_value"),
    ],
)  # fmt: skip
async def test_what_only_the_mesh_can_refuse_is_named_in_openai_s_words(
    edge: Edge, path: str, body: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    error = await edge.refused(path, {**body, "stream": stream})

    assert (error.status, error.type) == (400, "invalid_request_error")
    assert (error.param, error.code) == (param, code)
    assert error.message.startswith(f"{param}: ")


async def test_many_at_once_are_all_answered(edge: Edge) -> None:
    async def one(number: int) -> str:
        body = {"prompt": f"Tale {number}", "max_tokens": 10, "stream": True, **GREEDY}
        response = await edge.http.post(COMPLETION, json=body)
        return "".join(each["choices"][0]["text"] for each in read_events(response.content))

    together = await asyncio.gather(*map(one, range(40)))

    assert together[7] == await one(7)
    assert all(together)


async def test_what_was_answered_is_counted(edge: Edge) -> None:
    async def counted() -> list[float]:
        labels = {"route": COMPLETION, "status": "200", "request_class": "batch"}
        return [
            await edge.metric("firsttoken_gateway_requests_total", **labels),
            await edge.metric("firsttoken_gateway_tokens_total", kind="completion"),
            await edge.metric("firsttoken_gateway_ttft_seconds_count", request_class="batch"),
        ]

    before = await counted()
    await edge.complete(max_tokens=7, priority="batch", **GREEDY)
    await edge.idle()  # a request is counted when its answer has left
    after = await counted()

    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 7, 1]
