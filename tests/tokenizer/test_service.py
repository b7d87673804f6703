from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from typing import Any, NamedTuple

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from firsttoken.common.v1.common_pb2 import Chat, ChatMessage, ToolCall
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.tokenizer.v1 import tokenizer_pb2_grpc
from firsttoken.tokenizer.v1.tokenizer_pb2 import (
    DecodeRequest,
    EncodeRequest,
    GetInfoRequest,
)
from services.control.node import ControlNode
from services.core.config import parse
from services.core.keys import root_key, split_keys
from services.core.ledger import Ledger, Segment
from services.core.settings import MeshConfig, MeshSettings
from services.core.tokens import pack
from services.encoding.loading import load_encoder
from services.observer.node import ObserverNode
from services.runtime.channels import open_channel
from services.runtime.membership import ControlClient
from services.runtime.reporter import Reporter
from services.tokenizer.node import TokenizerNode
from services.tokenizer.service import Backend, _encode
from tests.runtime.collector import collecting

MODEL = "smollm2-135m-instruct"
HELLO = ChatMessage(role="user", content="Hello")


class Tokenizer(NamedTuple):
    stub: tokenizer_pb2_grpc.TokenizerServiceStub
    control: control_pb2_grpc.ControlServiceStub

    async def configure(self, key: str, value: str) -> None:
        """Change a setting and wait until the tokenizer has applied it."""
        answer = await self.control.SetConfig(control_pb2.SetConfigRequest(changes={key: value}))
        async with asyncio.timeout(10):
            while await self._generation() < answer.configuration.generation:
                await asyncio.sleep(0.01)

    async def _generation(self) -> int:
        answer = await self.control.ListMembers(control_pb2.ListMembersRequest())
        [member] = answer.members
        return member.generation


@asynccontextmanager
async def run_tokenizer(
    config: MeshConfig, *, with_observer: bool = False
) -> AsyncIterator[Tokenizer]:
    async with (
        ControlNode(config=config) as control,
        ObserverNode(control=control.address) if with_observer else nullcontext(),
        TokenizerNode(control=control.address) as node,
        open_channel(node.address) as channel,
        open_channel(control.address) as control_channel,
    ):
        yield Tokenizer(
            tokenizer_pb2_grpc.TokenizerServiceStub(channel),
            control_pb2_grpc.ControlServiceStub(control_channel),
        )


@pytest.fixture
async def tokenizer() -> AsyncIterator[Tokenizer]:
    async with run_tokenizer(MeshConfig()) as running:
        yield running


