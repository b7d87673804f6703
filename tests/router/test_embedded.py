from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from firsttoken.tokenizer.v1.tokenizer_pb2 import EncodeRequest
from router.embedded import EmbeddedTokenizer
from services.core import config
from services.core.ledger import Ledger, Segment
from services.core.settings import MeshConfig
from tests.runtime.waiting import eventually


def embedding(**mesh: Any) -> MeshConfig:
    return config.parse({"router": {"tokenize": "embedded"}, "mesh": mesh})


async def test_it_loads_what_the_mesh_serves_and_loads_anew_what_it_serves_then() -> None:
    told: list[bool] = []
    embedded = EmbeddedTokenizer(lambda: told.append(embedded.ready))
    embedded.configure(embedding())
    assert not embedded.ready
    await eventually(lambda: told == [True])
    ledger = Ledger(time.monotonic())
    first = await embedded.encode(EncodeRequest(text="Hi"), ledger, began_s=ledger.arrived_s)
    embedded.configure(config.change(embedding(), {"router.max_queue": 7}))
    assert embedded.ready
    embedded.configure(embedding(block_tokens=32))
    assert not embedded.ready
    await eventually(lambda: told == [True, True])
    second = await embedded.encode(EncodeRequest(text="Hi"), ledger, began_s=time.monotonic())
    await embedded.close()

    assert first.token_ids == second.token_ids
    assert (first.block_tokens, second.block_tokens) == (64, 32)
    assert ledger.spent_s(Segment.PREPROCESS) > 0
    assert not embedded.ready


async def test_where_it_cannot_be_loaded_it_says_so_and_is_not_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    embedded = EmbeddedTokenizer(lambda: pytest.fail("it is not there"))
    for name in ("gone.gguf", "broken.gguf"):
        caplog.clear()
        embedded.configure(embedding(model=str(tmp_path / name)))
        await eventually(lambda: caplog.records)
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "the tokenizer service encodes, not this process: " in record.getMessage()
        assert name.partition(".")[0] in record.getMessage()
    await embedded.close()

    assert not embedded.ready


async def test_closing_while_it_loads_leaves_nothing() -> None:
    embedded = EmbeddedTokenizer(lambda: pytest.fail("it is closed"))
    embedded.configure(embedding())
    await embedded.close()
    await embedded.close()

    assert not embedded.ready
