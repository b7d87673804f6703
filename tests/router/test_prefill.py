from __future__ import annotations

from collections import Counter

from router.fleet import Fleet, Role, Slot, Worker
from router.prefill import PrefillChoice
from router.prompt import Prompt
from router.strategies import RoundRobin
from services.core.settings import RouterSettings
from tests.router.fleets import announce, make_worker
from tests.router.test_strategies import make_prompt

DECODE = make_worker("decode")


def make_prefill_fleet(*names: str) -> Fleet:
    fleet = Fleet()
    fleet.update(announce(name, role=Role.PREFILL) for name in names)
    return fleet


def make_choice(*, prefix_length: int = 32, affinity_tokens: int = 0) -> PrefillChoice:
    return PrefillChoice(
        RouterSettings(prefix_length=prefix_length, prefill_affinity_tokens=affinity_tokens),
        RoundRobin(),
    )


def choose(choice: PrefillChoice, fleet: Fleet, prompt: Prompt, now_s: float = 0.0) -> Worker:
    chosen = choice.choose(fleet.workers, DECODE, prompt, now_s)
    assert chosen is not None
    return chosen.worker


def take(fleet: Fleet, name: str, num_tokens: int) -> Slot:
    [worker] = [worker for worker in fleet.workers if worker.announced.id == name]
    return fleet.take(worker, num_tokens)


PROMPT = make_prompt(*range(40))
PROMPTS = [make_prompt(*range(start, start + 40)) for start in range(300)]


def test_chooses_nobody_where_nobody_prefills() -> None:
    assert make_choice().choose([], DECODE, PROMPT, 0.0) is None


def test_takes_the_one_with_the_fewest_prompt_tokens_outstanding() -> None:
    fleet, choice = make_prefill_fleet("a", "b", "c"), make_choice()
    slots = [
        take(fleet, "a", 100),
        take(fleet, "b", 20),
        take(fleet, "b", 20),
        take(fleet, "c", 50),
    ]

    assert {choose(choice, fleet, prompt).announced.id for prompt in PROMPTS} == {"b"}
    slots[0].release()
    assert {choose(choice, fleet, prompt).announced.id for prompt in PROMPTS} == {"a"}


def test_counts_what_it_has_just_given_away() -> None:
    fleet, choice = make_prefill_fleet("a", "b", "c", "d"), make_choice()
    for prompt in PROMPTS[:40]:
        fleet.take(choose(choice, fleet, prompt), prompt.num_tokens)

    assert {worker.outstanding_tokens for worker in fleet.workers} == {400}


def test_the_same_beginning_goes_to_the_same_worker_until_that_has_too_much_to_do() -> None:
    fleet, choice = make_prefill_fleet("a", "b", "c"), make_choice(affinity_tokens=100)
    alike = [make_prompt(*range(32), *range(tail, tail + 8)) for tail in range(100, 110)]
    chosen = [fleet.take(choose(choice, fleet, prompt), 40).worker for prompt in alike]

    assert chosen[0] is chosen[1] is chosen[2]
    assert chosen[3] is not chosen[0]  # it has 120 tokens more than the others


def test_beginnings_are_spread_over_the_workers() -> None:
    fleet, choice = make_prefill_fleet("a", "b", "c"), make_choice()
    chosen = Counter(choose(choice, fleet, prompt).announced.id for prompt in PROMPTS)

    assert min(chosen.values()) > 60


def test_a_worker_that_leaves_moves_only_its_own_beginnings() -> None:
    fleet, choice = make_prefill_fleet("a", "b", "c"), make_choice()
    before = [choose(choice, fleet, prompt).announced.id for prompt in PROMPTS]
    fleet.update(announce(name, role=Role.PREFILL) for name in "ac")
    after = [choose(choice, fleet, prompt).announced.id for prompt in PROMPTS]

    assert all(old in (new, "b") for old, new in zip(before, after, strict=True))


def test_only_equal_fingerprints_exchange_kv() -> None:
    others = [make_worker("a", fingerprint="g"), make_worker("b", fingerprint="")]
    equal = make_worker("c")

    assert make_choice().choose(others, DECODE, PROMPT, 0.0) is None
    chosen = make_choice().choose([*others, equal], DECODE, PROMPT, 0.0)
    assert chosen is not None
    assert chosen.worker is equal


def test_a_worker_does_not_prefill_for_itself() -> None:
    assert make_choice().choose([DECODE], DECODE, PROMPT, 0.0) is None


def test_passes_over_who_cannot_hold_the_prompt() -> None:
    small, enough = (make_worker(str(size), max_context_tokens=size) for size in (40, 41))

    chosen = make_choice().choose([small, enough], DECODE, PROMPT, 0.0)
    assert chosen is not None
    assert chosen.worker is enough


def test_avoids_who_is_not_ready_or_has_failed() -> None:
    fleet, choice = make_prefill_fleet("a", "b"), make_choice()
    a, b = fleet.workers
    fleet.suspect(a, 0.0)

    assert {choose(choice, fleet, prompt) for prompt in PROMPTS} == {b}
    fleet.update([announce("a", role=Role.PREFILL), announce("b", role=Role.PREFILL, ready=False)])
    assert choice.choose(fleet.workers, DECODE, PROMPT, 0.0) is None
    # Tried again after a while, with one prompt at a time.
    assert choose(choice, fleet, PROMPT, now_s=100.0) is a
    fleet.take(a, 40)
    assert choice.choose(fleet.workers, DECODE, PROMPT, 100.0) is None
    fleet.trust(a)
    assert choose(choice, fleet, PROMPT, now_s=100.0) is a


def test_more_prompts_than_slots_may_be_outstanding() -> None:
    fleet, choice = make_prefill_fleet("a"), make_choice()
    for _ in range(20):
        fleet.take(choose(choice, fleet, PROMPT), 40)

    assert choose(choice, fleet, PROMPT).outstanding_tokens == 800
