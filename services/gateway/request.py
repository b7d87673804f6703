"""From the body of a request to what the mesh is asked.

Fields that no one here knows are ignored, as OpenAI-compatible servers do. Those that
would change the answer and are not supported are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from services.core.errors import InvalidArgument, Violation
from services.core.keys import MAX_SALT_CHARACTERS
from services.core.sampling import MAX_LOGPROBS
from services.core.settings import GatewaySettings
from services.core.tokens import pack
from services.gateway.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, bad_request, model_not_found
from services.gateway.fields import Fields, kind_of
from services.gateway.messages import read_chat
from services.gateway.options import read_class, read_sampling
from services.gateway.prompts import Prompt, read_prompts
from services.gateway.refusals import CHAT, COMPLETION, refuse_unsupported
from services.gateway.served import Served
from services.gateway.tools import RequestedTools, read_tools

# OpenAI's default for /v1/completions.
COMPLETION_TOKENS = 16
MAX_INT64, MAX_UINT64 = (1 << 63) - 1, (1 << 64) - 1


class Told(NamedTuple):
    """What the caller wants to be told besides the text."""

    stream: bool
    usage: bool
    ledger: bool
    # Alternatives for each token; None: no log-probabilities.
    logprobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, checked.

    `requests` has one for each answer, those to a prompt side by side, `num_choices` each.
    `echoes` are what each answer begins with. `names` goes from the mesh's names to those
    that the caller used.
    """

    requests: tuple[inference_pb2.GenerateRequest, ...]
    num_choices: int
    told: Told
    echoes: tuple[str, ...]
    tools: RequestedTools
    names: dict[str, str]

    @property
    def request_class(self) -> common_pb2.RequestClass.ValueType:
        return self.requests[0].request_class

    def to_param(self, field: str) -> str:
        """From a dotted field of a GenerateRequest to OpenAI's spelling of it."""
        if field in ("", "input"):
            return "messages" if self.requests[0].HasField("chat") else "prompt"
        name = field.removeprefix("sampling.").removeprefix("chat.")
        name = re.sub(r"^tools_json", "tools", name)
        name = re.sub(r"(tool_calls\[\d+\])\.(name|arguments)(_json)?$", r"\1.function.\2", name)
        return self.names.get(name, _NAMES.get(name, name))


_NAMES = {
    "chat": "messages",
    "text": "prompt",
    "token_ids": "prompt",
    "template_args_json": "chat_template_kwargs",
    "request_class": "priority",
}


def parse_body(raw: bytes) -> Fields:
    """Raises ApiError saying where it stops being a JSON object."""
    problem = ""
    value: Any = None
    try:
        value = orjson.loads(raw)
        orjson.dumps(value)  # parts of it are written again, and that goes less deep
    except orjson.JSONEncodeError:
        problem = "is nested too deeply"
    except orjson.JSONDecodeError as error:
        reason = error.msg.partition(": line")[0]
        problem = f"must be JSON: {reason}, at line {error.lineno}, column {error.colno}"
    if not raw:
        problem = "must be a JSON object; it is empty"
    elif not problem and not isinstance(value, dict):
        problem = f"must be a JSON object; got {kind_of(value)}"
    if problem:
        raise ApiError(400, f"the body {problem}", code="invalid_json")
    return Fields(value)


def read_chat_request(body: Fields, served: Served, settings: GatewaySettings) -> Ask:
    """For /v1/chat/completions. Raises ApiError naming every field that is wrong."""
    _check_model(body, served)
    refuse_unsupported(body, CHAT)
    try:
        tools = read_tools(body.values, served.tools)
    except InvalidArgument as error:
        body.violations += error.violations
        tools = RequestedTools()
    chat = read_chat(body, tools_json=tools.tools_json)
    alternatives = body.integer("top_logprobs", high=MAX_LOGPROBS)
    wants_logprobs = body.boolean("logprobs")
    if alternatives is not None and not wants_logprobs:
        body.refuse("top_logprobs", "needs logprobs to be true")
    newer = "max_completion_tokens" if body.has("max_completion_tokens") else "max_tokens"
    max_tokens = body.integer(newer, low=1)
    if max_tokens is None:
        most = served.max_context_tokens
        max_tokens = min(settings.default_max_tokens or most, most)
    given: dict[str, Any] = {"max_tokens": max_tokens}
    if wants_logprobs:
        given["logprobs"] = alternatives or 0
    if tools.needs_control_tokens:
        given["skip_special_tokens"] = False
    return _ask(
        body,
        served,
        settings,
        prompts=[inference_pb2.GenerateRequest(chat=chat)],
        given=given,
        names={"max_tokens": newer, "logprobs": "top_logprobs"},
        tools=tools,
    )


