from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.config import parse
from services.core.settings import MeshConfig
from services.core.tokens import TokenArray
from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.vocabulary import Vocabulary
from worker.engines.contract import Bytes, EngineFailure, Work
from worker.engines.simulated import SimulatedEngine, step_s

MODEL = "smollm2-135m-instruct"
VOCABULARY = Vocabulary.from_metadata(read_metadata(find_model(MODEL).gguf_path))

BLOCK_TOKENS = 8
FAST = {"prefill_tokens_per_s": 1e9, "decode_step_ms": 0, "decode_step_ms_per_seq": 0}


def config_of(**simulated: Any) -> MeshConfig:
    return parse(
        {
            "mesh": {"block_tokens": BLOCK_TOKENS},
            "worker": {
                "num_slots": 3,
                "max_context_tokens": 64,
                "simulated": {"kv_bytes_per_token": 12, **FAST, **simulated},
            },
        }
    )


def new_engine(**simulated: Any) -> SimulatedEngine:
    return SimulatedEngine(config_of(**simulated), MODEL, VOCABULARY)


def ids(*values: int) -> TokenArray:
    return np.array(values, np.uint32)


def new_blocks(engine: SimulatedEngine, count: int) -> list[Bytes]:
    return [np.empty(engine.info.block_bytes, np.uint8) for _ in range(count)]


def feed(engine: SimulatedEngine, slot: int, tokens: Sequence[int], cuts: Sequence[int]) -> bytes:
    """Evaluate `tokens`, cut at these places; the logits after the last."""
    places = sorted({0, *cuts, len(tokens)})
    for start, end in pairwise(places):
        logits = engine.evaluate([Work(slot, start, ids(*tokens[start:end]), end == len(tokens))])
    return logits.tobytes()


