from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from router.fleet import Worker
from router.knowledge import Knowledge
from router.prompt import Prompt
from router.strategies import (
    LeastOutstanding,
    PrefixAware,
    Random,
    RoundRobin,
    Strategy,
    make_strategy,
)
from services.core.keys import extend_keys, join_keys, root_key
from services.core.settings import ROUTING_STRATEGIES, MeshConfig, RouterSettings
from services.core.tokens import pack
from tests.router.fleets import make_fleet, make_worker

BLOCK_TOKENS = 16


def choose(strategy: Strategy, workers: Sequence[Worker], prompt: Prompt) -> Worker:
    choice = strategy.choose(workers, prompt, 0.0)
    assert choice.num_candidates == len(workers)
    assert choice.reason
    return choice.worker


def make_prompt(*token_ids: int, tenant: str = "", text: bytes = b"") -> Prompt:
    packed = pack(token_ids)
    root = root_key(model="m", block_tokens=BLOCK_TOKENS, tenant=tenant)
    keys = join_keys([root, *extend_keys(root, packed, BLOCK_TOKENS)])
    return Prompt(packed, keys, BLOCK_TOKENS, text)


def prefix_aware(
    *, prefix_length: int = 32, prefix_length_bytes: int = 0, concurrency_threshold: int = 4
) -> PrefixAware:
    return PrefixAware(
        prefix_length=prefix_length,
        prefix_length_bytes=prefix_length_bytes,
        concurrency_threshold=concurrency_threshold,
    )


def name(worker: Worker) -> str:
    return worker.announced.id


ANY = make_prompt(*range(40))
PROMPTS = [make_prompt(*range(start, start + 40)) for start in range(300)]


@pytest.mark.parametrize("strategy", ROUTING_STRATEGIES)
def test_makes_every_configured_strategy(strategy: str) -> None:
    workers = [make_worker("a"), make_worker("b", in_flight=7)]
    config = MeshConfig(router=RouterSettings(routing_strategy=strategy))
    knowledge = Knowledge(100)
    knowledge.update_workers(workers)
    chosen = choose(make_strategy(config, knowledge), workers, ANY)

    assert chosen in workers


def test_round_robin_takes_turns_however_the_candidates_change() -> None:
    fleet = make_fleet("a", "b", "c", num_slots=1)
    strategy, chosen = RoundRobin(), []
    busy = fleet.take(fleet.workers[1])
    for _ in range(3):
        with fleet.take(choose(strategy, fleet.candidates(0.0), ANY)) as slot:
            chosen.append(name(slot.worker))
    busy.release()
    for _ in range(3):
        with fleet.take(choose(strategy, fleet.candidates(0.0), ANY)) as slot:
            chosen.append(name(slot.worker))

    assert "".join(chosen) == "acabca"


def test_random_spreads_and_repeats_by_its_seed() -> None:
    workers = [make_worker(each) for each in "abc"]
    first, again = Random(seed=7), Random(seed=7)
    chosen = [choose(first, workers, ANY) for _ in range(300)]

    assert chosen == [choose(again, workers, ANY) for _ in range(300)]
    assert min(Counter(map(name, chosen)).values()) > 70


def test_least_outstanding_takes_the_least_busy() -> None:
    workers = [make_worker("a", in_flight=2), make_worker("b", in_flight=1)]

    assert name(choose(LeastOutstanding(), workers, ANY)) == "b"


def test_least_outstanding_takes_turns_among_equals() -> None:
    fleet = make_fleet("a", "b", "c")
    chosen = []
    for _ in range(6):
        with fleet.take(choose(LeastOutstanding(), fleet.candidates(0.0), ANY)) as slot:
            chosen.append(name(slot.worker))

    assert "".join(chosen) == "abcabc"


def test_prompts_that_begin_alike_go_to_the_same_worker() -> None:
    workers = [make_worker(each) for each in "abcd"]
    strategy = prefix_aware(prefix_length=32)
    beginning = range(32)
    chosen = {
        name(choose(strategy, workers, make_prompt(*beginning, *range(1000, 1000 + more))))
        for more in range(60)
    }

    assert len(chosen) == 1


def test_different_beginnings_spread_over_the_workers() -> None:
    workers = [make_worker(each) for each in "abcd"]
    counts = Counter(name(choose(prefix_aware(), workers, each)) for each in PROMPTS)

    assert min(counts.values()) > len(PROMPTS) / 8


