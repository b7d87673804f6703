"""One call at one worker, whose messages stay the bytes that they are."""

from __future__ import annotations

import random
from typing import TypeAlias

import grpc

from firsttoken.router.v1 import inference_pb2
from firsttoken.worker.v1 import worker_pb2
from router.checks import Checked, class_to_proto
from router.peers import Hop, answer_of
from router.prompt import Prompt

WorkerMethod: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[worker_pb2.GenerateRequest, bytes]"
WorkerCall: TypeAlias = "grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, bytes]"

METHOD = "/firsttoken.worker.v1.WorkerService/Generate"

_LENGTH_DELIMITED = 2
# A message is exactly one field of its oneof, so its first byte tells which.
_FINISHED_TAG = worker_pb2.GenerateResponse.FINISHED_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


def make_request(
    request: inference_pb2.GenerateRequest, prompt: Prompt, checked: Checked
) -> worker_pb2.GenerateRequest:
    """For every worker that is tried, whether it begins the answer or goes on with it."""
    made = worker_pb2.GenerateRequest(
        model=request.model,
        token_ids=prompt.token_ids,
        prefix_keys=prompt.prefix_keys,
        sampling=request.sampling,
        # Not as it was asked for: a tenant may have less.
        request_class=class_to_proto(checked.request_class),
        tenant=checked.tenant,
    )
    if made.sampling.temperature > 0 and not made.sampling.HasField("seed"):
        # Each worker would draw its own, and none could go on with another's answer.
        made.sampling.seed = random.getrandbits(64)
    return made


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
