"""Fields that would change the answer and are not supported: refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.gateway.fields import Fields


class Refusal(NamedTuple):
    """What the field may be all the same, and what to do about it."""

    allows: Callable[[Any], bool]
    rule: str


def _is_empty(value: Any) -> bool:
    return not value


_UNSUPPORTED = Refusal(_is_empty, "is not supported here; leave it out")
_COMMON = dict.fromkeys(
    (
        "logit_bias",
        "min_tokens",
        "use_beam_search",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
    ),
    _UNSUPPORTED,
)
CHAT = {
    **_COMMON,
    "functions": Refusal(_is_empty, "is not supported; use tools"),
    "function_call": Refusal(_is_empty, "is not supported; use tool_choice"),
    "audio": _UNSUPPORTED,
    "web_search_options": _UNSUPPORTED,
    "modalities": Refusal(lambda value: value == ["text"], 'must be ["text"]'),
}
COMPLETION = {**_COMMON, "suffix": _UNSUPPORTED}


def refuse_unsupported(body: Fields, refused: Mapping[str, Refusal]) -> None:
    for name, refusal in refused.items():
        if body.has(name) and not refusal.allows(body.raw(name)):
            body.refuse(name, refusal.rule)
    form = body.section("response_format")
    if form is not None and form.string("type") != "text":
        rule = 'must be {"type": "text"}: answers cannot be held to a form here'
        body.refuse("response_format", rule)
