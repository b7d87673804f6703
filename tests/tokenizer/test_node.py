from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path

import pytest

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.tokenizer.v1 import tokenizer_pb2_grpc
from firsttoken.tokenizer.v1.tokenizer_pb2 import EncodeRequest
from services.control.node import ControlNode
from services.core.config import parse
from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel
from services.runtime.startup import StartupError
from services.tokenizer.node import TokenizerNode


async def members(control: ControlNode) -> list[control_pb2.Member]:
    async with open_channel(control.address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return list((await stub.ListMembers(control_pb2.ListMembersRequest())).members)


async def member_in_state(
    control: ControlNode, state: control_pb2.MemberState.ValueType
) -> control_pb2.Member:
    async with asyncio.timeout(10):
        while True:
            for member in await members(control):
                if member.state == state:
                    return member
            await asyncio.sleep(0.01)


async def nobody_left(control: ControlNode) -> None:
    async with asyncio.timeout(10):
        while await members(control):
            await asyncio.sleep(0.01)


def encode_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("encode")]


async def encode(address: str) -> bytes:
    async with open_channel(address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        return (await stub.Encode(EncodeRequest(text="Hello"))).token_ids


async def test_it_joins_the_mesh_and_leaves_it() -> None:
    async with ControlNode() as control:
        async with TokenizerNode(control=control.address) as node:
            member = await member_in_state(control, control_pb2.MEMBER_STATE_READY)
            ids = await encode(node.address)
        await node.close()
        await nobody_left(control)

    assert ids
    assert (member.id, member.address, member.model) == (
        node.id,
        node.address,
        "smollm2-135m-instruct",
    )
    assert member.role == control_pb2.MEMBER_ROLE_TOKENIZER
    assert encode_threads() == []


async def test_port_in_use_is_one_readable_line() -> None:
    async with (
        ControlNode() as control,
        TokenizerNode(control=control.address) as first,
    ):
        with pytest.raises(StartupError, match=f"cannot listen on {first.address}"):
            await TokenizerNode(control=control.address, listen=first.address).__aenter__()


@pytest.mark.parametrize("cancel_after_s", [0.0, 0.01, 0.05, 0.1, 0.2])
async def test_start_that_is_cancelled_leaves_nothing(cancel_after_s: float) -> None:
    async with ControlNode() as control:
        node = TokenizerNode(control=control.address)
        starting = asyncio.create_task(node.__aenter__())
        await asyncio.wait({starting}, timeout=cancel_after_s)
        if starting.cancel():
            await asyncio.wait({starting})
        await node.close()
        await nobody_left(control)

    assert encode_threads() == []


async def test_missing_model_is_named() -> None:
    async with ControlNode(config=parse({"mesh": {"model": "gone.gguf"}})) as control:
        with pytest.raises(InvalidArgument, match=r"mesh\.model: no such file: gone\.gguf"):
            await TokenizerNode(control=control.address).__aenter__()
        await nobody_left(control)


async def test_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")

    async with ControlNode(config=parse({"mesh": {"model": str(path)}})) as control:
        with pytest.raises(StartupError, match=r"cannot load the model broken: .*ends early"):
            await TokenizerNode(control=control.address).__aenter__()


async def start_process(control: ControlNode, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.tokenizer", "--control", control.address, *arguments),
        stderr=asyncio.subprocess.PIPE,
    )


async def test_process_serves_until_it_is_told_to_stop() -> None:
    async with ControlNode(config=MeshConfig()) as control:
        process = await start_process(control)
        member = await member_in_state(control, control_pb2.MEMBER_STATE_READY)
        ids = await encode(member.address)
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()

    assert ids
    assert process.returncode == 0
    assert f"tokenizer listening on {member.address}" in errors.decode()


async def test_process_that_cannot_start_says_why_in_its_last_line() -> None:
    async with ControlNode(config=parse({"mesh": {"model": "gone.gguf"}})) as control:
        process = await start_process(control)
        _, errors = await process.communicate()

    assert process.returncode == 3
    assert errors.decode().splitlines()[-1] == "tokenizer: mesh.model: no such file: gone.gguf"
