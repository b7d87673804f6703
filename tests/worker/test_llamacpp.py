from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.core.config import parse, to_json
from services.core.settings import MeshConfig
from services.core.tokens import TokenArray
from services.models.catalog import ModelFiles, find_model
from services.models.gguf import read_metadata
from services.runtime.startup import StartupError
from worker.engines.contract import Bytes, Engine, EngineFailure, Work
from worker.engines.llamacpp.context import Threads
from worker.engines.llamacpp.engine import LlamaCppEngine

FILES = find_model("smollm2-135m-instruct")
METADATA = read_metadata(FILES.gguf_path)

BLOCK_TOKENS = 8
MAX_CONTEXT_TOKENS = 44
PROMPT: TokenArray = np.random.default_rng(7).integers(100, 40_000, 40).astype(np.uint32)
OTHER: TokenArray = PROMPT[::-1].copy()


def config_of(**worker: Any) -> MeshConfig:
    small = {
        "num_slots": 2,
        "max_context_tokens": MAX_CONTEXT_TOKENS,
        "max_batch_tokens": 64,
        "num_cache_blocks": 4,
    }
    return parse({"mesh": {"block_tokens": BLOCK_TOKENS}, "worker": {**small, **worker}})


def new_engine(**worker: Any) -> LlamaCppEngine:
    return LlamaCppEngine(config_of(**worker), FILES, METADATA, threads=Threads(1))


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[LlamaCppEngine]:
    engine = new_engine()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: LlamaCppEngine) -> LlamaCppEngine:
    for slot in range(shared_engine.info.num_slots):
        shared_engine.clear(slot)
    return shared_engine


@pytest.fixture(scope="module")
def plain(shared_engine: LlamaCppEngine) -> bytes:
    """Logits after PROMPT, evaluated in one step, alone."""
    shared_engine.clear(0)
    return feed(shared_engine, 0, PROMPT)


def feed(
    engine: Engine, slot: int, tokens: TokenArray, *, start: int = 0, chunk: int = 64
) -> bytes:
    """Evaluate tokens[start:] in chunks; the logits after the last."""
    for position in range(start, len(tokens), chunk):
        end = min(position + chunk, len(tokens))
        logits = engine.evaluate([Work(slot, position, tokens[position:end], end == len(tokens))])
    return logits.tobytes()


def new_blocks(engine: Engine, count: int) -> list[Bytes]:
    """Out of order, as places of a pool are."""
    pool = np.zeros((count + 1, engine.info.block_bytes), np.uint8)
    return [pool[place] for place in reversed(range(count))]


def exported(engine: Engine, count: int) -> list[Bytes]:
    """The first blocks of PROMPT, computed by `engine`."""
    engine.clear(0)
    feed(engine, 0, PROMPT)
    blocks = new_blocks(engine, count)
    engine.export_blocks(0, 0, blocks)
    return blocks


# --- equality, bit for bit


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunks_do_not_change_logits(engine: LlamaCppEngine, plain: bytes, chunk: int) -> None:
    assert feed(engine, 0, PROMPT, chunk=chunk) == plain


def test_a_batch_does_not_change_logits(engine: LlamaCppEngine, plain: bytes) -> None:
    feed(engine, 1, OTHER[:20])
    alone = engine.evaluate([Work(1, 20, OTHER[20:21], True)]).tobytes()
    engine.clear(1)
    feed(engine, 1, OTHER[:20])
    feed(engine, 0, PROMPT[:30])
    # The longer work first: llama.cpp orders the passes of a step itself.
    logits = engine.evaluate([Work(0, 30, PROMPT[30:], True), Work(1, 20, OTHER[20:21], True)])

    assert logits.shape == (2, engine.info.vocabulary_size)
    assert logits[0].tobytes() == plain
    assert logits[1].tobytes() == alone


def test_a_work_that_wants_no_logits_has_no_row(engine: LlamaCppEngine, plain: bytes) -> None:
    assert engine.evaluate([Work(0, 0, PROMPT[:30], False)]).shape[0] == 0
    logits = engine.evaluate([Work(1, 0, OTHER[:4], False), Work(0, 30, PROMPT[30:], True)])

    assert logits.tobytes() == plain


