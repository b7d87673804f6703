"""Which holders have which KV blocks, and which are on their way to them. Pure.

A holder is a bit; a block's key maps to the mask of its holders. Holders have whole
beginnings of prompts: whoever has a block has those before it, or nothing that helps. So a
prompt is matched by halving, in the logarithm of its length, not block by block.

A block is held because its holder said so, or expected because a request for it was sent
there; expectations are counted, and each is settled once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.core.keys import KEY_BYTES

# Of a key, as much as tells blocks apart: a collision costs one bad choice, no wrong answer.
SHORT_KEY_BYTES = 16
# Blocks of holders that have left, forgotten at a time.
SWEEP_BLOCKS = 512
# Distinct masks that are remembered.
MAX_MASKS = 1 << 16
# From this share of its bound on, blocks that are asked for are kept from being dropped.
PRESSURE = 0.9


class Reach(NamedTuple):
    """Holders that have exactly this much of a prompt."""

    num_blocks: int
    mask: int


class Holder:
    """One incarnation of one. Only the index changes it."""

    __slots__ = ("bit", "expected", "held", "is_present")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.is_present = True
        self.held: dict[bytes, None] = {}
        # How many requests will bring it.
        self.expected: dict[bytes, int] = {}

    @property
    def mask(self) -> int:
        return 1 << self.bit


class PrefixIndex:
    """At most `max_blocks` blocks, whoever holds them: those asked for longest ago go first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        # Equal masks are one object: with many holders a mask is long, and few differ.
        self._same: dict[int, int] = {}
        self._holders: list[Holder | None] = []
        self._free_bits: list[int] = []
        self._present = 0
        self._leaving: list[Holder] = []
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def max_blocks(self) -> int:
        return self._max_blocks

    def resize(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._drop_oldest()

    def join(self) -> Holder:
        if not self._free_bits:
            self._free_bits.append(len(self._holders))
            self._holders.append(None)
        holder = Holder(self._free_bits.pop())
        self._holders[holder.bit] = holder
        self._present |= holder.mask
        return holder

    def leave(self, holder: Holder) -> None:
        """It counts no more; its blocks are forgotten little by little. May be called twice."""
        if holder.is_present:
            holder.is_present = False
            self._present &= ~holder.mask
            self._leaving.append(holder)

    def sweep(self, num_blocks: int = SWEEP_BLOCKS) -> None:
        """Forget so many blocks of holders that have left."""
        while self._leaving and num_blocks > 0:
            holder = self._leaving[-1]
            for blocks in (holder.held, holder.expected):
                while blocks and num_blocks > 0:
                    key = blocks.popitem()[0]
                    if key not in holder.expected:
                        self._unset(key, holder.mask)
                    num_blocks -= 1
            if not holder.held and not holder.expected:
                self._leaving.pop()
                self._holders[holder.bit] = None
                self._free_bits.append(holder.bit)

    def hold(self, holder: Holder, keys: Iterable[bytes], most: int | None = None) -> None:
        """It has these now, in the order of their chain: its tail is the first to be dropped.

        Nobody's expectation any more: should they be evicted, they are not on their way.
        It can have no more than `most`: those that it told first are gone.
        """
        held, expected, mask = holder.held, holder.expected, holder.mask
        for key in reversed([key[:SHORT_KEY_BYTES] for key in keys]):
            held[key] = None
            expected.pop(key, None)
            self._set(key, mask)
        if most is not None and len(held) > most:
            self._trim(holder, most)
        self._drop_oldest()

    def drop(self, holder: Holder, keys: Iterable[bytes]) -> None:
        """It has these no more; those it does not have are passed over."""
        for key in keys:
            self._forget(holder, key[:SHORT_KEY_BYTES])

    def use(self, holder: Holder, prefix_keys: bytes, num_blocks: int, most: int) -> None:
        """For a holder that does not say what it has: it used the first `num_blocks` of a
        prompt, and has as many blocks as `most`, the least recently used gone.
        """
        held = _ordered(holder)
        for key in backwards(prefix_keys, num_blocks):
            held[key] = None
            held.move_to_end(key)
            self._set(key, holder.mask)
        self._trim(holder, most)
        self._drop_oldest()

    def expect(self, holder: Holder, keys: Sequence[bytes]) -> None:
        """A request will bring these there. `settle` it later, with the same keys."""
        expected, mask = holder.expected, holder.mask
        for key in reversed(keys):
            expected[key] = expected.get(key, 0) + 1
            self._set(key, mask)
        self._drop_oldest()

    def settle(self, holder: Holder, keys: Iterable[bytes]) -> None:
        """No longer expected: reported meanwhile, or not to come."""
        if not holder.is_present:
            return
        expected = holder.expected
        for key in keys:
            count = expected.pop(key, 0)
            if count > 1:
                expected[key] = count - 1
            elif count and key not in holder.held:
                self._unset(key, holder.mask)

    def match(self, prefix_keys: bytes) -> list[Reach]:
        """How much of a prompt each holder has, or is expected to have, the longest first.

        `prefix_keys`: the chain's root, then a key for each block.
        """
        num_blocks = len(prefix_keys) // KEY_BYTES - 1
        get, present = self._masks.get, self._present
        if len(self._masks) > PRESSURE * self._max_blocks:
            self._refresh(prefix_keys, num_blocks)

        def mask_of(block: int) -> int:
            start = (block + 1) * KEY_BYTES
            return get(prefix_keys[start : start + SHORT_KEY_BYTES], 0) & present

        if num_blocks <= 0 or not (first := mask_of(0)):
            return []
        found: list[Reach] = []
        # Between two places with different holders lies one where some of them end.
        spans = [(0, first, num_blocks, 0)]
        while spans:
            low, low_mask, high, high_mask = spans.pop()
            if low_mask == high_mask:
                continue
            if high - low == 1:
                found.append(Reach(high, low_mask & ~high_mask))
                continue
            middle = (low + high) // 2
            middle_mask = mask_of(middle) & low_mask | high_mask
            spans.append((low, low_mask, middle, middle_mask))
            spans.append((middle, middle_mask, high, high_mask))
        return found

    def check_integrity(self) -> None:
        assert len(self._masks) <= self._max_blocks
        for bit, holder in enumerate(self._holders):
            assert (holder is None) == (bit in self._free_bits)
            assert bool(self._present >> bit & 1) == (holder is not None and holder.is_present)
        for key, mask in self._masks.items():
            assert mask
            for bit in bits_of(mask):
                holder = self._holders[bit]
                assert holder is not None
                assert key in holder.held or key in holder.expected
        for holder in filter(None, self._holders):
            for key in (*holder.held, *holder.expected):
                assert self._masks[key] & holder.mask

    def _refresh(self, prefix_keys: bytes, num_blocks: int) -> None:
        masks = self._masks
        for key in backwards(prefix_keys, num_blocks):
            if key in masks:
                masks.move_to_end(key)

    def _set(self, key: bytes, mask: int) -> None:
        before = self._masks.get(key, 0)
        after = before | mask
        if after != before:
            self._masks[key] = self._shared(after)

    def _unset(self, key: bytes, mask: int) -> None:
        before = self._masks.get(key, 0)
        after = before & ~mask
        if not after:
            self._masks.pop(key, None)
        elif after != before:
            self._masks[key] = self._shared(after)

    def _shared(self, mask: int) -> int:
        if len(self._same) > MAX_MASKS:
            self._same.clear()
        return self._same.setdefault(mask, mask)

    def _forget(self, holder: Holder, key: bytes) -> None:
        if key in holder.held:
            del holder.held[key]
            if key not in holder.expected:
                self._unset(key, holder.mask)

    def _trim(self, holder: Holder, most: int) -> None:
        held = _ordered(holder)
        while len(held) > most:
            self._forget(holder, next(iter(held)))

    def _drop_oldest(self) -> None:
        while len(self._masks) > self._max_blocks:
            key, mask = self._masks.popitem(last=False)
            self.num_dropped += 1
            for bit in bits_of(mask):
                holder = self._holders[bit]
                assert holder is not None
                holder.held.pop(key, None)
                holder.expected.pop(key, None)


def _ordered(holder: Holder) -> OrderedDict[bytes, None]:
    """What leaves a plain dict at its front makes finding the next one slow."""
    if not isinstance(holder.held, OrderedDict):
        holder.held = OrderedDict(holder.held)
    return holder.held


def short_keys(prefix_keys: bytes, first: int = 0) -> list[bytes]:
    """The index's own keys of a prompt's blocks, from block `first` on."""
    return [
        prefix_keys[start : start + SHORT_KEY_BYTES]
        for start in range((first + 1) * KEY_BYTES, len(prefix_keys), KEY_BYTES)
    ]


def backwards(prefix_keys: bytes, num_blocks: int) -> Iterator[bytes]:
    """Its first `num_blocks`, the last of them first."""
    for start in range(num_blocks * KEY_BYTES, 0, -KEY_BYTES):
        yield prefix_keys[start : start + SHORT_KEY_BYTES]


def bits_of(mask: int) -> Iterator[int]:
    for place, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
        if byte:
            first = 8 * place
            for bit in _BITS[byte]:
                yield first + bit


_BITS = [tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256)]
