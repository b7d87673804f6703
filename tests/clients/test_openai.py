"""OpenAI's own Python client, which no one here wrote."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.conftest import KeyedEdge
from tests.clients.edges import MODEL, HttpEdge

HELLO: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Tell me about lighthouses."}
]
SEEDED: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "seed": 7}


@pytest.fixture
def client(edge: HttpEdge) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=edge.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(edge: HttpEdge) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=edge.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=HELLO, **SEEDED)

    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert abs(answer.created - time.time()) < 600
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens > 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer._request_id


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, **SEEDED)
    with client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **SEEDED
    ) as stream:
        chunks = list(stream)

    *told, last = chunks
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert told[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in told)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in told if c.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.prompt_tokens_details is not None
    assert all(chunk.usage is None for chunk in told)


def test_the_clients_own_accumulator_takes_the_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, **SEEDED).choices[0].message.content
    assert whole is not None
    stop = whole[len(whole) // 2 :][:4]
    with client.chat.completions.stream(
        messages=HELLO, logprobs=True, stop=[stop], **SEEDED
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()

    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == whole[: whole.index(stop)]
    assert final.choices[0].finish_reason == "stop"


def test_several_choices_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=HELLO, n=3, logprobs=True, top_logprobs=2, **SEEDED
    )

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 12
        for position in choice.logprobs.content:
            assert position.logprob <= 0
            assert len(position.top_logprobs) == 2


def test_streamed_choices_are_told_apart(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=HELLO, n=3, **SEEDED)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(messages=HELLO, n=3, stream=True, **SEEDED):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def test_a_plain_prompt_is_completed(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        prompt=["Once upon", "a time"], echo=True, stop=["\n\n\n"], **SEEDED
    )
    ids = client.completions.create(prompt=[5, 6, 7], logprobs=1, **SEEDED)
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(prompt="Once upon", stream=True, **SEEDED)
    )

    assert answer.object == "text_completion"
    assert [choice.text[:6] for choice in answer.choices] == ["Once u", "a time"]
    assert "Once upon" + text == answer.choices[0].text
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    assert ids.choices[0].logprobs is not None


def test_models_are_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list()

    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_raw_responses_show_the_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(messages=HELLO, **SEEDED)

    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.request_id == raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(
        messages=HELLO, stream=True, **SEEDED
    ) as streaming:
        assert streaming.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streaming.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("changed", "kind", "param", "code"),
    [
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "invalid_value"),
        ({"temperature": 3000}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_value"),
        ({"model": "gpt-4o"}, openai.NotFoundError, "model", "model_not_found"),
        (
            {"response_format": {"type": "json_object"}},
            openai.BadRequestError,
            "response_format",
            None,
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "look"}}]},
            openai.BadRequestError,
            "tools",
            None,
        ),
    ],
)
def test_errors_are_the_clients_own_classes(
    client: openai.OpenAI,
    changed: dict[str, Any],
    kind: type[openai.APIStatusError],
    param: str,
    code: str | None,
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"messages": HELLO, **SEEDED, **changed})

    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    if code is not None:
        assert caught.value.code == code


def test_a_prompt_beyond_the_context_is_told_by_its_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            messages=[{"role": "user", "content": "word " * 5000}], **SEEDED
        )

    assert caught.value.code == "context_length_exceeded"


def test_callers_are_known_by_their_key(keyed_edge: KeyedEdge) -> None:
    url = keyed_edge.edge.base_url
    with openai.OpenAI(base_url=url, api_key=keyed_edge.key, max_retries=0) as client:
        assert client.chat.completions.create(messages=HELLO, **SEEDED).choices
        assert list(client.models.list())
        other = client.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError) as caught:
            other.chat.completions.create(messages=HELLO, **SEEDED)
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            other.models.list()


def test_a_limit_is_met_with_a_retry_when_it_is_time(keyed_edge: KeyedEdge) -> None:
    url, key = keyed_edge.edge.base_url, keyed_edge.limited_key
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:  # noqa: PT012
            for _ in range(10):
                client.chat.completions.create(messages=HELLO, **SEEDED)
        assert float(caught.value.response.headers["retry-after"]) >= 1
        patient = client.with_options(max_retries=5)
        raw = patient.chat.completions.with_raw_response.create(messages=HELLO, **SEEDED)

    assert raw.parse().choices[0].message.content
    assert raw.retries_taken >= 1


async def test_many_streams_at_once(async_client: openai.AsyncOpenAI, edge: HttpEdge) -> None:
    async def ask() -> str:
        stream = await async_client.chat.completions.create(messages=HELLO, stream=True, **SEEDED)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = await asyncio.gather(*(ask() for _ in range(32)))

    assert len(set(texts)) == 1
    assert texts[0]


async def test_a_stream_that_is_left_ends_at_the_engine(
    async_client: openai.AsyncOpenAI, edge: HttpEdge
) -> None:
    long: dict[str, Any] = {**SEEDED, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    stream = await async_client.chat.completions.create(messages=HELLO, stream=True, **long)
    async for _ in stream:
        break
    await stream.close()
    pending = asyncio.create_task(
        async_client.chat.completions.create(messages=HELLO, **long)  # not a stream
    )
    await asyncio.sleep(0.2)
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)

    await asyncio.to_thread(edge.wait_until_idle)
    # The slots are free again.
    answers = await asyncio.gather(
        *(async_client.chat.completions.create(messages=HELLO, **SEEDED) for _ in range(8))
    )
    assert all(answer.choices[0].message.content for answer in answers)


def test_a_client_that_waits_no_longer_says_so(client: openai.OpenAI, edge: HttpEdge) -> None:
    hasty = client.with_options(timeout=0.5)

    with pytest.raises(openai.APITimeoutError):
        hasty.chat.completions.create(
            messages=HELLO, model=MODEL, max_tokens=1900, extra_body={"ignore_eos": True}
        )

    edge.wait_until_idle()
