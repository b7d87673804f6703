"""What an engine's slots hold, and the calls that it could not survive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.engines.contract import Bytes, EngineFailure, EngineInfo, Work


class Slots:
    """The number of tokens in each slot.

    Engines ask it before they act: llama.cpp ends the process at an unknown slot,
    and takes wrong positions for granted in a transfer.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._lengths = [0] * info.num_slots

    def require(self, slot: int) -> None:
        if not 0 <= slot < len(self._lengths):
            raise EngineFailure(f"slot {slot} is not one of 0..{len(self._lengths) - 1}")

    def length(self, slot: int) -> int:
        self.require(slot)
        return self._lengths[slot]

    def lengths_after(self, batch: Sequence[Work]) -> dict[int, int]:
        """Slot to length once `batch` is evaluated. Raises EngineFailure if it cannot be."""
        lengths: dict[int, int] = {}
        for work in batch:
            length = lengths.get(work.slot, self.length(work.slot))
            if work.position != length:
                raise EngineFailure(
                    f"slot {work.slot} holds {length} tokens; position {work.position} is not next"
                )
            if not len(work.tokens):
                raise EngineFailure(f"no tokens to evaluate in slot {work.slot}")
            lengths[work.slot] = self._within_context(work.slot, length + len(work.tokens))
        return lengths

    def update(self, lengths: Mapping[int, int]) -> None:
        for slot, length in lengths.items():
            self._lengths[slot] = length

    def require_length(self, slot: int, length: int) -> None:
        """To be cut down to it."""
        if not 0 <= length <= self.length(slot):
            raise EngineFailure(
                f"slot {slot} holds {self.length(slot)} tokens, and cannot be cut to {length}"
            )

    def check_export(self, slot: int, first: int, blocks: Sequence[Bytes]) -> None:
        length = self.length(slot)
        end = first * self._info.block_tokens + self._num_tokens(blocks)
        if first < 0 or end > length:
            raise EngineFailure(
                f"slot {slot} holds {length} tokens; those up to {end} from block {first} on"
                " are not all there"
            )

    def length_after_append(self, slot: int, blocks: Sequence[Bytes]) -> int:
        """Tokens in `slot` once `blocks` are added. Raises EngineFailure if they cannot be."""
        length = self.length(slot)
        if length % self._info.block_tokens:
            raise EngineFailure(
                f"slot {slot} holds {length} tokens, which are no whole blocks of"
                f" {self._info.block_tokens}"
            )
        return self._within_context(slot, length + self._num_tokens(blocks))

    def _within_context(self, slot: int, length: int) -> int:
        if length > self._info.max_context_tokens:
            raise EngineFailure(
                f"slot {slot} would hold {length} tokens; its context is"
                f" {self._info.max_context_tokens}"
            )
        return length

    def _num_tokens(self, blocks: Sequence[Bytes]) -> int:
        """Whole blocks, the last of which may be whole tokens only."""
        for index, block in enumerate(blocks):
            last = index == len(blocks) - 1
            whole = block.shape == (self._info.block_bytes,)
            part = last and block.ndim == 1 and 0 < block.size < self._info.block_bytes
            if not whole and not (part and block.size % self._info.token_bytes == 0):
                raise EngineFailure(
                    f"a block is {self._info.block_bytes} bytes, {self._info.token_bytes} a token;"
                    f" got shape {block.shape}"
                )
        return sum(block.size for block in blocks) // self._info.token_bytes
