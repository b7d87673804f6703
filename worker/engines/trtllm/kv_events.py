"""From the engine's KV cache events to the mesh's prefix keys. Pure.

The events of TensorRT-LLM 1.2.1 name blocks by hashes of the engine's own, and say which
tokens are in them, not for whom (no salt, no LoRA): so whose they are is found by what this
worker has submitted. A block is somebody's when all that was submitted of its tokens, from the
very start of a prompt, had one root; what follows such a block is the same one's. Where several
roots would do, nothing is reported.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from services.core.tokens import TokenArray
from worker.messages import StoredBlock

# No place in memory that could be read.
NOWHERE = -1
DIGEST_BYTES = 16


class Changes(NamedTuple):
    stored: list[StoredBlock]
    evicted: list[bytes]


class Submissions:
    """The roots under which runs of tokens were submitted, of the latest `most` prompts."""

    def __init__(self, *, tokens_per_block: int, most: int = 4096) -> None:
        self._tokens_per_block = tokens_per_block
        self._most = most
        # By digest of all tokens up to a block's end: how many submissions of each root.
        self._roots: dict[bytes, dict[bytes, int]] = {}
        self._latest: OrderedDict[int, tuple[bytes, list[bytes]]] = OrderedDict()
        self._next = 0

    def add(self, root: bytes, token_ids: TokenArray) -> None:
        """`root`: stands for whoever may share it; empty where nobody may."""
        digests = []
        digest = b""
        for start in range(0, len(token_ids) - self._tokens_per_block + 1, self._tokens_per_block):
            digest = extend_digest(digest, token_ids[start : start + self._tokens_per_block])
            counts = self._roots.setdefault(digest, {})
            counts[root] = counts.get(root, 0) + 1
            digests.append(digest)
        self._latest[self._next] = (root, digests)
        self._next += 1
        while len(self._latest) > self._most:
            self._forget(*self._latest.popitem(last=False)[1])

    def roots(self, digest: bytes) -> frozenset[bytes]:
        return frozenset(self._roots.get(digest, ()))

    def _forget(self, root: bytes, digests: Sequence[bytes]) -> None:
        for digest in digests:
            counts = self._roots[digest]
            counts[root] -= 1
            if not counts[root]:
                del counts[root]
            if not counts:
                del self._roots[digest]


@dataclass(slots=True, eq=False)
class _Block:
    """A block of the engine's. `digest`: of all tokens up to its end."""

    parent: _Block | None
    index: int
    token_ids: TokenArray
    digest: bytes
    # Whose it may be. Empty: nobody's that is known.
    roots: frozenset[bytes]
    held: bool = True
    # The block of the mesh that ends with it, while that is reported.
    key: bytes = b""
    children: list[_Block] = field(default_factory=list)


