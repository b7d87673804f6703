"""The Watch messages of workers and KV stores, read as reports. Pure.

A message of many keys becomes several reports, so that whoever takes them in may do other
things in between. Each has a number of its own, but those of one snapshot: a gap in the
messages is one in the reports too, and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterator

from firsttoken.kvstore.v1 import kvstore_pb2
from firsttoken.worker.v1 import worker_pb2
from router.reports import EvictedEvent, LoadEvent, Report, SnapshotEvent, StoredEvent
from services.core.keys import KEY_BYTES

# About a millisecond's work for those that take them in.
SLICE_KEYS = 512


class Reading:
    """Of one stream, from its snapshot on."""

    def __init__(self) -> None:
        # Reports made so far beyond one a message.
        self._num_more = 0

    def of_worker(self, message: worker_pb2.WatchResponse) -> Iterator[Report]:
        """Nothing for an event that this version does not know."""
        kind = message.WhichOneof("event")
        keys, load, continues = b"", None, False
        match kind:
            case "snapshot":
                keys, continues = message.snapshot.prefix_keys, message.snapshot.continues
                load = None if continues else _load(message.snapshot.load)
            case "stored":
                keys = message.stored.prefix_keys
            case "evicted":
                keys = message.evicted.prefix_keys
            case "load":
                load = _load(message.load)
        return self._read(
            message.sequence, message.incarnation, kind, keys, load, continues=continues
        )

    def of_store(self, message: kvstore_pb2.WatchResponse) -> Iterator[Report]:
        kind = message.WhichOneof("event")
        keys = getattr(message, kind) if kind else b""
        return self._read(
            message.sequence, message.incarnation, kind, keys, None, continues=message.continues
        )

    def _read(
        self,
        sequence: int,
        incarnation: str,
        kind: str | None,
        keys: bytes,
        load: LoadEvent | None,
        *,
        continues: bool,
    ) -> Iterator[Report]:
        """Raises ValueError when `keys` is not whole keys."""
        if len(keys) % KEY_BYTES:
            raise ValueError(f"{kind}: {len(keys)} bytes are not whole keys of {KEY_BYTES}")
        sequence += self._num_more
        if kind == "load" and load is not None:
            yield Report(sequence, incarnation, load)
            return
        for start in range(0, max(len(keys), 1), SLICE_KEYS * KEY_BYTES):
            some = _split(keys, start)
            if kind == "snapshot":
                event = SnapshotEvent(
                    some, None if start else load, continues=continues or start > 0
                )
                yield Report(sequence, incarnation, event)
                continue
            if start:
                sequence += 1
                self._num_more += 1
            if kind == "stored":
                yield Report(sequence, incarnation, StoredEvent(some))
            elif kind == "evicted":
                yield Report(sequence, incarnation, EvictedEvent(some))


def _split(keys: bytes, start: int) -> tuple[bytes, ...]:
    end = min(start + SLICE_KEYS * KEY_BYTES, len(keys))
    return tuple(keys[at : at + KEY_BYTES] for at in range(start, end, KEY_BYTES))


def _load(load: worker_pb2.Load) -> LoadEvent:
    return LoadEvent(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_prompt_tokens=load.queued_prompt_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        num_blocks_reserved=load.num_blocks_reserved,
        num_blocks_total=load.num_blocks_total,
        prompt_tokens_evaluated=load.prompt_tokens_evaluated,
    )