def test_each_token_of_a_run_may_have_its_logits(engine: LlamaCppEngine) -> None:
    """Beside other works, of which the longest goes first."""
    single = [
        feed(engine, 0, PROMPT[:31]),
        *(
            engine.evaluate([Work(0, position, PROMPT[position : position + 1], 1)]).tobytes()
            for position in range(31, 34)
        ),
    ]
    engine.clear(0)
    feed(engine, 0, PROMPT[:30])
    logits = engine.evaluate([Work(1, 0, OTHER[:9], 1), Work(0, 30, PROMPT[30:34], 4)])

    assert [row.tobytes() for row in logits[1:]] == single


def test_what_is_cut_off_was_never_there(engine: LlamaCppEngine, plain: bytes) -> None:
    feed(engine, 0, PROMPT[:30])
    engine.evaluate([Work(0, 30, OTHER[:5], 5)])
    engine.truncate(0, 32)
    engine.truncate(0, 30)

    assert feed(engine, 0, PROMPT, start=30) == plain


def test_a_cleared_slot_starts_afresh(engine: LlamaCppEngine, plain: bytes) -> None:
    feed(engine, 0, OTHER)
    engine.clear(0)

    assert feed(engine, 0, PROMPT) == plain


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_blocks_stand_for_computing(engine: LlamaCppEngine, plain: bytes, num_blocks: int) -> None:
    blocks = exported(engine, num_blocks)
    engine.append_blocks(1, blocks)

    assert feed(engine, 1, PROMPT, start=num_blocks * BLOCK_TOKENS) == plain
    again = new_blocks(engine, num_blocks)
    engine.export_blocks(1, 0, again)
    assert [block.tobytes() for block in again] == [block.tobytes() for block in blocks]


def test_later_blocks_are_exported_alone(engine: LlamaCppEngine) -> None:
    blocks = exported(engine, 3)
    later = new_blocks(engine, 1)
    engine.export_blocks(0, 2, later)

    assert later[0].tobytes() == blocks[2].tobytes()
    assert later[0].tobytes() != blocks[1].tobytes()


def test_runs_of_blocks_are_what_one_export_gives(engine: LlamaCppEngine) -> None:
    together = exported(engine, 4)
    feed(engine, 1, OTHER)
    apart = new_blocks(engine, 4)
    between = new_blocks(engine, 1)
    for index, block in enumerate(apart):
        engine.export_blocks(0, index, [block])
        engine.export_blocks(1, index, between)

    assert [block.tobytes() for block in apart] == [block.tobytes() for block in together]


def test_blocks_are_of_what_the_slot_holds_now(engine: LlamaCppEngine) -> None:
    first, again, other = (new_blocks(engine, 1) for _ in range(3))
    feed(engine, 0, PROMPT)
    engine.export_blocks(0, 0, first)
    engine.clear(0)
    feed(engine, 0, OTHER)
    engine.export_blocks(0, 0, other)
    engine.clear(0)
    engine.append_blocks(0, first)
    engine.export_blocks(0, 0, again)

    assert again[0].tobytes() == first[0].tobytes() != other[0].tobytes()


def test_blocks_join_what_was_computed(engine: LlamaCppEngine, plain: bytes) -> None:
    blocks = exported(engine, 3)
    feed(engine, 1, PROMPT[:BLOCK_TOKENS])
    engine.append_blocks(1, blocks[1:2])
    engine.append_blocks(1, blocks[2:])

    assert feed(engine, 1, PROMPT, start=3 * BLOCK_TOKENS) == plain


def test_the_last_block_may_be_whole_tokens_only(engine: LlamaCppEngine, plain: bytes) -> None:
    part = np.empty(5 * engine.info.token_bytes, np.uint8)
    blocks = [*new_blocks(engine, 4), part]
    feed(engine, 0, PROMPT[:37])
    engine.export_blocks(0, 0, blocks)
    engine.append_blocks(1, blocks)

    assert feed(engine, 1, PROMPT, start=37) == plain


