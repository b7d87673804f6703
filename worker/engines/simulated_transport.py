"""KV from one simulated engine to another, as GPUs move it: by themselves, beside their steps.

An offer names where it can be fetched, and a secret; whoever fetches connects there. A
block takes as long as a link of `bytes_per_s` needs for it. Real bytes go through a real
socket, of this host alone: the kind says which.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from services.core.kvblocks import checksum
from worker.engines.contract import Bytes, DisaggregatedParams, EngineFailure, TransferEnded

CONNECT_TIMEOUT_S = 5.0
# Longer than any block takes; a peer that is silent for so long is gone.
SILENCE_TIMEOUT_S = 60.0
SECRET_BYTES = 16
_REFUSED, _GRANTED = b"-", b"+"


def kind_here() -> str:
    """Equal for all engines of this host, until it restarts."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    host = boot_id.read_text().strip() if boot_id.exists() else socket.gethostname()
    return f"simulated:{host}"


class _State(NamedTuple):
    """What `opaque_state` says, beside the request's id."""

    address: str
    secret: str
    first_block: int
    # Of each block.
    num_bytes: list[int]
    checksums: list[str]


@dataclass(slots=True, eq=False)
class _Transfer:
    """One slot's. `connection`: while bytes flow."""

    slot: int
    connection: socket.socket | None = None
    given_up: bool = False

    def give_up(self) -> None:
        self.given_up = True
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True, eq=False)
class _Offer(_Transfer):
    request_id: int = 0
    secret: str = ""
    blocks: Sequence[Bytes] = ()


class _Fetched(NamedTuple):
    first_block: int
    blocks: list[Bytes]


class SimulatedTransport:
    """A KvTransport. `held`: what a slot holds; `add`: adds blocks, from one on, to that.

    `add` may raise EngineFailure. Threads move the bytes; the slots themselves are touched
    by the engine's own thread alone.
    """

    def __init__(
        self,
        *,
        bytes_per_s: float,
        held: Callable[[int], Sequence[Bytes]],
        add: Callable[[int, int, Sequence[Bytes]], None],
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._held = held
        self._add = add
        self._transfers: dict[int, _Transfer] = {}
        self._offers: dict[int, _Offer] = {}
        self._next_id = 1
        self._ended: SimpleQueue[tuple[_Transfer, str, _Fetched | None]] = SimpleQueue()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._serve, name="simulated link", daemon=True).start()

    def offer(self, slot: int, first: int, first_token: int) -> DisaggregatedParams:
        blocks = self._held(slot)[first:]
        offer = _Offer(
            slot,
            request_id=self._next_id,
            secret=secrets.token_hex(SECRET_BYTES),
            blocks=blocks,
        )
        self._next_id += 1
        self._offers[offer.request_id] = self._transfers[slot] = offer
        state = _State(
            self._address,
            offer.secret,
            first,
            [len(block) for block in blocks],
            [checksum(block).hex() for block in blocks],
        )
        return DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[first_token],
            ctx_request_id=offer.request_id,
            opaque_state=json.dumps(state).encode(),
        )

    def fetch(self, slot: int, params: DisaggregatedParams) -> None:
        transfer = self._transfers[slot] = _Transfer(slot)
        threading.Thread(
            target=self._fetch, args=(transfer, params), name="simulated fetch", daemon=True
        ).start()

    def ended(self) -> list[TransferEnded]:
        ended = []
        while not self._ended.empty():
            transfer, error, fetched = self._ended.get()
            if self._transfers.get(transfer.slot) is not transfer:
                continue  # given up meanwhile
            del self._transfers[transfer.slot]
            if fetched is not None:
                try:
                    self._add(transfer.slot, *fetched)
                except EngineFailure as failure:
                    error = str(failure)
            ended.append(TransferEnded(transfer.slot, error))
        return ended

    def give_up(self, slot: int) -> None:
        transfer = self._transfers.pop(slot, None)
        if transfer is not None:
            transfer.give_up()
        if isinstance(transfer, _Offer):
            self._offers.pop(transfer.request_id, None)

    def close(self) -> None:
        self._listener.close()
        for slot in list(self._transfers):
            self.give_up(slot)

    # The other engine asks.

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._give, args=(connection,), name="simulated send", daemon=True
                ).start()

    def _give(self, connection: socket.socket) -> None:
        # Whatever else a stranger may send.
        with connection, contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            connection.settimeout(SILENCE_TIMEOUT_S)
            asked = json.loads(_read_line(connection))
            offer = self._offers.get(asked["request_id"])
            if offer is None or not secrets.compare_digest(offer.secret, asked["secret"]):
                connection.sendall(_REFUSED)
                return
            offer.connection = connection
            connection.sendall(_GRANTED)
            for block in self._at_speed(offer.blocks):
                if offer.given_up:
                    return
                connection.sendall(block.data)
            if connection.recv(1) == _GRANTED:  # it has them
                self._offers.pop(offer.request_id, None)
                self._ended.put((offer, "", None))

    def _at_speed(self, blocks: Sequence[Bytes]) -> Iterator[Bytes]:
        due_s = time.monotonic()
        for block in blocks:
            due_s += len(block) / self._bytes_per_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            yield block

    # Asking another engine.

    def _fetch(self, transfer: _Transfer, params: DisaggregatedParams) -> None:
        fetched, error = None, ""
        try:
            fetched = self._receive(transfer, params)
        except (OSError, ValueError, TypeError) as problem:
            error = str(problem) or type(problem).__name__
        self._ended.put((transfer, error, fetched))

    def _receive(self, transfer: _Transfer, params: DisaggregatedParams) -> _Fetched:
        """Raises OSError, ValueError or TypeError."""
        state = _State(*json.loads(params.opaque_state or b"null"))
        host, _, port = state.address.rpartition(":")
        with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as connection:
            transfer.connection = connection
            connection.settimeout(SILENCE_TIMEOUT_S)
            asked = {"request_id": params.ctx_request_id, "secret": state.secret}
            connection.sendall(json.dumps(asked).encode() + b"\n")
            if connection.recv(1) != _GRANTED:
                raise ConnectionError(f"request {params.ctx_request_id} is not known there")
            blocks = [_read_block(connection, num_bytes) for num_bytes in state.num_bytes]
            if [checksum(block).hex() for block in blocks] != state.checksums:
                raise ConnectionError("what came does not verify")
            connection.sendall(_GRANTED)
        return _Fetched(state.first_block, blocks)


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < 1024:
        more = connection.recv(256)
        if not more:
            raise ConnectionError("the other engine is gone")
        line += more
    return line


def _read_block(connection: socket.socket, num_bytes: int) -> Bytes:
    block = np.empty(num_bytes, np.uint8)
    view = block.data
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other engine is gone")
        view = view[count:]
    return block
