"""What one engine tells another so that it can fetch a prompt's KV: whole, and nothing else."""

from __future__ import annotations

import dataclasses

from worker.engines import contract
from worker.engines.trtllm import api

_FIELDS = tuple(field.name for field in dataclasses.fields(api.DisaggregatedParams))
_OTHERS = tuple(
    field.name
    for field in dataclasses.fields(contract.DisaggregatedParams)
    if field.name not in _FIELDS
)


class BadParams(ValueError):
    """Not to be submitted: a transfer that cannot be may stall the whole decode engine."""


def context_only() -> api.DisaggregatedParams:
    return api.DisaggregatedParams(request_type="context_only")


def from_engine(params: api.DisaggregatedParams) -> contract.DisaggregatedParams:
    """Every field that the installed version has and the mesh carries."""
    return contract.DisaggregatedParams(**{name: getattr(params, name) for name in _FIELDS})


def generation_only(
    params: contract.DisaggregatedParams, *, first_token: int
) -> api.DisaggregatedParams:
    """For the decode engine. Raises BadParams, naming the field.

    `first_token`: what the prefill worker said was sampled.
    """
    if params.request_type != "context_only":
        raise BadParams(f"request_type: must be context_only; got {params.request_type}")
    if params.ctx_request_id is None:
        raise BadParams("ctx_request_id: must be there")
    if not params.opaque_state:
        raise BadParams("opaque_state: must be there: it says where the KV is")
    if params.first_gen_tokens != [first_token]:
        raise BadParams(f"first_gen_tokens: must be {[first_token]}; got {params.first_gen_tokens}")
    unknown = [name for name in _OTHERS if getattr(params, name) is not None]
    if unknown:
        raise BadParams(f"{', '.join(unknown)}: not known to the TensorRT-LLM installed here")
    whole = api.DisaggregatedParams(**{name: getattr(params, name) for name in _FIELDS})
    return dataclasses.replace(whole, request_type="generation_only")