def test_a_worker_that_leaves_moves_only_its_own_prompts() -> None:
    strategy = prefix_aware()
    workers = [make_worker(each) for each in "abcd"]
    before = [name(choose(strategy, workers, each)) for each in PROMPTS]
    after = [name(choose(strategy, workers[:3], each)) for each in PROMPTS]

    assert all(new == old for old, new in zip(before, after, strict=True) if old != "d")


def test_affinity_survives_a_restart_at_the_same_address() -> None:
    strategy = prefix_aware()
    others = [make_worker("b"), make_worker("c")]
    old = [make_worker("a-1", address="host:7001"), *others]
    new = [*others, make_worker("a-2", address="host:7001")]
    address = [choose(strategy, old, each).announced.address for each in PROMPTS]

    assert address == [choose(strategy, new, each).announced.address for each in PROMPTS]


def test_over_the_threshold_takes_the_next_choice_not_the_least_busy() -> None:
    strategy = prefix_aware(concurrency_threshold=3)
    workers = [make_worker(each) for each in "abc"]
    preferred = choose(strategy, workers, ANY)
    preferred.in_flight = 3
    second = choose(strategy, workers, ANY)
    second.in_flight = 2  # busier than the third, and below the threshold

    assert second is not preferred
    assert choose(strategy, workers, ANY) is second


def test_with_all_over_the_threshold_takes_the_least_busy() -> None:
    workers = [make_worker("a", in_flight=6), make_worker("b", in_flight=5)]

    assert name(choose(prefix_aware(concurrency_threshold=3), workers, ANY)) == "b"


@pytest.mark.parametrize("strategy", [prefix_aware(), prefix_aware(prefix_length_bytes=8)])
def test_tenants_do_not_share_a_fingerprint(strategy: PrefixAware) -> None:
    ids = range(40)

    assert strategy.fingerprint(make_prompt(*ids, tenant="x", text=b"text")) != (
        strategy.fingerprint(make_prompt(*ids, tenant="y", text=b"text"))
    )


def test_counts_the_prefix_in_whole_blocks() -> None:
    strategy = prefix_aware(prefix_length=40)  # two blocks of 16

    assert strategy.fingerprint(make_prompt(*range(32), 7)) == (
        strategy.fingerprint(make_prompt(*range(32), 8))
    )
    assert strategy.fingerprint(make_prompt(*range(31), 7, 9)) != (
        strategy.fingerprint(make_prompt(*range(32), 9))
    )


def test_a_prompt_shorter_than_the_prefix_counts_its_own_whole_blocks() -> None:
    strategy = prefix_aware(prefix_length=1024)

    assert strategy.fingerprint(make_prompt(*range(16), 7)) == (
        strategy.fingerprint(make_prompt(*range(16), 8, 9))
    )


def test_tells_prompts_shorter_than_a_block_apart() -> None:
    strategy = prefix_aware()

    assert strategy.fingerprint(make_prompt(1, 2)) == strategy.fingerprint(make_prompt(1, 2))
    assert strategy.fingerprint(make_prompt(1, 2)) != strategy.fingerprint(make_prompt(1, 3))


def test_a_prefix_shorter_than_a_block_counts_tokens() -> None:
    strategy = prefix_aware(prefix_length=8)

    assert strategy.fingerprint(make_prompt(*range(8), *range(50, 80))) == (
        strategy.fingerprint(make_prompt(*range(8), *range(90, 99)))
    )
    assert strategy.fingerprint(make_prompt(*range(1, 40))) != (
        strategy.fingerprint(make_prompt(*range(40)))
    )


def test_a_prefix_in_bytes_looks_at_the_text_alone() -> None:
    strategy = prefix_aware(prefix_length_bytes=4)

    assert strategy.fingerprint(make_prompt(1, 2, text=b"Once")) == (
        strategy.fingerprint(make_prompt(*range(40), text=b"Once"))
    )
    assert strategy.fingerprint(make_prompt(1, 2, text=b"Once")) != (
        strategy.fingerprint(make_prompt(1, 2, text=b"once"))
    )


@pytest.mark.parametrize(
    "strategy",
    [RoundRobin(), Random(1), LeastOutstanding(), prefix_aware(concurrency_threshold=1)],
    ids=lambda strategy: type(strategy).__name__,
)
def test_chooses_only_among_the_candidates(strategy: Strategy) -> None:
    fleet = make_fleet("a", "b", "c", "d", num_slots=2)
    for number in range(8):
        candidates = fleet.candidates(0.0)
        worker = choose(strategy, candidates, PROMPTS[number])

        assert worker in candidates
        fleet.take(worker)
    assert fleet.candidates(0.0) == []
