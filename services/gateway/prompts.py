"""What /v1/completions takes as prompt: text or token ids, or several of such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from services.gateway.fields import Fields, kind_of, to_token_id

Prompt: TypeAlias = str | Sequence[int]


def read_prompts(body: Fields, vocabulary_size: int) -> list[Prompt]:
    value = body.raw("prompt")
    if isinstance(value, str):
        return _checked(body, "prompt", value, vocabulary_size)
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else "nothing" if value is None else kind_of(value)
        body.refuse("prompt", f"must be text or token ids, or a list of such; got {got}")
        return []
    if to_token_id(value[0]) is not None:
        return _checked(body, "prompt", value, vocabulary_size)
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        prompts += _checked(body, f"prompt[{index}]", item, vocabulary_size)
    return prompts


def _checked(body: Fields, field: str, value: Any, vocabulary_size: int) -> list[Prompt]:
    """The one prompt, or none if it is not one."""
    if isinstance(value, str):
        if value:
            return [value]
        body.refuse(field, "must not be empty")
    elif not isinstance(value, list):
        body.refuse(field, f"must be text or a list of token ids; got {kind_of(value)}")
    elif not value:
        body.refuse(field, "must not be empty")
    else:
        ids = [to_token_id(item) for item in value]
        known = [token_id for token_id in ids if token_id is not None]
        if len(known) < len(ids):
            body.refuse(field, f"must be all token ids; got {kind_of(value[ids.index(None)])}")
        elif (largest := max(known)) >= vocabulary_size:
            body.refuse(field, f"must have token ids below {vocabulary_size}; got {largest}")
        else:
            return [known]
    return []
