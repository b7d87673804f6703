"""Two simulated engines, and KV that goes from one to the other by itself."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from services.core.config import parse
from services.core.tokens import TokenArray
from worker.engines import open_engine
from worker.engines.contract import (
    DisaggregatedParams,
    Engine,
    KvTransport,
    TransferEnded,
    Work,
)

BLOCK_TOKENS = 8
PROMPT: TokenArray = np.arange(100, 137, dtype=np.uint32)  # four blocks and a part


TOKEN_BYTES = 16 << 10


def new_engine(*, gb_per_s: float = 20.0, engine_transport: bool = True) -> Engine:
    simulated = {
        "kv_bytes_per_token": TOKEN_BYTES,
        "prefill_tokens_per_s": 1e9,
        "decode_step_ms": 0,
        "transfer_gb_per_s": gb_per_s,
        "engine_transport": engine_transport,
    }
    worker = {"engine": "simulated", "num_slots": 2, "simulated": simulated}
    config = parse({"mesh": {"block_tokens": BLOCK_TOKENS}, "worker": worker})
    return open_engine(config, cores_shared_by=1)


class Pair(NamedTuple):
    prefill: Engine
    decode: Engine


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(new_engine(), new_engine())
    yield pair
    for engine in pair:
        engine.close()


def transport(engine: Engine) -> KvTransport:
    assert engine.transport is not None
    return engine.transport


def feed(engine: Engine, slot: int, start: int = 0, end: int = len(PROMPT)) -> bytes:
    return engine.evaluate([Work(slot, start, PROMPT[start:end], True)]).tobytes()


def ended(engine: Engine) -> list[TransferEnded]:
    """Waits for a transfer."""
    deadline_s = time.monotonic() + 30
    while not (found := transport(engine).ended()):
        assert time.monotonic() < deadline_s, "waited for a transfer in vain"
        time.sleep(0.001)
    return found


def next_logits(engine: Engine, slot: int) -> bytes:
    return engine.evaluate([Work(slot, len(PROMPT), PROMPT[:1], True)]).tobytes()


def test_fetched_kv_stands_for_computing(pair: Pair) -> None:
    feed(pair.prefill, 0)
    params = transport(pair.prefill).offer(0, 0, 7)
    transport(pair.decode).fetch(1, params)

    assert ended(pair.decode) == [TransferEnded(1, "")]
    assert ended(pair.prefill) == [TransferEnded(0, "")]
    assert next_logits(pair.decode, 1) == next_logits(pair.prefill, 0)
    assert (params.request_type, params.first_gen_tokens) == ("context_only", [7])


def test_only_what_is_missing_is_fetched(pair: Pair) -> None:
    feed(pair.prefill, 0)
    feed(pair.decode, 0, end=2 * BLOCK_TOKENS)
    params = transport(pair.prefill).offer(0, 2, 7)
    transport(pair.decode).fetch(0, params)

    assert ended(pair.decode) == [TransferEnded(0, "")]
    assert len(json.loads(params.opaque_state or b"")[3]) == 3
    assert next_logits(pair.decode, 0) == next_logits(pair.prefill, 0)


def test_kv_that_does_not_follow_is_refused(pair: Pair) -> None:
    feed(pair.prefill, 0)
    feed(pair.decode, 0, end=BLOCK_TOKENS)
    transport(pair.decode).fetch(0, transport(pair.prefill).offer(0, 2, 7))
    [done] = ended(pair.decode)

    assert "does not follow" in done.error


def test_kv_moves_at_the_speed_of_the_link_while_steps_go_on() -> None:
    prefill, decode = new_engine(gb_per_s=0.001), new_engine()
    feed(prefill, 0)
    began_s = time.monotonic()
    transport(decode).fetch(0, transport(prefill).offer(0, 0, 7))
    feed(prefill, 1)
    stepped_s = time.monotonic() - began_s
    ended(decode)
    moved_s = time.monotonic() - began_s
    prefill.close()
    decode.close()

    assert moved_s >= len(PROMPT) * TOKEN_BYTES / 1e6 > stepped_s


@pytest.mark.parametrize(
    "changes",
    [
        {"ctx_request_id": 999},
        {"ctx_request_id": None},
        {"opaque_state": b""},
        {"opaque_state": b"[1, 2]"},
        {"opaque_state": None},
    ],
)
def test_an_unknown_handle_is_refused(pair: Pair, changes: dict[str, object]) -> None:
    feed(pair.prefill, 0)
    params = transport(pair.prefill).offer(0, 0, 7)
    transport(pair.decode).fetch(0, dataclasses.replace(params, **changes))  # type: ignore[arg-type]
    [done] = ended(pair.decode)

    assert done.error
    assert transport(pair.prefill).ended() == []
    assert feed(pair.decode, 0) == feed(pair.decode, 1)


def test_a_handle_without_its_secret_is_refused(pair: Pair) -> None:
    feed(pair.prefill, 0)
    params = transport(pair.prefill).offer(0, 0, 7)
    address, _, *rest = json.loads(params.opaque_state or b"")
    forged = json.dumps([address, "0" * 32, *rest]).encode()
    transport(pair.decode).fetch(0, dataclasses.replace(params, opaque_state=forged))
    [done] = ended(pair.decode)

    assert "not known there" in done.error


def test_a_handle_is_fetched_once(pair: Pair) -> None:
    feed(pair.prefill, 0)
    params = transport(pair.prefill).offer(0, 0, 7)
    transport(pair.decode).fetch(0, params)
    ended(pair.decode)
    ended(pair.prefill)
    transport(pair.decode).fetch(1, params)
    [done] = ended(pair.decode)

    assert "not known there" in done.error


def test_an_offer_that_is_given_up_cannot_be_fetched(pair: Pair) -> None:
    feed(pair.prefill, 0)
    params = transport(pair.prefill).offer(0, 0, 7)
    transport(pair.prefill).give_up(0)
    pair.prefill.clear(0)
    transport(pair.decode).fetch(0, params)
    [done] = ended(pair.decode)

    assert "not known there" in done.error


def test_an_offer_that_is_given_up_on_the_way_does_not_arrive() -> None:
    prefill, decode = new_engine(gb_per_s=0.001), new_engine()
    feed(prefill, 0)
    transport(decode).fetch(0, transport(prefill).offer(0, 0, 7))
    time.sleep(0.2)
    transport(prefill).give_up(0)
    [done] = ended(decode)
    prefill.close()
    decode.close()

    assert done.error


def test_a_fetch_that_is_given_up_leaves_the_slot_as_it_was() -> None:
    prefill, decode = new_engine(gb_per_s=0.001), new_engine()
    feed(prefill, 0)
    feed(decode, 0, end=BLOCK_TOKENS)
    transport(decode).fetch(0, transport(prefill).offer(0, 1, 7))
    transport(decode).give_up(0)
    time.sleep(1.0)  # longer than it would take

    assert transport(decode).ended() == []
    assert feed(decode, 0, start=BLOCK_TOKENS) == feed(decode, 1)
    prefill.close()
    decode.close()


def test_an_engine_that_is_gone_is_said_so(pair: Pair) -> None:
    feed(pair.prefill, 0)
    params = transport(pair.prefill).offer(0, 0, 7)
    pair.prefill.close()
    transport(pair.decode).fetch(0, params)
    [done] = ended(pair.decode)

    assert done.error


def test_strangers_are_ignored(pair: Pair) -> None:
    feed(pair.prefill, 0)
    params = transport(pair.prefill).offer(0, 0, 7)
    host, _, port = json.loads(params.opaque_state or b"")[0].rpartition(":")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"{}\n", b"x" * 5000):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
    transport(pair.decode).fetch(0, params)

    assert ended(pair.decode) == [TransferEnded(0, "")]


def test_engines_of_one_host_have_one_kind(pair: Pair) -> None:
    kinds = {engine.info.transport for engine in pair}

    assert len(kinds) == 1
    assert kinds.pop().startswith("simulated:")


def test_an_engine_offers_nothing_unless_it_is_told_to() -> None:
    engine = new_engine(engine_transport=False)

    assert (engine.transport, engine.info.transport) == (None, "")
    engine.close()


def test_absent_parameters_are_refused(pair: Pair) -> None:
    transport(pair.decode).fetch(0, DisaggregatedParams())
    [done] = ended(pair.decode)

    assert done.error
