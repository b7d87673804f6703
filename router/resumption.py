"""A plan that came to nothing, taken up by the router: from a caller's word to what is planned."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc
from google.protobuf.message import DecodeError

from firsttoken.router.v1 import inference_pb2
from firsttoken.worker.v1 import worker_pb2
from router.admission import RequestClass
from router.checks import Checked, class_to_proto
from router.prompt import Prompt
from router.replay import Told
from services.core.errors import InvalidArgument, PermissionDenied, Violation
from services.core.tenants import Tenant
from services.core.tickets import KeyRing
from services.core.tokens import BYTES_PER_TOKEN
from services.runtime import tickets
from services.runtime.interceptor import DETAILS_KEY
from services.runtime.protocol import is_batch
from services.runtime.status import read_violations

# The fields of a worker's request that the caller fills in.
_ANSWER = ("answer_ids", "answer_characters")


class Resumed(NamedTuple):
    plan_id: bytes
    # Who was to answer.
    worker_id: str
    checked: Checked
    # As it was planned, with what the caller has of the answer.
    call: worker_pb2.GenerateRequest
    prompt: Prompt
    told: Told


@contextlib.contextmanager
def naming_fields() -> Iterator[None]:
    """What a worker says of its request's fields, said of the caller's."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        pairs = error.trailing_metadata()
        details = next((value for key, value in pairs if key == DETAILS_KEY), None)
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or not isinstance(details, bytes):
            raise
        violations = [
            Violation(f"resumption.{'' if field in _ANSWER else 'call.'}{field}", description)
            for field, description in read_violations(details)
        ]
        raise InvalidArgument(violations) from error


def read_resumption(
    resumption: inference_pb2.Resumption,
    ring: KeyRing,
    caller: Tenant,
    *,
    block_tokens: int,
    max_age_s: float,
) -> Resumed:
    """Raises PermissionDenied for what no router planned for this caller, or too long ago."""
    plan = tickets.read(ring, resumption.ticket, resumption.call)
    if caller.name and caller.name != plan.tenant:
        raise PermissionDenied(
            "resumption.ticket: another tenant's request was planned", reason="FOREIGN_TENANT"
        )
    if time.time() > plan.expires_s + max_age_s:
        raise PermissionDenied(
            f"resumption.ticket: planned over {max_age_s:g} s ago (router.max_deadline_s)",
            reason="TICKET_EXPIRED",
        )
    if len(resumption.answer_ids) % BYTES_PER_TOKEN:
        rule = f"must be uint32 values of {BYTES_PER_TOKEN} bytes"
        raise InvalidArgument.of("resumption.answer_ids", rule)
    try:
        call = worker_pb2.GenerateRequest.FromString(resumption.call)
    except DecodeError as error:  # a router has signed it
        raise InvalidArgument.of("resumption.call", str(error)) from error
    call.answer_ids = resumption.answer_ids
    call.answer_characters = resumption.answer_characters
    # What the tenant may ask for can have changed since. That refuses nobody in an answer's middle.
    batch = is_batch(call.request_class) or caller.settings.max_class == RequestClass.BATCH.value
    request_class = RequestClass.BATCH if batch else RequestClass.INTERACTIVE
    call.request_class = class_to_proto(request_class)
    return Resumed(
        plan.id,
        plan.worker_id,
        Checked(
            "resumption.call",
            plan.tenant,
            plan.tenant,
            request_class,
        ),
        call,
        Prompt(call.token_ids, call.prefix_keys, block_tokens),
        Told(resumption.answer_ids, resumption.answer_characters),
    )
