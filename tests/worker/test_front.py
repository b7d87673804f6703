"""The front with a real engine core behind it: another process, simulated engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.core import config as mesh_config
from services.core.config import Snapshot
from services.core.errors import Overloaded, Unavailable
from services.core.keys import extend_keys, root_key
from services.core.ledger import Segment
from services.core.sampling import Sampling
from services.core.settings import MeshConfig
from services.core.tokens import pack
from services.runtime.startup import StartupError
from worker.front import EngineFront
from worker.messages import Token
from worker.requests import Prompt
from worker.stream import TokenStream

BLOCK_TOKENS = 16
CONFIG = mesh_config.parse(
    {
        "mesh": {"block_tokens": BLOCK_TOKENS},
        "worker": {
            "engine": "simulated",
            "num_slots": 4,
            "max_context_tokens": 256,
            "max_waiting": 4,
            "simulated": {
                "prefill_tokens_per_s": 20000,
                "decode_step_ms": 1,
                "num_blocks": 48,
                "kv_bytes_per_token": 16,
            },
        },
    }
)


@pytest.fixture
async def front() -> AsyncIterator[EngineFront]:
    async with EngineFront(CONFIG, cores_shared_by=1) as front:
        yield front
        assert front.num_streams == 0


def prompt(name: int, length: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(name).integers(100, 1000, length).astype(np.uint32)


def keys_of(token_ids: npt.NDArray[np.uint32]) -> tuple[bytes, ...]:
    root = root_key(model="test", block_tokens=BLOCK_TOKENS)
    return (root, *extend_keys(root, pack(token_ids), BLOCK_TOKENS))


def asked(
    token_ids: npt.NDArray[np.uint32],
    sampling: Sampling,
    prefix_keys: tuple[bytes, ...] | None = None,
) -> Prompt:
    return Prompt(
        token_ids=token_ids,
        prefix_keys=keys_of(token_ids) if prefix_keys is None else prefix_keys,
        sampling=sampling,
        batch_class=False,
        answer_ids=(),
    )


async def read(stream: TokenStream) -> list[Token]:
    tokens: list[Token] = []
    while not tokens or not tokens[-1].finish:
        tokens += (await stream.next()).tokens
    return tokens


async def generate(
    front: EngineFront, token_ids: npt.NDArray[np.uint32], max_tokens: int = 8
) -> list[Token]:
    sampling = Sampling(max_tokens=max_tokens, seed=1)
    with front.submit(asked(token_ids, sampling)) as stream:
        return await read(stream)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def idle(front: EngineFront) -> None:
    await until(lambda: front.num_held == 0 and front.hub.load.num_running == 0)


def core_pid(front: EngineFront) -> int:
    (pid,) = [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit() and _is_core_of(os.getpid(), int(entry))
    ]
    return pid


def _is_core_of(parent: int, pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as command:
            fields = stat.read().rpartition(")")[2].split()
            return int(fields[1]) == parent and "worker.core" in command.read()
    except OSError:
        return False


async def test_a_request_gets_as_many_tokens_as_it_asked_for(front: EngineFront) -> None:
    tokens = await generate(front, prompt(1, 50), max_tokens=8)

    assert [token.finish for token in tokens] == [""] * 7 + ["length"]
    assert tokens[0].first is not None
    assert all(token.first is None for token in tokens[1:])


async def test_requests_together_get_the_same_tokens_as_alone(front: EngineFront) -> None:
    prompts = [prompt(name, 20 + 7 * name) for name in range(8)]
    alone = [await generate(front, token_ids) for token_ids in prompts]

    together = await asyncio.gather(*(generate(front, token_ids) for token_ids in prompts))

    def ids(answers: list[list[Token]]) -> list[list[int]]:
        return [[token.token_id for token in answer] for answer in answers]

    assert ids(list(together)) == ids(alone)


async def test_a_second_prompt_evaluates_only_what_the_first_did_not(front: EngineFront) -> None:
    first = prompt(1, 70)
    second = np.concatenate([first[:64], prompt(2, 10)])
    await generate(front, first)
    await idle(front)
    evaluated_before = front.hub.load.prompt_tokens_evaluated

    times = (await generate(front, second))[0].first
    await idle(front)

    assert times is not None
    assert times.cached_tokens == 64
    assert times.evaluated_prompt_tokens == 10
    assert front.hub.load.prompt_tokens_evaluated - evaluated_before == 10


async def test_a_prompt_that_is_cached_whole_still_evaluates_its_last_block(
    front: EngineFront,
) -> None:
    token_ids = prompt(1, 4 * BLOCK_TOKENS)
    await generate(front, token_ids)

    times = (await generate(front, token_ids))[0].first

    assert times is not None
    assert times.cached_tokens == 3 * BLOCK_TOKENS


async def test_the_answer_is_reused_as_part_of_the_next_prompt(front: EngineFront) -> None:
    token_ids = prompt(1, 30)
    answer = [token.token_id for token in await generate(front, token_ids, max_tokens=40)]
    longer = np.concatenate([token_ids, np.array(answer, np.uint32), prompt(3, 5)])

    times = (await generate(front, longer))[0].first

    assert times is not None
    assert times.cached_tokens == 64  # 30 + 40 tokens, the last without KV: four full blocks


async def test_other_keys_share_nothing(front: EngineFront) -> None:
    token_ids = prompt(1, 50)
    await generate(front, token_ids)
    root = root_key(model="test", block_tokens=BLOCK_TOKENS, tenant="other")
    keys = (root, *extend_keys(root, pack(token_ids), BLOCK_TOKENS))
    with front.submit(asked(token_ids, Sampling(max_tokens=1, seed=1), keys)) as stream:
        times = (await read(stream))[0].first

    assert times is not None
    assert times.cached_tokens == 0


async def test_cached_blocks_yield_to_running_requests_and_the_answers_stay_the_same(
    front: EngineFront,
) -> None:
    prompts = [prompt(name, 200) for name in range(8)]  # 13 of 48 blocks each while running
    first = [[token.token_id for token in await generate(front, item)] for item in prompts]
    await idle(front)
    load = front.hub.load

    again = await asyncio.gather(*(generate(front, item) for item in prompts))

    assert load.num_blocks_cached + load.num_blocks_reserved <= load.num_blocks_total == 48
    assert [[token.token_id for token in answer] for answer in again] == first


async def test_the_hub_knows_exactly_which_blocks_are_cached(front: EngineFront) -> None:
    for name in range(12):
        await generate(front, prompt(name, 100))
    await idle(front)
    await until(lambda: len(front.hub.snapshot().prefix_keys) == front.hub.load.num_blocks_cached)

    assert set(keys_of(prompt(11, 100))[1:]) <= set(front.hub.snapshot().prefix_keys)


async def test_leaving_at_any_moment_frees_everything(front: EngineFront) -> None:
    sampling = Sampling(max_tokens=100, seed=1)
    random = np.random.default_rng(0)
    for wait_s in random.uniform(0, 0.03, 40):
        token_ids = prompt(int(wait_s * 1e6), 150)
        with (
            front.submit(asked(token_ids, sampling)) as stream,
            pytest.raises(TimeoutError),
        ):
            async with asyncio.timeout(wait_s):
                await read(stream)
    await idle(front)

    load = front.hub.load
    assert (load.num_running, load.num_waiting, load.num_blocks_reserved) == (0, 0, 0)


async def test_the_load_tells_of_a_prompt_while_it_is_computed() -> None:
    slow = mesh_config.change(CONFIG, {"worker.max_step_ms": 20.0})
    timing = replace(slow.worker.simulated, prefill_tokens_per_s=200.0)
    slow = replace(slow, worker=replace(slow.worker, simulated=timing))
    async with EngineFront(slow, cores_shared_by=1) as front:
        with front.submit(asked(prompt(1, 200), Sampling(max_tokens=1, seed=1))) as stream:
            await until(lambda: front.hub.load.prompt_tokens_evaluated > 0)
            load = front.hub.load
            tokens = await read(stream)
        await idle(front)

    assert (load.num_running, load.num_blocks_reserved) == (1, 13)
    assert load.prompt_tokens_evaluated < 200
    assert load.prompt_tokens_evaluated + load.queued_prompt_tokens == 200
    assert len(tokens) == 1


def overlapping(**simulated: Any) -> MeshConfig:
    timing = replace(CONFIG.worker.simulated, decode_overlap=True, **simulated)
    return replace(CONFIG, worker=replace(CONFIG.worker, simulated=timing))


async def test_with_overlap_a_prompt_does_not_wait_for_a_decode_step() -> None:
    config = overlapping(decode_step_ms=4000.0)
    async with EngineFront(config, cores_shared_by=1) as front:
        sampling = Sampling(max_tokens=9, seed=1)
        with front.submit(asked(prompt(1, 50), sampling)) as stream:
            first = await stream.next()
            for name in range(2, 9):
                await generate(front, prompt(name, 50), max_tokens=1)

            assert len(first.tokens) == 1
            assert front.hub.load.decode_tokens_evaluated == 0
            await stream.next()
        await idle(front)
        assert front.hub.load.num_blocks_reserved == 0


async def test_with_overlap_a_prompt_does_not_lengthen_decode_steps() -> None:
    config = overlapping(prefill_tokens_per_s=50.0)
    async with EngineFront(config, cores_shared_by=1) as front:
        sampling = Sampling(max_tokens=40, seed=1)
        with front.submit(asked(prompt(1, 4), sampling)) as short:
            await short.next()
            with front.submit(asked(prompt(2, 240), sampling)):
                await read(short)
                load = front.hub.load
        await idle(front)

    # At 8 tokens a step and more, 39 steps after each other would have computed all of it.
    assert load.decode_tokens_evaluated == 39
    assert load.prompt_tokens_evaluated < 4 + 200


async def test_answers_are_the_same_with_overlap(front: EngineFront) -> None:
    prompts = [prompt(name, 20 + 30 * name) for name in range(6)]
    expected = [[token.token_id for token in await generate(front, item)] for item in prompts]
    async with EngineFront(overlapping(), cores_shared_by=1) as other:
        answers = await asyncio.gather(*(generate(other, item) for item in prompts))
        await idle(other)

        assert other.hub.load.num_blocks_reserved == 0
    assert [[token.token_id for token in answer] for answer in answers] == expected


async def test_leaving_in_the_midst_of_overlapping_steps_frees_everything() -> None:
    async with EngineFront(overlapping(decode_step_ms=20.0), cores_shared_by=1) as front:
        for name in range(12):
            with front.submit(asked(prompt(name, 150), Sampling(max_tokens=100, seed=1))) as stream:
                if name % 2:
                    await stream.next()
                await asyncio.sleep(0.002 * (name % 3))
        await idle(front)
        load = front.hub.load

    assert (load.num_waiting, load.num_blocks_reserved) == (0, 0)


async def test_more_requests_than_may_wait_are_refused(front: EngineFront) -> None:
    sampling = Sampling(max_tokens=200, seed=1)
    contexts = [front.submit(asked(prompt(name, 50), sampling, ())) for name in range(9)]
    for context in contexts[:8]:
        context.__enter__()

    with pytest.raises(Overloaded, match="max_waiting"):
        contexts[8].__enter__()
    for context in contexts[:8]:
        context.__exit__(None, None, None)
    await idle(front)


async def test_a_core_that_is_killed_fails_its_requests_and_is_replaced(front: EngineFront) -> None:
    states: list[bool] = []
    front.on_core(states.append)
    incarnation = front.hub.snapshot().incarnation
    sampling = Sampling(max_tokens=200, seed=1)
    with front.submit(asked(prompt(1, 50), sampling, ())) as stream:
        await stream.next()
        os.kill(core_pid(front), signal.SIGKILL)
        with pytest.raises(Unavailable, match="engine core died"):
            await read(stream)
    assert front.num_held == 0
    with (
        pytest.raises(Unavailable, match="restarting"),
        front.submit(asked(prompt(1, 50), sampling, ())),
    ):
        pass

    await until(lambda: states == [False, True])

    assert front.hub.snapshot().incarnation != incarnation
    assert len(await generate(front, prompt(1, 50))) == 8


async def test_tokens_before_a_death_are_delivered_before_its_error() -> None:
    stream = TokenStream(1, lambda command: None)
    stream.push(Token(1, 7, "", None, None))
    stream.fail(Unavailable("gone"))

    assert [token.token_id for token in (await stream.next()).tokens] == [7]
    with pytest.raises(Unavailable):
        await stream.next()


async def test_settings_reach_the_running_core(front: EngineFront) -> None:
    slower = mesh_config.change(CONFIG, {"debug.delay_ms.worker_prefill": 50.0})
    front.configure(Snapshot(2, slower))

    times = (await generate(front, prompt(1, 20)))[0].first

    assert times is not None
    assert times.spent_s[Segment.PREFILL] >= 0.05


async def test_a_password_in_the_configuration_is_on_no_command_line() -> None:
    secret = mesh_config.parse({"kvstore": {"redis_url": "redis://:s3cret@127.0.0.1:1"}}).kvstore
    async with EngineFront(replace(CONFIG, kvstore=secret), cores_shared_by=1) as front:
        command = Path(f"/proc/{core_pid(front)}/cmdline").read_bytes()

    assert b"worker.core" in command
    assert b"s3cret" not in command


async def test_an_engine_that_cannot_start_is_a_startup_error() -> None:
    config = mesh_config.parse({"mesh": {"model": "no-such-model"}})

    with pytest.raises(StartupError, match="no-such-model"):
        async with EngineFront(config, cores_shared_by=1):
            pass


async def test_leaving_the_front_ends_the_core() -> None:
    async with EngineFront(CONFIG, cores_shared_by=1) as front:
        pid = core_pid(front)

    assert not os.path.exists(f"/proc/{pid}")