def test_blocks_cannot_follow_a_part_of_a_block(engine: LlamaCppEngine) -> None:
    blocks = exported(engine, 1)
    feed(engine, 1, PROMPT[: BLOCK_TOKENS + 1])

    with pytest.raises(EngineFailure, match="no whole blocks"):
        engine.append_blocks(1, blocks)


def test_quantized_blocks_stand_for_computing() -> None:
    engine = new_engine(kv_type="q8_0")
    plain = feed(engine, 0, PROMPT)
    engine.append_blocks(1, exported(engine, 3))

    assert feed(engine, 1, PROMPT, start=3 * BLOCK_TOKENS) == plain
    engine.close()


IN_ANOTHER_PROCESS = """
import hashlib, sys
import numpy as np
from services.core.config import from_json
from worker.engines import open_engine
from worker.engines.contract import Work

engine = open_engine(from_json(sys.argv[1]), cores_shared_by=1)
data = np.load(sys.argv[2])
blocks, rest = list(data["blocks"]), data["rest"]
engine.append_blocks(2, blocks)
logits = engine.evaluate([Work(2, len(blocks) * engine.info.block_tokens, rest, True)])
print(engine.info.fingerprint.hex(), hashlib.sha256(logits).hexdigest())
engine.close()
"""


def test_blocks_carry_a_prefix_to_another_process(
    engine: LlamaCppEngine, plain: bytes, tmp_path: Path
) -> None:
    blocks = exported(engine, 3)
    path = tmp_path / "blocks.npz"
    np.savez(path, blocks=np.stack(blocks), rest=PROMPT[3 * BLOCK_TOKENS :])
    # Another number of slots is another form of llama.cpp's own state, not of a block.
    config = to_json(config_of(num_slots=3, threads=2))
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, config, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    fingerprint, digest = done.stdout.split()

    assert fingerprint == engine.info.fingerprint.hex()
    assert digest == hashlib.sha256(plain).hexdigest()


# --- refusals


def refusal(engine: Engine, *works: Work) -> str:
    with pytest.raises(EngineFailure) as caught:
        engine.evaluate(works)
    return str(caught.value)


@pytest.mark.parametrize("slot", [-1, 2, 1000])
def test_an_unknown_slot_is_refused(engine: LlamaCppEngine, slot: int) -> None:
    blocks = new_blocks(engine, 1)

    calls: list[Callable[[], object]] = [
        lambda: engine.evaluate([Work(slot, 0, PROMPT, True)]),
        lambda: engine.clear(slot),
        lambda: engine.append_blocks(slot, blocks),
        lambda: engine.append_blocks(slot, []),
        lambda: engine.export_blocks(slot, 0, blocks),
    ]
    for call in calls:
        with pytest.raises(EngineFailure, match=r"is not one of 0\.\.1"):
            call()


def test_a_wrong_position_is_refused(engine: LlamaCppEngine, plain: bytes) -> None:
    feed(engine, 0, PROMPT[:10])

    for length in (11, -1):
        with pytest.raises(EngineFailure, match=f"cannot be cut to {length}"):
            engine.truncate(0, length)
    assert "holds 10 tokens; position 11" in refusal(engine, Work(0, 11, PROMPT[11:], True))
    assert "holds 10 tokens; position 9" in refusal(engine, Work(0, 9, PROMPT[9:], True))
    assert "holds 12 tokens" in refusal(
        engine, Work(0, 10, PROMPT[10:12], False), Work(0, 10, PROMPT[10:12], False)
    )
    # Nothing of it reached the engine.
    assert feed(engine, 0, PROMPT, start=10) == plain


