"""The prompts of some minutes as token ids, and which of their blocks were dropped where. Pure.

`PromptStore` hears what routers and holders of KV tell; `snapshot()` gives the values that
`services.observer.why` and `services.observer.hygiene` work on, in any thread.

A block has two names. Its prefix key is what caches know it by: other for each tenant and
salt. Its content name is the same for the same tokens from the very start, whoever's.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from services.core.tokens import BYTES_PER_TOKEN, TokenArray

MAX_PROMPTS = 4096
# Of all that is kept of them, each block once.
MAX_BYTES = 64 << 20
# Of one prompt: what is behind them is not kept.
MAX_BLOCKS = 8192
MAX_EVICTIONS = 65_536
# Times remembered at which one holder dropped one block.
MAX_TIMES = 4
CONTENT_BYTES = 16
# About what a key, or a content's name, takes as an object in a table; and a block in a prompt.
_NAME_BYTES, _PLACE_BYTES = 160, 24

Evictions: TypeAlias = Mapping[tuple[str, bytes], Sequence[float]]
_LatestEvictions: TypeAlias = OrderedDict[tuple[str, bytes], tuple[float, ...]]


class ToldPrompt(NamedTuple):
    """As a router tells it."""

    # Of the router's hop.
    trace_id: str
    span_id: str
    # The chain's root, then one for each full block.
    prefix_keys: Sequence[bytes]
    # Those before are in blocks that were told.
    first_token: int
    # Packed; it may end early where there were very many.
    token_ids: bytes
    tenant: str
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPrompt:
    """One prompt. `contents` and `blocks` are shorter than `prefix_keys` where not all of its
    tokens were told; then there is no `tail` either.
    """

    trace_id: str
    span_id: str
    # In the order in which they were told, which is that of the requests' ends.
    number: int
    # By the observer's clock.
    heard_unix_s: float
    tenant: str
    block_tokens: int
    # Of the chain: model, tenant and salt.
    root: bytes
    # Of its full blocks, as are the next two.
    prefix_keys: tuple[bytes, ...]
    contents: tuple[bytes, ...]
    # Packed ids.
    blocks: tuple[bytes, ...]
    tail: bytes

    @property
    def is_whole(self) -> bool:
        return len(self.blocks) == len(self.prefix_keys)

    @property
    def token_ids(self) -> TokenArray:
        """Those that were told, from the start."""
        return np.frombuffer(b"".join((*self.blocks, self.tail)), "<u4")


class Prompts(NamedTuple):
    """What is known at one time, in the order in which it was told."""

    kept: Sequence[KeptPrompt]
    # (holder, prefix key) to the times at which it dropped the block, by the observer's clock.
    evictions: Evictions
    # Older prompts were told too, and are forgotten.
    has_forgotten: bool
    # As `evictions`, of KV stores: a block that neither their memory nor Redis has any more.
    store_evictions: Evictions


class PromptStore:
    """The latest prompts, and the latest evictions, each bounded."""

    def __init__(
        self,
        *,
        max_prompts: int = MAX_PROMPTS,
        max_bytes: int = MAX_BYTES,
        max_evictions: int = MAX_EVICTIONS,
    ) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._max_evictions = max_evictions
        self._kept: deque[KeptPrompt] = deque()
        self._numbers = itertools.count()
        # Content name to packed ids; prefix key to itself, as the one object that all prompts
        # have of it, and to its content name.
        self._packed: dict[bytes, bytes] = {}
        self._content_of: dict[bytes, tuple[bytes, bytes]] = {}
        # How many kept prompts have the content, and the key.
        self._uses: dict[bytes, int] = {}
        self._num_bytes = 0
        self._has_forgotten = False
        # Apart: a store that is cleared must not push out what workers told.
        self._evictions, self._store_evictions = _LatestEvictions(), _LatestEvictions()

    def hear(self, told: ToldPrompt, now_unix_s: float) -> None:
        """Raises ValueError for what makes no sense."""
        if not told.prefix_keys or told.block_tokens < 1 or len(told.token_ids) % BYTES_PER_TOKEN:
            raise ValueError("a prompt needs a root key, block_tokens, and whole token ids")
        if told.first_token % told.block_tokens:
            raise ValueError("first_token must be the first of a block")
        if told.first_token // told.block_tokens >= len(told.prefix_keys):
            raise ValueError("first_token must not be behind the blocks that have keys")
        root, *keys = told.prefix_keys[: 1 + MAX_BLOCKS]
        # So that what is cut off shows, it is never whole.
        known = keys if len(keys) == len(told.prefix_keys) - 1 else keys[:-1]
        contents, blocks = self._find(told, known)
        is_whole = len(blocks) == len(told.prefix_keys) - 1
        keys = [self._content_of.get(key, (key,))[0] for key in keys]
        prompt = KeptPrompt(
            trace_id=told.trace_id,
            span_id=told.span_id,
            number=next(self._numbers),
            heard_unix_s=now_unix_s,
            tenant=told.tenant,
            block_tokens=told.block_tokens,
            root=root,
            prefix_keys=tuple(keys),
            contents=tuple(contents),
            blocks=tuple(blocks),
            tail=_tail(told, len(keys)) if is_whole else b"",
        )
        self._kept.append(prompt)
        self._hold(prompt)
        while len(self._kept) > self._max_prompts or self._num_bytes > self._max_bytes:
            self._drop(self._kept.popleft())
            self._has_forgotten = True

    def hear_evictions(
        self,
        holder_id: str,
        prefix_keys: Iterable[bytes],
        now_unix_s: float,
        *,
        of_store: bool = False,
    ) -> None:
        latest = self._store_evictions if of_store else self._evictions
        for key in prefix_keys:
            name = (holder_id, key)
            times = latest.pop(name, ())
            latest[name] = (*times, now_unix_s)[-MAX_TIMES:]
        while len(latest) > self._max_evictions:
            latest.popitem(last=False)

    def snapshot(self) -> Prompts:
        return Prompts(
            tuple(self._kept),
            dict(self._evictions),
            self._has_forgotten,
            dict(self._store_evictions),
        )

    def check_integrity(self) -> None:
        uses: dict[bytes, int] = {}
        for prompt in self._kept:
            for name in (*prompt.contents, *prompt.prefix_keys[: len(prompt.contents)]):
                uses[name] = uses.get(name, 0) + 1
        assert uses == self._uses
        assert self._packed.keys() | self._content_of.keys() == uses.keys()
        num_bytes = sum(map(len, self._packed.values())) + len(uses) * _NAME_BYTES
        num_bytes += sum(map(_own_bytes, self._kept))
        assert num_bytes == self._num_bytes
        assert len(self._kept) <= self._max_prompts
        assert len(self._evictions) <= self._max_evictions
        assert len(self._store_evictions) <= self._max_evictions

    def _find(self, told: ToldPrompt, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Contents and ids of the full blocks, up to the first that is not known."""
        block_bytes = told.block_tokens * BYTES_PER_TOKEN
        begin = -told.first_token * BYTES_PER_TOKEN
        contents: list[bytes] = []
        blocks: list[bytes] = []
        name = b""
        for place, key in enumerate(keys):
            start = begin + place * block_bytes
            if start >= 0:
                packed = told.token_ids[start : start + block_bytes]
                if len(packed) < block_bytes:
                    break
                name = hashlib.blake2b(name + packed, digest_size=CONTENT_BYTES).digest()
                packed = self._packed.get(name, packed)
            elif key in self._content_of:
                _, name = self._content_of[key]
                packed = self._packed[name]
            else:
                break
            contents.append(name)
            blocks.append(packed)
        return contents, blocks

    def _hold(self, prompt: KeptPrompt) -> None:
        self._num_bytes += _own_bytes(prompt)
        # Without `strict`: of a prompt that is not whole, only what is known.
        for key, name, packed in zip(
            prompt.prefix_keys, prompt.contents, prompt.blocks, strict=False
        ):
            if name not in self._packed:
                self._packed[name] = packed
                self._num_bytes += len(packed) + _NAME_BYTES
            if key not in self._content_of:
                self._content_of[key] = (key, name)
                self._num_bytes += _NAME_BYTES
            self._uses[name] = self._uses.get(name, 0) + 1
            self._uses[key] = self._uses.get(key, 0) + 1

    def _drop(self, prompt: KeptPrompt) -> None:
        self._num_bytes -= _own_bytes(prompt)
        for key, name in zip(prompt.prefix_keys, prompt.contents, strict=False):
            if self._release(name):
                self._num_bytes -= len(self._packed.pop(name)) + _NAME_BYTES
            if self._release(key):
                del self._content_of[key]
                self._num_bytes -= _NAME_BYTES

    def _release(self, name: bytes) -> bool:
        """Whether nobody uses it any more."""
        self._uses[name] -= 1
        if self._uses[name]:
            return False
        del self._uses[name]
        return True


def _own_bytes(prompt: KeptPrompt) -> int:
    """Beside the blocks that it may share with others."""
    unknown = len(prompt.prefix_keys) - len(prompt.contents)
    return len(prompt.tail) + len(prompt.prefix_keys) * _PLACE_BYTES + unknown * _NAME_BYTES


def _tail(told: ToldPrompt, num_blocks: int) -> bytes:
    start = (num_blocks * told.block_tokens - told.first_token) * BYTES_PER_TOKEN
    return told.token_ids[max(0, start) :]
