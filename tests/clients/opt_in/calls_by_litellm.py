"""python calls_by_litellm.py BASE_URL MODEL: prints one line of JSON. For .venv-clients."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

BASE_URL, MODEL = sys.argv[1:]
ASKED: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": BASE_URL,
    "api_key": "none",
    "messages": [{"role": "user", "content": "Tell me of lighthouses."}],
    "max_tokens": 12,
    "seed": 7,
    "num_retries": 0,
}


def text_of(chunk: Any) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


def refusal(**changed: Any) -> str:
    """The class of the exception."""
    try:
        litellm.completion(**{**ASKED, **changed})
    except Exception as error:
        return type(error).__name__
    return ""


async def ask_at_once() -> list[str]:
    answers = await asyncio.gather(*(litellm.acompletion(**ASKED) for _ in range(8)))
    stream = await litellm.acompletion(**ASKED, stream=True)
    streamed = "".join([text_of(chunk) async for chunk in stream])
    return sorted({streamed, *(answer.choices[0].message.content for answer in answers)})


def main() -> None:
    whole = litellm.completion(**ASKED)
    usage = {"include_usage": True}
    chunks = list(litellm.completion(**ASKED, stream=True, stream_options=usage))
    rebuilt = litellm.stream_chunk_builder(chunks)
    plain = {key: ASKED[key] for key in ("api_base", "api_key", "max_tokens", "seed")}
    completion = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once upon", **plain
    )
    long = [{"role": "user", "content": "word " * 9000}]
    answer = {
        "text": whole.choices[0].message.content,
        "finish_reason": whole.choices[0].finish_reason,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": "".join(map(text_of, chunks)),
        "streamed_usage": [rebuilt.usage.prompt_tokens, rebuilt.usage.completion_tokens],
        "at_once": asyncio.run(ask_at_once()),
        "completion": completion.choices[0].text,
        "bad_field": refusal(max_tokens=0),
        "other_model": refusal(model="openai/other"),
        "too_long": refusal(messages=long),
    }
    print(json.dumps(answer))


main()