def test_bad_tokens_are_refused(engine: LlamaCppEngine, plain: bytes) -> None:
    too_large = np.array([engine.info.vocabulary_size], np.uint32)

    assert "no tokens" in refusal(engine, Work(0, 0, PROMPT[:0], True))
    assert "the batch is invalid" in refusal(engine, Work(0, 0, too_large, True))
    assert "65 tokens in a step of 64" in refusal(
        engine, Work(0, 0, PROMPT, False), Work(1, 0, PROMPT[:25], False)
    )
    assert feed(engine, 0, PROMPT) == plain


def test_a_full_context_is_refused(engine: LlamaCppEngine) -> None:
    tokens = np.resize(PROMPT, MAX_CONTEXT_TOKENS + 1)
    feed(engine, 0, tokens[:-1])
    too_many = new_blocks(engine, MAX_CONTEXT_TOKENS // BLOCK_TOKENS + 1)

    assert "would hold 45 tokens; its context is 44" in refusal(
        engine, Work(0, MAX_CONTEXT_TOKENS, tokens[-1:], True)
    )
    with pytest.raises(EngineFailure, match="would hold 48 tokens"):
        engine.append_blocks(1, too_many)


@pytest.mark.parametrize(("first", "count"), [(0, 2), (1, 1), (-1, 1)])
def test_blocks_that_are_not_full_cannot_be_exported(
    engine: LlamaCppEngine, first: int, count: int
) -> None:
    feed(engine, 0, PROMPT[: BLOCK_TOKENS + 1])

    with pytest.raises(EngineFailure, match="are not all there"):
        engine.export_blocks(0, first, new_blocks(engine, count))


def test_blocks_of_another_size_are_refused(engine: LlamaCppEngine) -> None:
    feed(engine, 0, PROMPT[:BLOCK_TOKENS])
    blocks = [np.zeros(engine.info.block_bytes - 1, np.uint8)]

    with pytest.raises(EngineFailure, match="a block is"):
        engine.append_blocks(0, blocks)
    with pytest.raises(EngineFailure, match="a block is"):
        engine.export_blocks(0, 0, blocks)


def test_a_closed_engine_refuses_calls() -> None:
    engine = new_engine()
    blocks = exported(engine, 1)
    engine.close()
    engine.close()

    calls: list[Callable[[], object]] = [
        lambda: engine.evaluate([Work(1, 0, PROMPT, True)]),
        lambda: engine.clear(0),
        lambda: engine.append_blocks(1, blocks),
        lambda: engine.export_blocks(0, 0, blocks),
    ]
    for call in calls:
        with pytest.raises(EngineFailure, match="closed"):
            call()


# --- start


def test_the_engine_says_what_it_is(engine: LlamaCppEngine) -> None:
    info = engine.info

    assert (info.name, info.model) == ("llamacpp", "smollm2-135m-instruct")
    assert (info.num_slots, info.max_context_tokens) == (2, MAX_CONTEXT_TOKENS)
    assert (info.block_tokens, info.num_blocks, info.kv_in_pool) == (BLOCK_TOKENS, 4, False)
    # 30 layers of K and V, 3 heads of 64 values, 2 bytes each.
    assert info.block_bytes == BLOCK_TOKENS * 30 * 2 * 3 * 64 * 2
    assert info.vocabulary_size == 49_152
    assert 2 in info.eos_token_ids


def test_another_kind_of_kv_has_another_fingerprint(engine: LlamaCppEngine) -> None:
    others = [new_engine(kv_type="q8_0"), new_engine(num_slots=1, max_batch_tokens=16)]
    for other in others:
        other.close()

    assert others[0].info.fingerprint != engine.info.fingerprint
    assert others[1].info.fingerprint == engine.info.fingerprint


def test_a_context_beyond_the_trained_one_is_refused() -> None:
    with pytest.raises(StartupError, match=r"max_context_tokens is 8193, but .* trained for 8192"):
        new_engine(max_context_tokens=8193)


def test_a_truncated_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(FILES.gguf_path.read_bytes()[: 1 << 22])

    with pytest.raises(StartupError, match=r"cannot load .*half\.gguf: .*data is not within"):
        LlamaCppEngine(config_of(), ModelFiles("half", path), METADATA, threads=Threads(1))
