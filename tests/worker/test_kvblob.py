from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.contract import Bytes
from worker.engines.llamacpp.kvblob import BlobLayout

MAGIC = 0xAF143CD8


class Tensors(NamedTuple):
    """Row bytes of K of each layer, then of V of each layer."""

    rows: tuple[int, ...]
    rotations: tuple[int, int] = (0, 0)


def blob_of(
    tensors: Tensors,
    num_tokens: int,
    *,
    stream: int = 0,
    num_streams: int = 1,
    positions: list[int] | None = None,
    transposed: int = 0,
) -> Bytes:
    """As llama.cpp writes it; byte b of the row of token t in tensor n is 100 n + 10 t + b."""
    cells = [
        struct.pack("<iIi", position, 1, stream) for position in positions or range(num_tokens)
    ]
    state = [struct.pack("<IIII", transposed, len(tensors.rows) // 2, *tensors.rotations)]
    for index, row_bytes in enumerate(tensors.rows):
        state.append(struct.pack("<iQ", 30, row_bytes))
        state.append(row_content(index, np.arange(num_tokens), row_bytes).tobytes())
    counts = [struct.pack("<I", 0)] * num_streams
    counts[stream] = struct.pack("<I", num_tokens) + b"".join(cells + state)
    return np.frombuffer(
        struct.pack("<IiI", MAGIC, stream, num_streams) + b"".join(counts), np.uint8
    )


def row_content(
    tensor: int, tokens: np.ndarray[tuple[int], np.dtype[np.int64]], width: int
) -> Bytes:
    return (100 * tensor + 10 * tokens[:, None] + np.arange(width)).astype(np.uint8)


def new_blocks(count: int, block_bytes: int) -> list[Bytes]:
    return [np.full(block_bytes, 255, np.uint8) for _ in range(count)]


layouts = st.builds(
    Tensors,
    st.integers(1, 3).flatmap(lambda layers: st.tuples(*[st.integers(1, 9)] * (2 * layers))),
    st.sampled_from([(0, 0), (64, 64)]),
)


@given(layouts, st.integers(1, 4), st.integers(0, 3), st.integers(1, 5), st.integers(0, 4))
def test_blocks_cut_from_a_blob_merge_into_the_same_blob(
    tensors: Tensors, num_streams: int, stream: int, block_tokens: int, num_blocks: int
) -> None:
    stream %= num_streams
    layout = BlobLayout.learn(blob_of(tensors, 1, stream=stream, num_streams=num_streams))
    num_tokens = (num_blocks + 1) * block_tokens
    blocks = new_blocks(num_blocks + 1, block_tokens * layout.token_bytes)
    layout.cut(blob_of(tensors, num_tokens, stream=stream, num_streams=num_streams), 0, blocks)
    merged = np.full(layout.blob_bytes(num_tokens), 255, np.uint8)
    layout.merge(blocks, merged)

    assert merged.tobytes() == blob_of(tensors, num_tokens, num_streams=num_streams).tobytes()


def test_a_block_is_the_rows_of_its_tokens_tensor_by_tensor() -> None:
    tensors = Tensors((3, 3, 2, 5))
    layout = BlobLayout.learn(blob_of(tensors, 1))
    blocks = new_blocks(2, 2 * layout.token_bytes)
    layout.cut(blob_of(tensors, 7), 2, blocks)

    for first, block in zip((2, 4), blocks, strict=True):
        tokens = np.arange(first, first + 2)
        rows = [row_content(index, tokens, width) for index, width in enumerate(tensors.rows)]
        assert block.tobytes() == b"".join(row.tobytes() for row in rows)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (blob_of(Tensors((4, 4)), 3)[:-1], "bytes; got"),
        (blob_of(Tensors((4, 5)), 3), "bytes; got"),
        (blob_of(Tensors((4, 4)), 3, positions=[0, 2, 1]), "order of their positions"),
        (blob_of(Tensors((3, 5)), 3), "other types or shapes"),
        (blob_of(Tensors((4, 4)), 0), "empty"),
    ],
)
def test_a_blob_of_another_form_is_refused(blob: Bytes, message: str) -> None:
    layout = BlobLayout.learn(blob_of(Tensors((4, 4)), 1))

    with pytest.raises(ValueError, match=message):
        layout.cut(blob, 0, new_blocks(1, layout.token_bytes))


def test_a_transposed_v_is_refused() -> None:
    with pytest.raises(ValueError, match="flash attention must be on"):
        BlobLayout.learn(blob_of(Tensors((4, 4)), 1, transposed=1))


@given(st.integers(0, 75))
def test_a_blob_that_ends_early_teaches_nothing(size: int) -> None:
    blob = blob_of(Tensors((4, 4)), 1)

    assert blob.size == 76
    with pytest.raises(ValueError, match=r"end early|bytes; got"):
        BlobLayout.learn(blob[:size])
