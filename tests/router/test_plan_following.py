"""What a router tells a worker of its plans, before there is a stream."""

from __future__ import annotations

from typing import Any

from firsttoken.worker.v1 import worker_pb2
from router.plan_following import MAX_OUTBOX_BYTES, Direct, Following, _Stream
from router.plans import Plans
from services.runtime.channels import MAX_MESSAGE_BYTES


def test_head_starts_fit_into_one_message() -> None:
    """However many prompts, and however long, are planned while a worker does not read."""
    nothing: Any = None
    stream = _Stream(Following(Plans(), nothing, "router"), Direct("worker", "", ""))
    for _ in range(7):
        stream.begin(worker_pb2.HeadStart(call=bytes(MAX_OUTBOX_BYTES // 3)))
    stream.withdraw(b"withdrawn all the same")

    assert len(stream._outbox.head_starts) == 3
    assert stream._outbox.withdrawn == [b"withdrawn all the same"]
    assert stream._outbox.ByteSize() < MAX_MESSAGE_BYTES
