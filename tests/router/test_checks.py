from __future__ import annotations

import math
from typing import Any

import pytest

from firsttoken.common.v1 import common_pb2
from firsttoken.router.v1 import inference_pb2
from router.admission import RequestClass
from router.checks import Bounds, Checked, check_length, check_request, text_head
from services.core.errors import InvalidArgument, PermissionDenied
from services.core.settings import TenantSettings
from services.core.tenants import Tenant
from services.core.tokens import pack

BOUNDS = Bounds(model="small", max_context_tokens=32, max_text_bytes=100)


def make_request(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**fields)


def make_chat(*contents: str, role: str = "user") -> common_pb2.Chat:
    return common_pb2.Chat(
        messages=[common_pb2.ChatMessage(role=role, content=content) for content in contents]
    )


def broken_fields(
    request: inference_pb2.GenerateRequest, metadata: tuple[tuple[str, str], ...] = ()
) -> dict[str, str]:
    with pytest.raises(InvalidArgument) as refusal:
        check_request(request, metadata, BOUNDS)
    return dict(refusal.value.violations)


@pytest.mark.parametrize(
    ("request_", "checked"),
    [
        (make_request(text="hi"), Checked("text", "", "", RequestClass.INTERACTIVE)),
        (
            make_request(chat=make_chat("hi"), request_class=common_pb2.REQUEST_CLASS_BATCH),
            Checked("chat", "", "", RequestClass.BATCH),
        ),
        (
            make_request(token_ids=pack([1, 2]), model="small"),
            Checked("token_ids", "", "", RequestClass.INTERACTIVE),
        ),
    ],
)
def test_accepts_every_form_of_a_prompt(
    request_: inference_pb2.GenerateRequest, checked: Checked
) -> None:
    assert check_request(request_, (), BOUNDS) == checked


def test_reads_the_tenant_from_metadata() -> None:
    checked = check_request(make_request(text="hi"), [("firsttoken-tenant", "acme")], BOUNDS)

    assert checked.tenant == checked.cache_tenant == "acme"


def make_caller(**settings: Any) -> Tenant:
    return Tenant("acme", TenantSettings(**settings))


def test_a_known_caller_is_its_tenant_and_its_salt_parts_its_cache() -> None:
    checked = check_request(make_request(text="hi"), (), BOUNDS, make_caller(salt="a/b c"))

    assert (checked.tenant, checked.cache_tenant) == ("acme", "acme/a/b c")


@pytest.mark.parametrize(
    ("max_class", "asked", "got"),
    [
        ("interactive", common_pb2.REQUEST_CLASS_UNSPECIFIED, RequestClass.INTERACTIVE),
        ("interactive", common_pb2.REQUEST_CLASS_BATCH, RequestClass.BATCH),
        ("batch", common_pb2.REQUEST_CLASS_UNSPECIFIED, RequestClass.BATCH),
        ("batch", common_pb2.REQUEST_CLASS_BATCH, RequestClass.BATCH),
    ],
)
def test_a_class_is_at_most_the_tenants(
    max_class: str, asked: common_pb2.RequestClass.ValueType, got: RequestClass
) -> None:
    request = make_request(text="hi", request_class=asked)

    assert check_request(request, (), BOUNDS, make_caller(max_class=max_class)).request_class is got


def test_refuses_the_class_that_its_tenant_may_not_ask_for() -> None:
    request = make_request(text="hi", request_class=common_pb2.REQUEST_CLASS_INTERACTIVE)
    with pytest.raises(
        PermissionDenied, match=r"request_class.*tenants\.acme\.max_class"
    ) as refusal:
        check_request(request, (), BOUNDS, make_caller(max_class="batch"))

    assert refusal.value.reason == "CLASS_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        (make_request(), "input", "one of text, chat, token_ids"),
        (make_request(text=""), "text", "must not be empty"),
        (make_request(text="x" * 101), "text", "at most 100 bytes; got 101"),
        (make_request(text="é" * 51), "text", "at most 100 bytes; got 102"),
        (make_request(chat=make_chat()), "chat.messages", "must not be empty"),
        (make_request(chat=make_chat("x" * 200)), "chat", "at most 100 bytes"),
        (
            make_request(chat=make_chat("hi", role="")),
            "chat.messages[0].role",
            "must not be empty",
        ),
        (make_request(token_ids=b""), "token_ids", "must not be empty"),
        (make_request(token_ids=b"12345"), "token_ids", "4 bytes each; got 5 bytes"),
        (make_request(token_ids=pack([1] * 32)), "token_ids", "at most 31 tokens.*32.*got 32"),
        (make_request(text="hi", model="big"), "model", "must be 'small'.*got 'big'"),
        (
            make_request(text="hi", sampling=common_pb2.SamplingParams(max_tokens=0)),
            "sampling.max_tokens",
            r"in \[1, 32\]; got 0",
        ),
        (
            make_request(text="hi", sampling=common_pb2.SamplingParams(max_tokens=33)),
            "sampling.max_tokens",
            r"in \[1, 32\]; got 33",
        ),
        (
            make_request(text="hi", sampling=common_pb2.SamplingParams(temperature=math.nan)),
            "sampling.temperature",
            r"in \[0, 100\]; got nan",
        ),
        (make_request(text="hi", cache_salt="s" * 257), "cache_salt", "at most 256.*got 257"),
        (make_request(text="hi", request_class=7), "request_class", "got 7"),
    ],
)
def test_names_the_broken_field_its_bound_and_what_it_got(
    request_: inference_pb2.GenerateRequest, field: str, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said) as refusal:
        check_request(request_, (), BOUNDS)

    assert [violation.field for violation in refusal.value.violations] == [field]


def test_names_all_broken_fields_at_once() -> None:
    request = make_request(
        model="big",
        text="",
        sampling=common_pb2.SamplingParams(max_tokens=0, top_p=2),
        request_class=9,
    )

    assert set(broken_fields(request, (("firsttoken-tenant", "x" * 200),))) == {
        "model",
        "text",
        "sampling.max_tokens",
        "sampling.top_p",
        "metadata.firsttoken-tenant",
        "request_class",
    }


def test_leaves_the_model_to_others_while_it_is_unknown() -> None:
    check_request(make_request(text="hi", model="big"), (), BOUNDS._replace(model=""))


def test_accepts_the_longest_prompt_that_leaves_room_for_a_token() -> None:
    check_request(make_request(token_ids=pack([1] * 31)), (), BOUNDS)
    check_length("text", 31, 32)
    with pytest.raises(InvalidArgument, match=r"text: .* at most 31 tokens.*got 32"):
        check_length("text", 32, 32)


@pytest.mark.parametrize(
    ("request_", "head"),
    [
        (make_request(text="héllo"), "héllo".encode()[:4]),
        (make_request(text="hi"), b"hi"),
        (make_request(chat=make_chat("ab", "", "cde")), b"abcd"),
        (make_request(chat=make_chat("äß", "", "öüé")), "äßöü".encode()),
        (make_request(token_ids=pack([258, 1])), bytes([2, 1, 0, 0])),
    ],
)
def test_takes_the_first_bytes_of_what_was_said_and_of_a_chat_characters(
    request_: inference_pb2.GenerateRequest, head: bytes
) -> None:
    assert text_head(request_, 4) == head
