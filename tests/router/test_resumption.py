"""Plans that come back to the router, and what is said of them."""

from __future__ import annotations

import time

import grpc
import pytest

from firsttoken.common.v1 import common_pb2
from firsttoken.direct.v1 import direct_pb2
from firsttoken.router.v1 import inference_pb2
from firsttoken.worker.v1 import worker_pb2
from router.admission import RequestClass
from router.resumption import Resumed, naming_fields, read_resumption
from services.core.errors import InvalidArgument, MeshError, Overloaded, Violation
from services.core.settings import TenantSettings
from services.core.tenants import Tenant
from services.core.tickets import KeyRing, SigningKey
from services.core.tokens import pack
from services.runtime import tickets
from services.runtime.interceptor import DETAILS_KEY
from services.runtime.status import to_status

RING = KeyRing((SigningKey("key", bytes(32)),), "key")


def resume(planned: common_pb2.RequestClass.ValueType, max_class: str) -> Resumed:
    call = worker_pb2.GenerateRequest(
        token_ids=pack([1, 2]), tenant="acme", request_class=planned
    ).SerializeToString()
    plan = direct_pb2.Plan(
        tenant="acme", call_digest=tickets.digest(call), expires_s=time.time() + 60
    )
    resumption = inference_pb2.Resumption(call=call, ticket=tickets.issue(RING, plan))
    caller = Tenant("acme", TenantSettings(max_class=max_class))
    return read_resumption(resumption, RING, caller, block_tokens=64, max_age_s=60.0)


@pytest.mark.parametrize(
    ("planned", "max_class", "got"),
    [
        (common_pb2.REQUEST_CLASS_INTERACTIVE, "interactive", RequestClass.INTERACTIVE),
        (common_pb2.REQUEST_CLASS_BATCH, "interactive", RequestClass.BATCH),
        # The tenant had more when it was planned.
        (common_pb2.REQUEST_CLASS_INTERACTIVE, "batch", RequestClass.BATCH),
        (common_pb2.REQUEST_CLASS_UNSPECIFIED, "batch", RequestClass.BATCH),
    ],
)
def test_a_class_is_at_most_what_the_tenant_may_have_now(
    planned: common_pb2.RequestClass.ValueType, max_class: str, got: RequestClass
) -> None:
    resumed = resume(planned, max_class)

    is_batch = resumed.call.request_class == common_pb2.REQUEST_CLASS_BATCH
    assert resumed.checked.request_class is got
    assert is_batch == (got is RequestClass.BATCH)


def failed(error: MeshError) -> grpc.aio.AioRpcError:
    details = (DETAILS_KEY, to_status(error).SerializeToString())
    code = grpc.StatusCode[error.status]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(details))


def test_a_workers_word_on_fields_names_the_callers() -> None:
    error = InvalidArgument([Violation("answer_ids", "too long"), Violation("model", "another")])
    with pytest.raises(InvalidArgument) as raised, naming_fields():
        raise failed(error)

    assert raised.value.violations == (
        ("resumption.answer_ids", "too long"),
        ("resumption.call.model", "another"),
    )


def test_another_error_of_a_worker_stays_as_it_is() -> None:
    error = failed(Overloaded("full", reason="FULL"))
    with pytest.raises(grpc.aio.AioRpcError) as raised, naming_fields():
        raise error

    assert raised.value is error