def read_completion_request(body: Fields, served: Served, settings: GatewaySettings) -> Ask:
    """For /v1/completions. Raises ApiError naming every field that is wrong."""
    _check_model(body, served)
    refuse_unsupported(body, COMPLETION)
    prompts = read_prompts(body, served.vocabulary_size)
    _check_lengths(prompts, served.max_context_tokens)
    logprobs = body.integer("logprobs", high=MAX_LOGPROBS)
    echo = body.boolean("echo")
    if echo and logprobs is not None:
        body.refuse("echo", "must be false with logprobs: those of a prompt are not computed")
    best_of = body.integer("best_of", low=1)
    if best_of is not None and best_of != (body.raw("n") or 1):
        body.refuse("best_of", "must be as n: answers are not compared here")
    max_tokens = body.integer("max_tokens", low=1)
    given: dict[str, Any] = {
        "max_tokens": max_tokens or min(COMPLETION_TOKENS, served.max_context_tokens)
    }
    if logprobs is not None:
        given["logprobs"] = logprobs
    return _ask(
        body,
        served,
        settings,
        prompts=[_prompt_request(prompt) for prompt in prompts],
        given=given,
        names={},
        echoes=[_spelled(prompt, served) for prompt in prompts] if echo else None,
    )


def _ask(
    body: Fields,
    served: Served,
    settings: GatewaySettings,
    *,
    prompts: Sequence[inference_pb2.GenerateRequest],
    given: dict[str, Any],
    names: dict[str, str],
    tools: RequestedTools | None = None,
    echoes: Sequence[str] | None = None,
) -> Ask:
    """What both kinds of request have in common."""
    num_choices = body.integer("n", low=1) or 1
    if num_choices * len(prompts) > settings.max_choices:
        rule = f"must ask for at most {settings.max_choices} answers in all, one for each prompt"
        body.refuse("n", f"{rule} and each of n; got {num_choices * len(prompts)}")
    sampling = read_sampling(
        body,
        given=given,
        names=names,
        default_temperature=settings.default_temperature,
        max_context_tokens=served.max_context_tokens,
        vocabulary_size=served.vocabulary_size,
    )
    body.string("user")
    told = _told(body, given.get("logprobs"))
    seed = body.integer("seed", low=-MAX_INT64 - 1, high=MAX_INT64)
    common = inference_pb2.GenerateRequest(
        model=served.model,
        sampling=sampling,
        request_class=read_class(body),
        cache_salt=body.string("cache_salt", max_characters=MAX_SALT_CHARACTERS) or "",
    )
    if body.violations:
        raise bad_request(dict.fromkeys(body.violations))
    return Ask(
        requests=tuple(
            _one_request(common, prompt, seed, index)
            for prompt in prompts
            for index in range(num_choices)
        ),
        num_choices=num_choices,
        told=told,
        echoes=tuple(echo for echo in echoes or [""] * len(prompts) for _ in range(num_choices)),
        tools=tools or RequestedTools(),
        names=names,
    )


def _told(body: Fields, logprobs: int | None) -> Told:
    stream = body.boolean("stream") or False
    options = body.section("stream_options")
    if options is not None and not stream:
        body.refuse("stream_options", "must be left out unless stream is true")
    options = options or Fields({}, violations=body.violations)
    usage = options.boolean("include_usage")
    ledgers = (options.boolean("include_ledger"), body.boolean("include_ledger"))
    return Told(stream, usage or False, any(ledgers), logprobs)


def _one_request(
    common: inference_pb2.GenerateRequest,
    prompt: inference_pb2.GenerateRequest,
    seed: int | None,
    index: int,
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(common)
    request.MergeFrom(prompt)
    if seed is not None:
        # Each answer to a prompt is another one, and the same one when it is asked for again.
        request.sampling.seed = (seed + index) & MAX_UINT64
    return request


def _check_model(body: Fields, served: Served) -> None:
    """Of a model that is not here, nothing else matters."""
    model = body.string("model")
    if model and model != served.model:
        raise model_not_found(model, served=served.model)


def _check_lengths(prompts: Sequence[Prompt], max_context_tokens: int) -> None:
    """Of token ids; how many tokens a text has, the mesh finds out."""
    for prompt in prompts:
        if not isinstance(prompt, str) and len(prompt) >= max_context_tokens:
            rule = f"must be at most {max_context_tokens - 1} tokens; got {len(prompt)}"
            raise bad_request([Violation("prompt", rule)], code=CONTEXT_LENGTH_EXCEEDED)


def _prompt_request(prompt: Prompt) -> inference_pb2.GenerateRequest:
    if isinstance(prompt, str):
        return inference_pb2.GenerateRequest(text=prompt)
    return inference_pb2.GenerateRequest(token_ids=pack(prompt))


def _spelled(prompt: Prompt, served: Served) -> str:
    if isinstance(prompt, str):
        return prompt
    return served.vocabulary.join(prompt, skip_special_tokens=False).decode(errors="replace")