async def refusal(call: Awaitable[Any]) -> dict[str, str]:
    """The fields that an INVALID_ARGUMENT names."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(caught.value)
    request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(request) for detail in status.details)
    return {violation.field: violation.description for violation in request.field_violations}


async def test_text_chat_and_ids_of_one_prompt_give_one_answer(tokenizer: Tokenizer) -> None:
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    chat = Chat(messages=[ChatMessage(role="system", content="Be brief."), HELLO])
    by_text = await tokenizer.stub.Encode(EncodeRequest(text=text))
    by_chat = await tokenizer.stub.Encode(EncodeRequest(chat=chat, model=MODEL))
    by_ids = await tokenizer.stub.Encode(EncodeRequest(token_ids=by_text.token_ids))

    for answer in (by_chat, by_ids):
        assert answer.token_ids == by_text.token_ids
        assert answer.prefix_keys == by_text.prefix_keys


async def test_answer_has_the_chain_of_its_tenant_and_salt(tokenizer: Tokenizer) -> None:
    request = EncodeRequest(token_ids=pack(range(130)), tenant="a", cache_salt="b")
    answer = await tokenizer.stub.Encode(request)

    keys = split_keys(answer.prefix_keys)
    assert answer.block_tokens == 64
    assert len(keys) == 3
    assert keys[0] == root_key(model=MODEL, block_tokens=64, tenant="a", salt="b")


async def test_decode_gives_the_text_back(tokenizer: Tokenizer) -> None:
    text = "naïve 🙂<|im_end|>"
    ids = (await tokenizer.stub.Encode(EncodeRequest(text=text))).token_ids
    whole = await tokenizer.stub.Decode(DecodeRequest(token_ids=ids))
    plain = await tokenizer.stub.Decode(DecodeRequest(token_ids=ids, skip_special_tokens=True))

    assert whole.text == text
    assert plain.text == "naïve 🙂"


async def test_info_describes_the_model(tokenizer: Tokenizer) -> None:
    info = await tokenizer.stub.GetInfo(GetInfoRequest())

    assert (info.model, info.vocabulary_size, info.context_length) == (MODEL, 49152, 8192)
    assert (info.block_tokens, list(info.eos_token_ids), info.nfc) == (64, [2, 0], False)
    assert info.chat_template.startswith("{% for message in messages %}")


@pytest.mark.parametrize(
    ("request_", "field", "complaint"),
    [
        (EncodeRequest(), "input", "one of text, chat and token_ids"),
        (EncodeRequest(text=""), "text", "must not be empty"),
        (EncodeRequest(text="x" * 5_000_000), "text", "at most 1048576 bytes; got 5000000"),
        (EncodeRequest(token_ids=b""), "token_ids", "must not be empty"),
        (EncodeRequest(token_ids=b"abc"), "token_ids", "got 3 bytes"),
        (EncodeRequest(token_ids=pack([49152])), "token_ids", "below 49152"),
        (EncodeRequest(text="x", model="gpt"), "model", f"must be {MODEL}"),
        (EncodeRequest(chat=Chat()), "chat.messages", "must not be empty"),
        (
            EncodeRequest(chat=Chat(messages=[HELLO, HELLO, ChatMessage(content="x")])),
            "chat.messages[2].role",
            "must not be empty",
        ),
        (
            EncodeRequest(chat=Chat(messages=[HELLO], tools_json=["{}", "{"])),
            "chat.tools_json[1]",
            "must be JSON",
        ),
        (
            EncodeRequest(chat=Chat(messages=[HELLO], template_args_json='{"tools": 1}')),
            "chat.template_args_json",
            "must not set tools",
        ),
        (
            EncodeRequest(
                chat=Chat(messages=[ChatMessage(role="assistant", tool_calls=[ToolCall(name="f")])])
            ),
            "chat.messages[0].tool_calls[0].arguments_json",
            "must be JSON",
        ),
        (
            EncodeRequest(chat=Chat(messages=[HELLO, ChatMessage(role="user")])),
            "chat.messages[1].content",
            "must be there",
        ),
    ],
)
async def test_bad_request_names_field_and_bound(
    tokenizer: Tokenizer, request_: EncodeRequest, field: str, complaint: str
) -> None:
    fields = await refusal(tokenizer.stub.Encode(request_))

    assert list(fields) == [field]
    assert complaint in fields[field]


async def test_every_method_checks_the_model_and_ids(tokenizer: Tokenizer) -> None:
    assert "model" in await refusal(tokenizer.stub.Decode(DecodeRequest(model="gpt")))
    assert "model" in await refusal(tokenizer.stub.GetInfo(GetInfoRequest(model="gpt")))
    assert "token_ids" in await refusal(tokenizer.stub.Decode(DecodeRequest(token_ids=b"abc")))


async def test_what_is_too_long_to_be_sent_back_is_refused(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    word = (await tokenizer.stub.Encode(EncodeRequest(text=" international"))).token_ids
    decoded = await refusal(tokenizer.stub.Decode(DecodeRequest(token_ids=word * 1_300_000)))
    encoded = await refusal(tokenizer.stub.Encode(EncodeRequest(token_ids=word * 3_900_000)))

    assert len(word) == 4
    assert "16777216 at most" in decoded["token_ids"]
    assert "16777216 at most" in encoded["token_ids"]
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_settings_change_while_it_runs(tokenizer: Tokenizer) -> None:
    decomposed, composed = EncodeRequest(text="cafe\u0301"), EncodeRequest(text="caf\u00e9")
    before = await tokenizer.stub.Encode(decomposed)
    await tokenizer.configure("tokenizer.nfc", "true")
    after = await tokenizer.stub.Encode(decomposed)
    await tokenizer.configure("tokenizer.max_text_bytes", "4")

    expected = (await tokenizer.stub.Encode(EncodeRequest(token_ids=after.token_ids))).token_ids
    assert before.token_ids != after.token_ids == expected
    assert (await tokenizer.stub.GetInfo(GetInfoRequest())).nfc
    assert "at most 4 bytes" in (await refusal(tokenizer.stub.Encode(composed)))["text"]


async def test_injected_delay_is_part_of_encoding(tokenizer: Tokenizer) -> None:
    await tokenizer.configure("debug.delay_ms.tokenizer_encode", "200")
    answer = await tokenizer.stub.Encode(EncodeRequest(text="Hello"))

    # An event loop's timers may be a tick early.
    assert 195 <= answer.encode_ms <= answer.total_ms


async def test_long_text_leaves_the_event_loop_to_others(tokenizer: Tokenizer) -> None:
    text = "".join(f"The quick brown fox {number}. " for number in range(36_000))
    encoding = asyncio.ensure_future(tokenizer.stub.Encode(EncodeRequest(text=text)))
    for _ in range(5):
        await tokenizer.stub.GetInfo(GetInfoRequest())

    assert not encoding.done()
    assert len((await encoding).token_ids) > 4 * 100_000


@asynccontextmanager
async def run_with_one_busy_thread() -> AsyncIterator[tuple[Backend, threading.Event]]:
    """A backend whose only thread is taken until the event is set."""
    free = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(free.wait)
        member = control_pb2.Member(
            id="t", role=control_pb2.MEMBER_ROLE_TOKENIZER, address="127.0.0.1:1"
        )
        async with (
            ControlNode() as control,
            ControlClient(control.address, member) as client,
            Reporter(service="tokenizer", member_id="t") as reporter,
        ):
            try:
                yield Backend(load_encoder(MeshSettings()), threads, client, reporter), free
            finally:
                free.set()


async def test_waiting_for_a_thread_counts_as_encoding() -> None:
    async with run_with_one_busy_thread() as (backend, free):
        asyncio.get_running_loop().call_later(0.2, free.set)
        ledger = Ledger(time.monotonic())
        await _encode(backend, EncodeRequest(text="Hello"), ledger)

    assert ledger.spent_s(Segment.PREPROCESS) > 0.15


async def test_callers_that_leave_while_they_wait_cost_no_thread() -> None:
    ran: list[str] = []
    async with run_with_one_busy_thread() as (backend, free):
        calls = [asyncio.create_task(backend.run(lambda: ran.append("gone"))) for _ in range(3)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        free.set()
        await backend.run(lambda: ran.append("stayed"))

    assert ran == ["stayed"]


async def test_sampled_request_leaves_a_span_in_its_caller_s_trace() -> None:
    trace_id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with collecting() as collector:
        config = parse({"telemetry": {"otlp_endpoint": collector.endpoint}})
        async with run_tokenizer(config, with_observer=True) as tokenizer:
            for flags, request in (
                ("01", EncodeRequest(text="Hello")),
                ("00", EncodeRequest(text="unsampled")),
                ("01", EncodeRequest(text="")),
            ):
                call = tokenizer.stub.Encode(
                    request, metadata=(("traceparent", f"00-{trace_id}-{parent}-{flags}"),)
                )
                if request.text:
                    await call
                else:
                    await refusal(call)

    hops = [span for span in collector.spans if span.name == "tokenizer.encode"]
    segments = [span for span in collector.spans if span.name == "preprocess"]
    assert {span.trace_id.hex() for span in collector.spans} == {trace_id}
    assert [span.parent_span_id.hex() for span in hops] == [parent, parent]
    assert {span.parent_span_id for span in segments} == {span.span_id for span in hops}
    assert [span.status.message for span in hops] == ["", "text: must not be empty"]
