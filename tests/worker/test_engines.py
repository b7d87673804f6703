from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.core.config import parse
from services.core.tokens import TokenArray
from services.runtime.startup import StartupError
from worker.engines import open_engine, plan_threads
from worker.engines.contract import Engine, Work

PROMPT: TokenArray = np.arange(500, 540, dtype=np.uint32)


def opened(engine: str, **mesh: Any) -> Engine:
    worker = {"engine": engine, "num_slots": 2, "max_context_tokens": 64}
    return open_engine(parse({"mesh": mesh, "worker": worker}), cores_shared_by=2)


@pytest.mark.parametrize("name", ["llamacpp", "simulated"])
def test_each_engine_answers_under_the_same_names(name: str) -> None:
    engine = opened(name, block_tokens=16)
    logits = engine.evaluate([Work(1, 0, PROMPT, True)])
    blocks = [np.empty(engine.info.block_bytes, np.uint8) for _ in range(2)]
    engine.export_blocks(1, 0, blocks)
    engine.append_blocks(0, blocks)

    assert engine.info.name == name
    assert (engine.info.model, engine.info.vocabulary_size) == ("smollm2-135m-instruct", 49_152)
    assert logits.shape[1] <= engine.info.vocabulary_size
    assert engine.evaluate([Work(0, 32, PROMPT[32:], True)]).shape == logits.shape
    engine.close()


def test_a_missing_model_is_one_readable_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"mesh\.model: no such file: .*absent\.gguf"):
        opened("llamacpp", model=str(tmp_path / "absent.gguf"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"text, and no model"])
@pytest.mark.parametrize("engine", ["llamacpp", "simulated"])
def test_a_file_that_is_no_model_is_one_readable_line(
    tmp_path: Path, content: bytes, engine: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"model\.gguf") as caught:
        opened(engine, model=str(path))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "cores_shared_by", "num_cores", "threads", "passive_wait"),
    [
        (0, 1, 8, 8, False),
        (0, 2, 8, 4, False),
        (0, 3, 8, 2, False),
        # More workers than cores: one thread each, which waits for nobody.
        (0, 4, 2, 1, False),
        (1, 4, 2, 1, False),
        (4, 2, 8, 4, False),
        (4, 3, 8, 4, True),
        (2, 2, 2, 2, True),
    ],
)
def test_workers_share_the_cores(
    setting: int, cores_shared_by: int, num_cores: int, threads: int, passive_wait: bool
) -> None:
    planned = plan_threads(setting, cores_shared_by=cores_shared_by, num_cores=num_cores)

    assert planned == (threads, passive_wait)