def greedy(engine: SimulatedEngine, slot: int, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    logits = engine.evaluate([Work(slot, 0, ids(*prompt), True)])
    for _ in range(count):
        tokens.append(int(logits[0].argmax()))
        logits = engine.evaluate([Work(slot, len(tokens) - 1, ids(tokens[-1]), True)])
    return tokens[len(prompt) :]


prompts = st.lists(st.integers(0, 49151), min_size=1, max_size=40)


@given(prompts, st.lists(st.integers(1, 39), max_size=4), st.sampled_from([1, 7, 8, 12, 4096]))
def test_chunks_do_not_change_logits(tokens: list[int], cuts: list[int], token_bytes: int) -> None:
    engine = new_engine(kv_bytes_per_token=token_bytes)
    cuts = [cut for cut in cuts if cut < len(tokens)]

    assert feed(engine, 0, tokens, cuts) == feed(engine, 1, tokens, [])


@given(prompts, st.data(), st.sampled_from([1, 7, 8, 12]))
def test_what_is_cut_off_was_never_there(
    tokens: list[int], data: st.DataObject, token_bytes: int
) -> None:
    engine = new_engine(kv_bytes_per_token=token_bytes)
    end = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(prompts)
    feed(engine, 0, [*tokens[:end], *other], [])
    engine.truncate(0, end)
    rows = engine.evaluate([Work(0, end, ids(*tokens[end:]), len(tokens) - end)])

    one_by_one = [feed(engine, 1, tokens[: end + 1], [])]
    for position in range(end + 1, len(tokens)):
        logits = engine.evaluate([Work(1, position, ids(tokens[position]), 1)])
        one_by_one.append(logits.tobytes())
    assert [row.tobytes() for row in rows] == one_by_one


@given(prompts)
def test_blocks_carry_a_prefix_to_another_engine(tokens: list[int]) -> None:
    source, target = new_engine(), new_engine()
    whole = feed(source, 0, tokens, [])
    num_blocks = (len(tokens) - 1) // BLOCK_TOKENS
    blocks = new_blocks(source, num_blocks)
    source.export_blocks(0, 0, blocks)
    target.append_blocks(2, blocks)
    start = num_blocks * BLOCK_TOKENS
    logits = target.evaluate([Work(2, start, ids(*tokens[start:]), True)])

    assert logits.tobytes() == whole
    exported = new_blocks(target, num_blocks)
    target.export_blocks(2, 0, exported)
    assert [block.tobytes() for block in exported] == [block.tobytes() for block in blocks]


def test_one_request_alone_always_fits_into_the_pool() -> None:
    engine = new_engine(num_blocks=2)

    assert engine.info.max_context_tokens == 2 * BLOCK_TOKENS


def test_later_blocks_are_exported_alone() -> None:
    engine = new_engine()
    feed(engine, 0, range(30), [])
    every, later = new_blocks(engine, 3), new_blocks(engine, 1)
    engine.export_blocks(0, 0, every)
    engine.export_blocks(0, 2, later)

    assert later[0].tobytes() == every[2].tobytes()
    assert every[1].tobytes() != every[2].tobytes()


@pytest.mark.parametrize("place", [0, 1])
def test_a_block_of_another_prefix_changes_the_answer(place: int) -> None:
    engine = new_engine()
    tokens = list(range(100, 120))
    right = feed(engine, 0, tokens, [])
    feed(engine, 1, [7, *tokens[1:]], [])
    blocks = new_blocks(engine, 2)
    engine.export_blocks(0, 0, blocks)
    engine.export_blocks(1, place, blocks[place : place + 1])
    engine.append_blocks(2, blocks)
    logits = engine.evaluate([Work(2, 16, ids(*tokens[16:]), True)])

    assert logits.tobytes() != right


def test_greedy_answers_do_not_depend_on_the_batch() -> None:
    engine = new_engine()
    prompts = [[5, 6, 7], list(range(20)), [9]]
    alone = []
    for prompt in prompts:
        alone.append(greedy(engine, 0, prompt, 10))
        engine.clear(0)
    together = [list(prompt) for prompt in prompts]
    works = [Work(slot, 0, ids(*prompt), True) for slot, prompt in enumerate(prompts)]
    for _ in range(10):
        logits = engine.evaluate(works)
        for tokens, row in zip(together, logits, strict=True):
            tokens.append(int(row.argmax()))
        works = [
            Work(slot, len(tokens) - 1, ids(tokens[-1]), True)
            for slot, tokens in enumerate(together)
        ]

    answers = [tokens[len(prompt) :] for tokens, prompt in zip(together, prompts, strict=True)]
    assert answers == alone
    assert len({tuple(answer) for answer in answers}) == len(prompts)


def test_only_readable_text_is_generated() -> None:
    engine = new_engine()
    logits = engine.evaluate([Work(0, 0, ids(1, 2, 3), True)])[0]
    possible = np.flatnonzero(logits > -np.inf)

    assert len(possible) > 200
    assert not {*possible} & {*VOCABULARY.special_token_ids, *VOCABULARY.eos_token_ids}
    assert VOCABULARY.join(possible.tolist(), skip_special_tokens=False).decode().isprintable()


def test_rows_come_for_the_works_that_want_logits() -> None:
    engine = new_engine()
    wanted = engine.evaluate([Work(1, 0, ids(4, 5), True)]).tobytes()
    engine.clear(1)
    logits = engine.evaluate([Work(0, 0, ids(1), False), Work(1, 0, ids(4, 5), True)])

    assert logits.tobytes() == wanted
    assert engine.evaluate([Work(2, 0, ids(8), False)]).shape[0] == 0


def test_a_step_costs_its_prompt_tokens_and_once_its_decodes() -> None:
    timing = config_of(
        prefill_tokens_per_s=1000, decode_step_ms=8, decode_step_ms_per_seq=0.5
    ).worker.simulated
    prompt = Work(0, 0, ids(*range(10)), False)
    decode = Work(1, 20, ids(3), True)

    assert step_s(timing, [prompt]) == pytest.approx(0.010)
    assert step_s(timing, [decode, decode]) == pytest.approx(0.009)
    assert step_s(timing, [prompt, decode]) == pytest.approx(0.0185)


def test_time_passes_as_the_model_says() -> None:
    engine = new_engine(decode_step_ms=20, transfer_gb_per_s=0.001, kv_bytes_per_token=2000)
    feed(engine, 0, range(16), [])
    blocks = new_blocks(engine, 2)
    spent_s = []
    for call in (
        lambda: engine.evaluate([Work(0, 16, ids(1), True)]),
        lambda: engine.export_blocks(0, 0, blocks),
        lambda: engine.append_blocks(1, blocks),
    ):
        start_s = time.monotonic()
        call()
        spent_s.append(time.monotonic() - start_s)

    # At least: how much longer it took is up to the machine.
    assert [
        spent >= floor for spent, floor in zip(spent_s, (0.020, 0.032, 0.032), strict=True)
    ] == [True] * 3


def test_a_closed_engine_refuses_calls() -> None:
    engine = new_engine()
    engine.close()
    engine.close()

    with pytest.raises(EngineFailure, match="closed"):
        engine.evaluate([Work(0, 0, ids(1), True)])


def test_vocabulary_that_begins_with_control_tokens_is_spoken_as_well() -> None:
    control = [b"<%d>" % token for token in range(700)]
    letters = [bytes([code]) for code in range(256)] * 3
    vocabulary = Vocabulary(
        token_bytes=(*control, *letters),
        special_token_ids=frozenset(range(700)),
        eos_token_ids=(2,),
        bos_token_id=1,
        context_length=64,
        chat_template="",
    )
    engine = SimulatedEngine(config_of(), "tiny", vocabulary)
    logits = engine.evaluate([Work(0, 0, ids(1, 2, 3), True)])[0]

    spoken = {vocabulary.token_bytes[token] for token in np.flatnonzero(np.isfinite(logits))}
    assert len(logits) == 1024
    assert spoken == {bytes([code]) for code in range(0x20, 0x7F)}


def test_vocabulary_that_is_small_has_no_more_logits_than_tokens() -> None:
    vocabulary = dataclasses.replace(VOCABULARY, token_bytes=VOCABULARY.token_bytes[:100])
    engine = SimulatedEngine(config_of(), "tiny", vocabulary)

    assert engine.evaluate([Work(0, 0, ids(1, 2, 3), True)]).shape == (1, 100)
