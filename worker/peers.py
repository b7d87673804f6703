"""The memory of other workers on this host."""

from __future__ import annotations

import json

from services.runtime.sharing import SharedMemory, open_shared
from worker.arena import ArenaLayout, outbox_of
from worker.engines.contract import Bytes

# Peers whose memory stays mapped; those that are gone leave room for others.
MAX_PEERS = 64


def describe(layout: ArenaLayout) -> bytes:
    return json.dumps(layout._asdict()).encode()


class PeerMemory:
    """Maps each peer's memory once. `close` it when no array from it is in use."""

    def __init__(self) -> None:
        self._mapped: dict[str, SharedMemory] = {}

    async def outbox(self, socket_name: str) -> Bytes | None:
        """Shape (num_outbox, block_bytes), read-only; None when it is not on this host."""
        if not socket_name:
            return None
        memory = self._mapped.get(socket_name)
        if memory is None:
            try:
                memory = await open_shared(socket_name, writable=False)
            except OSError:
                return None
            self._remember(socket_name, memory)
        return outbox_of(memory.array, ArenaLayout(**json.loads(memory.description)))

    def close(self) -> None:
        for memory in self._mapped.values():
            memory.close()
        self._mapped.clear()

    def _remember(self, socket_name: str, memory: SharedMemory) -> None:
        while len(self._mapped) >= MAX_PEERS:
            self._mapped.pop(next(iter(self._mapped))).close()
        self._mapped[socket_name] = memory