class KvEvents:
    """What the engine holds, as far as its events tell, and which of the mesh's blocks those are.

    A block of the mesh is `per_block` blocks of the engine, and held when all of them are.
    """

    def __init__(self, submissions: Submissions, *, tokens_per_block: int, per_block: int) -> None:
        self._submissions = submissions
        self._tokens_per_block = tokens_per_block
        self._per_block = per_block
        self._blocks: dict[int, _Block] = {}
        self._keys: dict[bytes, _Block] = {}
        self._last_id: int | None = None
        self._window = 0
        # For whoever watches: events lost; blocks that might be several callers'.
        self.num_gaps = 0
        self.num_ambiguous = 0

    @property
    def num_keys(self) -> int:
        """Blocks of the mesh that are reported."""
        return len(self._keys)

    def num_held(self, prefix_keys: Sequence[bytes]) -> int:
        """How many of these blocks are held, from the first without a gap."""
        for count, key in enumerate(prefix_keys):
            if key not in self._keys:
                return count
        return len(prefix_keys)

    def apply(self, event: Mapping[str, Any]) -> Changes:
        changes = Changes([], [])
        if event.get("attention_dp_rank"):
            return changes  # another cache, which requests reach by chance
        event_id = event["event_id"]
        if self._last_id is not None and event_id != self._last_id + 1:
            self.num_gaps += 1
            changes.evicted.extend(self._start_over())
        self._last_id = event_id
        # Layers of a smaller window forget earlier: what the largest holds is the prefix.
        window = event.get("window_size") or 0
        if window < self._window:
            return changes
        if window > self._window:
            self._window = window
            changes.evicted.extend(self._start_over())
        data = event["data"]
        match data.get("type"):
            case "stored":
                self._store(data, changes)
            case "removed":
                for block_hash in data["block_hashes"]:
                    self._remove(self._blocks.pop(block_hash, None), changes)
            case _:
                pass  # created, updated: what moves to another memory is held there
        return changes

    def _start_over(self) -> list[bytes]:
        """There is no way to ask the engine what it holds: forget all of it."""
        keys = list(self._keys)
        self._blocks.clear()
        self._keys.clear()
        return keys

    def _store(self, data: Mapping[str, Any], changes: Changes) -> None:
        parent_hash = data.get("parent_hash")
        parent = self._blocks.get(parent_hash) if parent_hash else None
        if parent_hash and parent is None:
            return  # what is before it is not known, so neither is what it is
        for stored in data["blocks"]:
            block = self._add(parent, stored)
            if block is None:
                return
            parent = block
            self._name(block, changes)

    def _add(self, parent: _Block | None, stored: Mapping[str, Any]) -> _Block | None:
        tokens = stored["tokens"]
        if len(tokens) != self._tokens_per_block:
            return None  # partial: it will come again when it is full
        if any(token.get("token_extra_id") for token in tokens):
            return None  # not of tokens alone
        known = self._blocks.get(stored["block_hash"])
        if known is not None:
            return known
        ids = np.array([token["token_id"] for token in tokens], dtype=np.uint32)
        digest = extend_digest(parent.digest if parent is not None else b"", ids)
        if parent is not None and len(parent.roots) == 1:
            roots = parent.roots
        else:
            roots = self._submissions.roots(digest)
            if parent is not None:
                roots &= parent.roots
        index = parent.index + 1 if parent is not None else 0
        block = _Block(parent, index, ids, digest, roots)
        self._blocks[stored["block_hash"]] = block
        if parent is not None:
            parent.children.append(block)
        self.num_ambiguous += len(roots) > 1
        return block

    def _name(self, block: _Block, changes: Changes) -> None:
        """Report the blocks of the mesh that end at or before it, as far as it is somebody's."""
        if len(block.roots) != 1:
            return
        (root,) = block.roots
        if not root:
            return  # nobody may share it
        path = _path(block)
        key = root
        for start in range(0, len(path) - self._per_block + 1, self._per_block):
            run = path[start : start + self._per_block]
            previous, key = key, run[-1].key or _next_key(key, run)
            for each in run:
                # Of a chain of hashes that one caller's block ends all are that caller's.
                each.roots = block.roots
            if not run[-1].key and all(each.held for each in run) and key not in self._keys:
                run[-1].key = key
                self._keys[key] = run[-1]
                before = previous if start else b""
                index = start // self._per_block
                changes.stored.append(StoredBlock(key, before, index, NOWHERE, 0))

    def _remove(self, block: _Block | None, changes: Changes) -> None:
        if block is None:
            return
        block.held = False
        if block.parent is not None:
            block.parent.children.remove(block)
        last = _last_of_run(block, self._per_block)
        for each in last:
            if each.key and self._keys.get(each.key) is each:
                del self._keys[each.key]
                changes.evicted.append(each.key)
                each.key = b""


def extend_digest(digest: bytes, token_ids: TokenArray) -> bytes:
    return hashlib.blake2b(digest + token_ids.tobytes(), digest_size=DIGEST_BYTES).digest()


def _next_key(key: bytes, run: Sequence[_Block]) -> bytes:
    packed = b"".join(block.token_ids.astype("<u4").tobytes() for block in run)
    return hashlib.sha256(key + packed).digest()


def _path(block: _Block | None) -> list[_Block]:
    path = []
    while block is not None:
        path.append(block)
        block = block.parent
    return path[::-1]


def _last_of_run(block: _Block, per_block: int) -> list[_Block]:
    """The blocks with which a block of the mesh ends that this one is part of."""
    level = [block]
    while level and (level[0].index + 1) % per_block:
        level = [child for each in level for child in each.children]
    return level
