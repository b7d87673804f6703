"""One call at one worker, whose messages stay the bytes that they are."""

from __future__ import annotations

from typing import TypeAlias

import grpc

from firsttoken.common.v1 import common_pb2
from firsttoken.worker.v1 import worker_pb2
from router.peers import Hop, answer_of
from services.core.tokens import BYTES_PER_TOKEN

WorkerMethod: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[worker_pb2.GenerateRequest, bytes]"
WorkerCall: TypeAlias = "grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, bytes]"

METHOD = "/firsttoken.worker.v1.WorkerService/Generate"

_LENGTH_DELIMITED = 2
# A message is exactly one field of its oneof, so its first byte tells which.
_FINISHED_TAG = worker_pb2.GenerateResponse.FINISHED_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_TOKEN_IDS_TAG = common_pb2.Chunk.TOKEN_IDS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


def open_call(
    channel: grpc.aio.Channel, request: worker_pb2.GenerateRequest, hop: Hop
) -> WorkerCall:
    """Cancel it in the end, whatever happened: that frees the worker's slot."""
    generate: WorkerMethod = channel.unary_stream(
        METHOD, request_serializer=worker_pb2.GenerateRequest.SerializeToString
    )
    return generate(request, timeout=hop.time_remaining(), metadata=hop.metadata)


async def next_message(call: WorkerCall) -> bytes | None:
    """None at the end of the stream; errors as `answer_of`."""
    message = await answer_of(call.read())
    return message if isinstance(message, bytes) else None


def is_finished(message: bytes) -> bool:
    """Is it `finished`, and not a chunk?"""
    return message[0] == _FINISHED_TAG


def count_tokens(message: bytes) -> int:
    """The ids in a chunk: its first field, read off the wire without parsing the rest."""
    _, start = _read_varint(message, 1)
    if start == len(message) or message[start] != _TOKEN_IDS_TAG:
        return 0
    num_bytes, _ = _read_varint(message, start + 1)
    return num_bytes // BYTES_PER_TOKEN


def _read_varint(message: bytes, start: int) -> tuple[int, int]:
    """The number at `start`, and where it ends."""
    value = shift = 0
    for position in range(start, len(message)):
        byte = message[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    raise ValueError("the message ends within a number")
