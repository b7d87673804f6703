"""The adapter's core over the double, with this test as its front."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from services.core import config as mesh_config
from services.core.keys import extend_keys, root_key
from services.core.sampling import Sampling
from services.core.tokens import pack
from tests.runtime.waiting import eventually
from tests.worker.trtllm import double
from worker.engines.contract import DisaggregatedParams, EngineInfo
from worker.front_link import FrontLink
from worker.messages import (
    Cancel,
    Command,
    Compute,
    Fetch,
    FirstToken,
    LoadingEnded,
    Source,
    StepReport,
    Submit,
    Taken,
    to_token,
)

BLOCK_TOKENS = 16
EOS = 2
INFO = EngineInfo(
    name=double.VERSION,
    model="test",
    fingerprint=b"f",
    vocabulary_size=2000,
    eos_token_ids=(EOS, 3),
    num_slots=2,
    max_context_tokens=256,
    block_tokens=BLOCK_TOKENS,
    block_bytes=BLOCK_TOKENS,
    num_blocks=64,
    kv_in_pool=False,
    transport="tensorrt_llm:nixl",
    kv_readable=False,
    hears_of_fetch=False,
)


class Bench:
    """A core, its double, and all that it has reported."""

    def __init__(self, **engine: Any) -> None:
        self.config = mesh_config.parse(
            {
                "mesh": {"block_tokens": BLOCK_TOKENS},
                "worker": {
                    "engine": "tensorrt_llm",
                    "num_slots": 2,
                    "max_context_tokens": 256,
                    "tensorrt_llm": {"tokens_per_block": 8, "transport": "nixl", **engine},
                },
            }
        )
        self.reports: list[StepReport] = []
        self.task: asyncio.Future[None]
        self._ids = itertools.count(1)

    async def open(self) -> None:
        from worker.engines.trtllm.config import build_llm
        from worker.engines.trtllm.core import TensorRtCore
        from worker.engines.trtllm.link import AsyncLink
        from worker.roles import Role

        llm: Any = await asyncio.to_thread(build_llm, self.config, "none", role=Role.BOTH)
        self.llm: double.LLM = llm
        ours, theirs = socket.socketpair()
        self._theirs = AsyncLink(theirs)
        await self._theirs.__aenter__()
        self._front = FrontLink(ours)
        await self._front.__aenter__()
        self.core = TensorRtCore(llm, INFO, self.config, self._theirs)
        self.task = asyncio.ensure_future(self.core.run())
        self._reading = asyncio.ensure_future(self._read())

    async def close(self) -> None:
        for task in (self.task, self._reading):
            task.cancel()
        await asyncio.gather(self.task, self._reading, return_exceptions=True)
        for each in self.llm._tasks:
            each.cancel()
        await asyncio.gather(*self.llm._tasks, return_exceptions=True)
        self._front._writer.close()
        self._theirs._writer.close()
        await asyncio.sleep(0)

    async def _read(self) -> None:
        while True:
            report = await self._front.receive()
            assert isinstance(report, StepReport)
            self.reports.append(report)

    def send(self, command: Command) -> None:
        self._front.send(command)

    def submit(self, ids: list[int], *, max_tokens: int = 4, salt: str = "", **more: Any) -> int:
        request_id = next(self._ids)
        token_ids = np.array(ids, np.uint32)
        root = root_key(model="test", block_tokens=BLOCK_TOKENS, salt=salt)
        keys = (root, *extend_keys(root, pack(token_ids), BLOCK_TOKENS))
        sampling = Sampling(max_tokens=max_tokens, seed=7, **more.pop("sampling", {}))
        self.send(Submit(request_id, token_ids, keys, sampling, False, time.monotonic(), **more))
        return request_id

    def said(self, request_id: int) -> list[Any]:
        tokens = (to_token(each) for report in self.reports for each in report.tokens)
        return [token for token in tokens if token.request_id == request_id]

    def transfers(self, request_id: int) -> list[str]:
        done = (each for report in self.reports for each in report.transfers)
        return [error for each, error in done if each == request_id]

    def failed(self, request_id: int) -> list[str]:
        lost = (each for report in self.reports for each in report.failed)
        return [each.error for each in lost if each.request_id == request_id]

    def is_released(self, request_id: int) -> bool:
        return any(request_id in report.released for report in self.reports)

    def started(self, request_id: int) -> list[int]:
        started = (each for report in self.reports for each in report.started)
        return [each.num_cached_blocks for each in started if each.request_id == request_id]

    async def released(self, request_id: int) -> list[Any]:
        await eventually(lambda: self.is_released(request_id), f"request {request_id}")
        return self.said(request_id)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.open()
    yield bench
    await bench.close()


def prompt(name: int, length: int = 40) -> list[int]:
    ids: list[int] = np.random.default_rng(name).integers(100, 1000, length).tolist()
    return ids


async def test_each_token_is_said_once_though_the_engine_says_all_so_far(bench: Bench) -> None:
    tokens = await bench.released(bench.submit(prompt(1), max_tokens=6))

    assert [token.finish for token in tokens] == ["", "", "", "", "", "length"]
    assert tokens[0].first is not None
    assert all(token.first is None for token in tokens[1:])
    assert bench.llm.sampling[-1].top_k == 1  # temperature 0


async def test_a_stop_id_that_the_engine_cuts_ends_the_answer_and_is_not_part_of_it(
    bench: Bench,
) -> None:
    ids = [*prompt(2), double.ENDING]
    tokens = await bench.released(bench.submit(ids, max_tokens=6))

    assert [(token.token_id, token.finish) for token in tokens] == [(EOS, "stop")]
    assert bench.llm.sampling[-1].stop_token_ids == [2, 3]  # every EOS
    assert bench.llm.sampling[-1].stop is None


async def test_callers_share_kv_only_where_their_keys_do(bench: Bench) -> None:
    for salt in ("a", "a", "b"):
        await bench.released(bench.submit(prompt(3), salt=salt))
    salts = [each["salt"] for each in bench.llm.asked]

    assert salts[0] == salts[1] != salts[2]
    assert len({id(each) for each in bench.llm.sampling}) == 3  # fresh for each


async def test_what_the_engine_holds_is_known_to_who_asks_for_it(bench: Bench) -> None:
    await bench.released(bench.submit(prompt(4)))
    await eventually(lambda: any(report.stored for report in bench.reports), "events")
    held = bench.submit(prompt(4), source=Source.HOLD)
    await eventually(lambda: bench.started(held) == [2], "both whole blocks")
    bench.send(Compute(held))

    assert len(await bench.released(held)) == 4


async def offer(bench: Bench, ids: list[int]) -> tuple[int, Any]:
    context = bench.submit(ids, export_from=0, offer=True)
    await eventually(lambda: bench.said(context), "a first token")
    return context, bench.said(context)[0]


async def fetch(
    bench: Bench, ids: list[int], first: Any, params: DisaggregatedParams, max_tokens: int = 4
) -> int:
    taker = bench.submit(ids, max_tokens=max_tokens, source=Source.HOLD)
    await eventually(lambda: bench.started(taker), "a place")
    bench.send(FirstToken(taker, first.token_id))
    bench.send(Fetch(taker, params))
    return taker


async def test_a_prompt_is_handed_over_and_held_until_it_is_taken(bench: Bench) -> None:
    context, first = await offer(bench, prompt(5))
    taker = await fetch(bench, prompt(5), first, first.params)
    tokens = await bench.released(taker)
    whole = await bench.released(bench.submit(prompt(5)))

    assert not bench.is_released(context)
    bench.send(Taken(context))
    await bench.released(context)
    assert bench.transfers(taker) == bench.transfers(context) == [""]
    assert [t.token_id for t in [first, *tokens]] == [t.token_id for t in whole]
    assert [each["kind"] for each in bench.llm.asked][:2] == ["context_only", "generation_only"]


async def test_kv_that_nobody_took_counts_until_it_is_gone(bench: Bench) -> None:
    for name in range(2):
        context, _ = await offer(bench, prompt(10 + name))
        bench.send(Cancel(context))
        await bench.released(context)
    assert bench.core._admission.num_orphans == 2
    waiting = bench.submit(prompt(20), export_from=0, offer=True)
    await asyncio.sleep(0.05)
    assert not bench.started(waiting)

    bench.llm.used_blocks = 0
    for _ in range(2):
        bench.llm._add_stats()
    await eventually(lambda: bench.started(waiting), "room for one more")
    bench.send(Cancel(waiting))


async def test_a_decode_leg_is_not_aborted_before_its_first_token(bench: Bench) -> None:
    _, first = await offer(bench, prompt(6))
    taker = await fetch(bench, prompt(6), first, first.params, max_tokens=100)
    await eventually(lambda: bench.llm.asked[-1]["kind"] == "generation_only")
    bench.send(Cancel(taker))
    await bench.released(taker)

    assert not bench.llm.wedged
    assert not bench.said(taker)


async def test_a_transfer_that_does_not_come_is_left_and_the_prompt_computed(
    bench: Bench,
) -> None:
    whole = await bench.released(bench.submit(prompt(7)))
    _, first = await offer(bench, prompt(7))
    gone = first.params.__class__(
        request_type="context_only",
        first_gen_tokens=[first.token_id],
        ctx_request_id=1,
        opaque_state=b"/nonexistent/kv",
    )
    taker = await fetch(bench, prompt(7), first, gone)
    await eventually(lambda: bench.llm.asked[-1]["kind"] == "generation_only")
    bench.send(LoadingEnded(taker))  # the front's deadline
    tokens = await bench.released(taker)

    assert [t.token_id for t in [first, *tokens]] == [t.token_id for t in whole]
    assert not bench.llm.wedged


async def test_a_transfer_given_up_at_once_is_not_begun(bench: Bench) -> None:
    _, first = await offer(bench, prompt(7))
    taker = await fetch(bench, prompt(7), first, first.params)
    bench.send(LoadingEnded(taker))
    await bench.released(taker)

    assert [each["kind"] for each in bench.llm.asked] == ["context_only", None]


async def test_a_transfer_that_the_engine_refuses_ends_and_the_prompt_is_computed(
    bench: Bench,
) -> None:
    _, first = await offer(bench, prompt(7))
    bench.llm.keywords["enable_chunked_prefill"] = False
    bench.llm.keywords["max_num_tokens"] = 20
    taker = await fetch(bench, prompt(7), first, first.params)
    await eventually(lambda: bench.transfers(taker), "an end")
    bench.llm.keywords["enable_chunked_prefill"] = True
    bench.send(LoadingEnded(taker))

    assert "above max_num_tokens" in bench.transfers(taker)[0]
    assert len(await bench.released(taker)) == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"request_type": "generation_only"}, "request_type"),
        ({"ctx_request_id": None}, "ctx_request_id"),
        ({"opaque_state": b""}, "opaque_state"),
        ({"first_gen_tokens": [1]}, "first_gen_tokens"),
        ({"ctx_dp_rank": 0}, "ctx_dp_rank: not known"),
    ],
)
async def test_params_that_could_stall_the_engine_are_not_given_to_it(
    change: dict[str, Any], error: str
) -> None:
    from worker.engines.trtllm import disaggregation

    values: dict[str, Any] = {
        "request_type": "context_only",
        "first_gen_tokens": [9],
        "ctx_request_id": 1,
        "opaque_state": b"s",
        "draft_tokens": [4],
    }
    good = disaggregation.generation_only(DisaggregatedParams(**values), first_token=9)
    assert (good.request_type, good.draft_tokens) == ("generation_only", [4])
    with pytest.raises(disaggregation.BadParams, match=error):
        disaggregation.generation_only(DisaggregatedParams(**{**values, **change}), first_token=9)


async def test_a_request_that_the_engine_refuses_ends_alone(bench: Bench) -> None:
    bench.llm.keywords["enable_chunked_prefill"] = False
    bench.llm.keywords["max_num_tokens"] = 20
    refused = bench.submit(prompt(8))
    await bench.released(refused)

    assert "above max_num_tokens" in bench.failed(refused)[0]
    assert len(await bench.released(bench.submit(prompt(8, 10)))) == 4


async def test_kv_as_bytes_is_refused(bench: Bench) -> None:
    refused = bench.submit(prompt(8), export_from=0, export_credit=1)
    await bench.released(refused)

    assert bench.failed(refused)


async def test_no_more_requests_are_in_the_engine_than_slots(bench: Bench) -> None:
    requests = [bench.submit(prompt(30 + name), max_tokens=30) for name in range(5)]
    for each in requests:
        await bench.released(each)

    assert max(report.load.num_running for report in bench.reports) == 2
    assert bench.reports[-1].load.num_waiting == 0


async def test_an_executor_that_is_gone_ends_the_core(bench: Bench) -> None:
    from worker.engines.trtllm.vigil import EngineStalled

    bench.llm.dead = True
    bench.submit(prompt(9))
    with pytest.raises(EngineStalled, match="the executor is gone"):
        await bench.task


async def test_an_engine_that_says_nothing_ends_the_core() -> None:
    from worker.engines.trtllm.vigil import EngineStalled

    bench = Bench(probe_interval_s=0.1, stall_timeout_s=1)
    await bench.open()
    bench.llm.wedged = True
    bench.submit(prompt(9))
    with pytest.raises(EngineStalled, match="has said nothing for 1 s"):
        await bench.task
    await bench.close()
