from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from firsttoken.tokenizer.v1.tokenizer_pb2 import EncodeRequest
from services.core.errors import InvalidArgument
from services.core.settings import MeshSettings, TokenizerSettings
from services.encoding.encoder import Encoder
from services.encoding.loading import load_encoder
from services.encoding.on_loop import LoopEncoder, Pace, effort

SETTINGS = TokenizerSettings()


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder(MeshSettings())


@pytest.fixture
def busy_threads() -> Iterator[ThreadPoolExecutor]:
    """Whatever is handed to them waits."""
    free = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(free.wait)
        yield threads
        free.set()


async def test_short_prompts_and_those_seen_before_wait_for_no_thread(
    encoder: Encoder, busy_threads: ThreadPoolExecutor
) -> None:
    long = EncodeRequest(text="one two three " * 500)
    by_threads = encoder.encode(long.text, tenant="", cache_salt="", settings=SETTINGS)
    on_loop = LoopEncoder(encoder, busy_threads)

    assert (await on_loop.encode(EncodeRequest(text="Hello"), SETTINGS)).token_ids
    assert (await on_loop.encode(long, SETTINGS)).token_ids == by_threads.token_ids


async def test_much_that_is_new_leaves_the_loop_to_others(
    encoder: Encoder, busy_threads: ThreadPoolExecutor
) -> None:
    text = "".join(f"new {number} " for number in range(500))
    encoding = asyncio.ensure_future(
        LoopEncoder(encoder, busy_threads).encode(EncodeRequest(text=text), SETTINGS)
    )
    done, _ = await asyncio.wait([encoding], timeout=0.05)
    encoding.cancel()

    assert not done


async def test_what_a_model_does_not_serve_is_refused(encoder: Encoder) -> None:
    with ThreadPoolExecutor(1) as threads:
        on_loop = LoopEncoder(encoder, threads)
        with pytest.raises(InvalidArgument, match="model: must be smollm2-135m-instruct"):
            await on_loop.encode(EncodeRequest(text="Hi", model="other"), SETTINGS)
        with pytest.raises(InvalidArgument, match="input: must be one of"):
            await on_loop.encode(EncodeRequest(), SETTINGS)


def test_pace_is_learnt_from_what_work_costs() -> None:
    pace = Pace(1e-6, max_s=1e-3)
    num_units = 500
    assert pace.is_quick(num_units)
    pace.learn(num_units, 10.0)  # a single one that was held up
    assert pace.is_quick(num_units)
    for _ in range(20):
        pace.learn(num_units, num_units * 4e-6)
    assert not pace.is_quick(num_units)
    for _ in range(40):
        pace.learn(num_units, num_units * 1e-6)
    assert pace.is_quick(num_units)


def test_effort_goes_by_what_becomes_tokens() -> None:
    prose, code = "and then it was found ", "x1=[0,1];y2=(3)\n"
    assert 4 < effort([prose]) < 10 < effort([code])
    assert effort([prose, prose]) == 2 * effort([prose])
    assert effort(["\u5317\u4eac"]) < 2
    assert effort([]) == 0
    assert effort([prose * 1000]) == effort(None) > 1e6
