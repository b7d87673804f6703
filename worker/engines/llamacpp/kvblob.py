"""The bytes of llama_state_seq_get_data_ext, and KV blocks cut from them.

llama.cpp gives and takes the KV of a whole sequence only. With flash attention
(V not transposed) that state of n tokens is, little-endian and without padding:

    u32 magic, i32 sequence, u32 streams      a context with s sequences has s streams
    u32 cells per stream                      n for the sequence's own, 0 for the others
    n x (i32 position, u32 1, i32 sequence)   follow the count they belong to
    u32 transposed V, u32 layers, u32 K rotation, u32 V rotation
    K of each layer, then V of each layer:
        i32 type, u64 row bytes, n x row

A block is the rows of `block_tokens` consecutive tokens alone: K of each layer,
then V of each layer, with no header. All blocks of an engine have equal size.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from worker.engines.contract import Bytes

_PREAMBLE = struct.Struct("<IiI")
_COUNT = struct.Struct("<I")
_TENSORS = struct.Struct("<IIII")
_TENSOR = struct.Struct("<iQ")
_CELL = np.dtype([("position", "<i4"), ("num_sequences", "<u4"), ("sequence", "<i4")])


class TensorRun(NamedTuple):
    """Consecutive tensors of one shape: in most models, all of them."""

    num_tensors: int
    type: int
    row_bytes: int

    @property
    def header(self) -> Bytes:
        return np.frombuffer(_TENSOR.pack(self.type, self.row_bytes), np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobLayout:
    """What is the same in every blob of one context. Methods raise ValueError for other bytes."""

    magic: int
    num_streams: int
    num_layers: int
    # llama.cpp rotates K and V before it quantizes them; 0: it does not.
    rotations: tuple[int, int]
    runs: tuple[TensorRun, ...]

    @classmethod
    def learn(cls, blob: Bytes) -> BlobLayout:
        """From a blob of at least one token.

        Learned, not derived: a model's metadata says it differently per architecture.
        """
        magic, _, num_streams = _unpack(_PREAMBLE, blob, 0)
        cells_at, num_tokens = _find_cells(blob, num_streams)
        offset = cells_at + num_tokens * _CELL.itemsize
        transposed, num_layers, *rotations = _unpack(_TENSORS, blob, offset)
        if transposed:
            raise ValueError("V is transposed; flash attention must be on")
        offset += _TENSORS.size
        tensors = []
        for _ in range(2 * num_layers):
            tensors.append(_unpack(_TENSOR, blob, offset))
            offset += _TENSOR.size + num_tokens * tensors[-1][1]
        runs = tuple(
            TensorRun(len(list(group)), *tensor) for tensor, group in itertools.groupby(tensors)
        )
        layout = cls(
            magic=magic,
            num_streams=num_streams,
            num_layers=num_layers,
            rotations=(rotations[0], rotations[1]),
            runs=runs,
        )
        layout._check(blob, num_tokens)
        return layout

    @property
    def token_bytes(self) -> int:
        return sum(run.num_tensors * run.row_bytes for run in self.runs)

    def blob_bytes(self, num_tokens: int) -> int:
        headers = sum(run.num_tensors for run in self.runs) * _TENSOR.size
        return (
            _PREAMBLE.size
            + self.num_streams * _COUNT.size
            + num_tokens * (_CELL.itemsize + self.token_bytes)
            + _TENSORS.size
            + headers
        )

    def cut(self, blob: Bytes, first_token: int, blocks: Sequence[Bytes]) -> None:
        """Copy the blocks from `first_token` on out of a blob, into `blocks`."""
        _, num_tokens = _find_cells(blob, self.num_streams)
        self._check(blob, num_tokens)
        for block in blocks:
            for part, rows in self._pieces(blob, num_tokens, first_token, block):
                part[...] = rows
            first_token += block.size // self.token_bytes

    def merge(self, blocks: Sequence[Bytes], blob: Bytes) -> None:
        """Fill `blob`, of blob_bytes, with blocks that follow each other from position 0."""
        num_tokens = sum(block.size for block in blocks) // self.token_bytes
        self._write_headers(blob, num_tokens)
        first_token = 0
        for block in blocks:
            for part, rows in self._pieces(blob, num_tokens, first_token, block):
                rows[...] = part
            first_token += block.size // self.token_bytes

    def _write_headers(self, blob: Bytes, num_tokens: int) -> None:
        # Whose sequence and which stream it was does not matter to an import:
        # the first stands for any.
        head = _PREAMBLE.pack(self.magic, 0, self.num_streams) + _COUNT.pack(num_tokens)
        cells = np.zeros(num_tokens, _CELL)
        cells["position"] = np.arange(num_tokens)
        cells["num_sequences"] = 1
        before_rows = head + cells.tobytes() + _TENSORS.pack(0, self.num_layers, *self.rotations)
        blob[: len(before_rows)] = np.frombuffer(before_rows, np.uint8)
        # The other streams have no cells.
        blob[blob.size - (self.num_streams - 1) * _COUNT.size :] = 0
        for run, tensors in self._tensors(blob, num_tokens):
            tensors[:, : _TENSOR.size] = run.header

    def _check(self, blob: Bytes, num_tokens: int) -> None:
        """Raises ValueError unless `blob` is positions 0..num_tokens-1 in this layout."""
        if blob.size != self.blob_bytes(num_tokens):
            raise ValueError(
                f"{num_tokens} tokens make {self.blob_bytes(num_tokens)} bytes; got {blob.size}"
            )
        start, _ = _find_cells(blob, self.num_streams)
        cells = blob[start : start + num_tokens * _CELL.itemsize].view(_CELL)
        if not np.array_equal(cells["position"], np.arange(num_tokens)):
            raise ValueError("cells are not in the order of their positions")
        for run, tensors in self._tensors(blob, num_tokens):
            if (tensors[:, : _TENSOR.size] != run.header).any():
                raise ValueError("tensors have other types or shapes")

    def _pieces(
        self, blob: Bytes, num_tokens: int, first_token: int, block: Bytes
    ) -> Iterator[tuple[Bytes, Bytes]]:
        """Per run: its part of a block, and the same rows in the blob of `num_tokens`."""
        block_tokens = block.size // self.token_bytes
        start = 0
        for run, tensors in self._tensors(blob, num_tokens):
            width = block_tokens * run.row_bytes
            end = start + run.num_tensors * width
            rows_at = _TENSOR.size + first_token * run.row_bytes
            yield (
                block[start:end].reshape(run.num_tensors, width),
                tensors[:, rows_at : rows_at + width],
            )
            start = end

    def _tensors(self, blob: Bytes, num_tokens: int) -> Iterator[tuple[TensorRun, Bytes]]:
        """Per run: its part of the blob, shape (num_tensors, header and rows)."""
        cells_at, _ = _find_cells(blob, self.num_streams)
        start = cells_at + num_tokens * _CELL.itemsize + _TENSORS.size
        for run in self.runs:
            width = _TENSOR.size + num_tokens * run.row_bytes
            end = start + run.num_tensors * width
            yield run, blob[start:end].reshape(run.num_tensors, width)
            start = end


def _unpack(form: struct.Struct, blob: Bytes, offset: int) -> tuple[int, ...]:
    if offset + form.size > blob.size:
        raise ValueError(f"{blob.size} bytes end early")
    return form.unpack_from(blob.data, offset)


def _find_cells(blob: Bytes, num_streams: int) -> tuple[int, int]:
    """Where the cells begin, and how many there are."""
    offset = _PREAMBLE.size
    for _ in range(num_streams):
        (num_cells,) = _unpack(_COUNT, blob, offset)
        offset += _COUNT.size
        if num_cells:
            return offset, num_cells
    raise ValueError("the sequence is empty")
