"""Chats against the ids of the reference implementations, through the service."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from firsttoken.common.v1.common_pb2 import Chat, ChatMessage, ToolCall
from firsttoken.tokenizer.v1.tokenizer_pb2 import EncodeRequest
from firsttoken.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from services.control.node import ControlNode
from services.core.config import parse
from services.runtime.channels import open_channel
from services.tokenizer.node import TokenizerNode

DATA = Path(__file__).resolve().parent.parent / "data"


def vectors(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


QWEN3 = vectors("chat_vectors_qwen3.jsonl.gz")
MISTRAL = vectors("chat_vectors_mistral_v3_tekken.jsonl.gz")


def message(row: dict[str, Any]) -> ChatMessage:
    calls = [
        ToolCall(
            id=call["id"],
            name=call["function"]["name"],
            arguments_json=call["function"]["arguments"],
        )
        for call in row.get("tool_calls", ())
    ]
    fields = {key: row[key] for key in ("content", "tool_call_id", "name") if key in row}
    return ChatMessage(role=row["role"], tool_calls=calls, **fields)


def chat(row: dict[str, Any]) -> Chat:
    tools = json.loads((DATA / row["tools"]).read_text(encoding="utf-8")) if row["tools"] else []
    made = Chat(
        messages=map(message, row["messages"]),
        tools_json=map(json.dumps, tools),
        add_generation_prompt=row.get("add_generation_prompt"),
    )
    if row.get("template_kwargs"):
        made.template_args_json = json.dumps(row["template_kwargs"])
    return made


@asynccontextmanager
async def tokenizer_of(model: Path, **settings: Any) -> AsyncIterator[TokenizerServiceStub]:
    config = parse({"mesh": {"model": str(model)}, "tokenizer": settings})
    async with (
        ControlNode(config=config) as control,
        TokenizerNode(control=control.address) as node,
        open_channel(node.address) as channel,
    ):
        yield TokenizerServiceStub(channel)


async def deviations(stub: TokenizerServiceStub, rows: Iterable[dict[str, Any]]) -> list[str]:
    """The cases in which the ids are others, and how."""
    found = []
    for row in rows:
        answer = await stub.Encode(EncodeRequest(chat=chat(row)))
        ids = np.frombuffer(answer.token_ids, "<u4").tolist()
        expected = row.get("ids") or row["ids_head"]
        if hashlib.sha256(answer.token_ids).hexdigest() != row["ids_sha256_u32le"]:
            found.append(f"{row['case']}: {ids[: len(expected)]} instead of {expected}")
    return found


def test_every_vector_is_asked_for() -> None:
    assert len(QWEN3) == 240
    assert len(MISTRAL) == 54
    assert sum("error" in row for row in MISTRAL) == 3
    assert {row.get("tool_call_arguments") for row in QWEN3} == {None, "parsed", "json_string"}


async def test_qwen3_chats_have_the_ids_of_the_reference(qwen3: Path) -> None:
    rows = [row for row in QWEN3 if row.get("tool_call_arguments") != "json_string"]

    async with tokenizer_of(qwen3) as stub:
        assert await deviations(stub, rows) == []
    assert len(rows) == 216


async def test_qwen3_chats_whose_arguments_are_text_have_the_ids_of_the_reference(
    qwen3: Path,
) -> None:
    rows = [row for row in QWEN3 if row.get("tool_call_arguments") == "json_string"]

    async with tokenizer_of(qwen3, tool_arguments="text") as stub:
        assert await deviations(stub, rows) == []
    assert len(rows) == 24


async def test_mistral_chats_have_the_ids_of_the_reference(tekken: Path) -> None:
    rows = [row for row in MISTRAL if "error" not in row]

    async with tokenizer_of(tekken) as stub:
        assert await deviations(stub, rows) == []
    assert len(rows) == 51


async def test_mistral_chats_that_the_reference_refuses_are_refused_with_its_reason(
    tekken: Path,
) -> None:
    async with tokenizer_of(tekken) as stub:
        for row in MISTRAL:
            if "error" not in row:
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Encode(EncodeRequest(chat=chat(row)))

            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            reason = row["error"].partition(": ")[2]
            assert caught.value.details() == f"chat: the model's encoder refuses it: {reason}"
