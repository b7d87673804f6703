"""A sorted collection that also folds what its members measure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Measure = TypeVar("Measure")


class _Node(Generic[Key, Measure]):
    __slots__ = ("folded", "key", "left", "measure", "priority", "right")

    def __init__(self, key: Key, measure: Measure, priority: float) -> None:
        self.key = key
        self.measure = measure
        # Of this node and all below it.
        self.folded = measure
        self.priority = priority
        self.left: _Node[Key, Measure] | None = None
        self.right: _Node[Key, Measure] | None = None


class Ranking(Generic[Key, Measure]):
    """Measures under unique, comparable keys. Every operation takes time as log of their number.

    `combine` joins two measures; how they are grouped does not matter. A treap: a
    search tree that is a heap by random priorities, hence balanced.
    """

    def __init__(self, combine: Callable[[Measure, Measure], Measure]) -> None:
        self._combine = combine
        # Priorities shape the tree and no answer.
        self._random = random.Random(0).random
        self._root: _Node[Key, Measure] | None = None
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[tuple[Key, Measure]]:
        """In the order of the keys."""
        above: list[_Node[Key, Measure]] = []
        node = self._root
        while node is not None or above:
            while node is not None:
                above.append(node)
                node = node.left
            node = above.pop()
            yield node.key, node.measure
            node = node.right

    def add(self, key: Key, measure: Measure) -> None:
        self._root = self._insert(self._root, _Node(key, measure, self._random()))
        self._len += 1

    def remove(self, key: Key) -> None:
        """Raises KeyError."""
        self._root = self._without(self._root, key)
        self._len -= 1

    def first(self) -> Measure | None:
        node = self._root
        while node is not None and node.left is not None:
            node = node.left
        return None if node is None else node.measure

    def fold(self) -> Measure | None:
        """Of all; None when there is none."""
        return None if self._root is None else self._root.folded

    def fold_to(self, bound: Any) -> Measure | None:
        """Of those whose key is at most `bound`."""
        total: Measure | None = None
        node = self._root
        while node is not None:
            if node.key > bound:
                node = node.left
                continue
            head = node.measure
            if node.left is not None:
                head = self._combine(node.left.folded, head)
            total = head if total is None else self._combine(total, head)
            node = node.right
        return total

    def check_integrity(self) -> None:
        assert self._check(self._root) == self._len
        keys: list[Any] = [key for key, _ in self]
        assert all(low < high for low, high in itertools.pairwise(keys))

    def _insert(
        self, node: _Node[Key, Measure] | None, new: _Node[Key, Measure]
    ) -> _Node[Key, Measure]:
        if node is None:
            return new
        if new.priority > node.priority:
            new.left, new.right = self._split(node, new.key)
            return self._folded(new)
        key: Any = new.key
        if key < node.key:
            node.left = self._insert(node.left, new)
        else:
            node.right = self._insert(node.right, new)
        return self._folded(node)

    def _split(
        self, node: _Node[Key, Measure] | None, key: Any
    ) -> tuple[_Node[Key, Measure] | None, _Node[Key, Measure] | None]:
        """Those before `key`, and the others."""
        if node is None:
            return None, None
        if node.key < key:
            node.right, rest = self._split(node.right, key)
            return self._folded(node), rest
        head, node.left = self._split(node.left, key)
        return head, self._folded(node)

    def _without(self, node: _Node[Key, Measure] | None, key: Any) -> _Node[Key, Measure] | None:
        if node is None:
            raise KeyError(key)
        if node.key == key:
            return self._merge(node.left, node.right)
        if key < node.key:
            node.left = self._without(node.left, key)
        else:
            node.right = self._without(node.right, key)
        return self._folded(node)

    def _merge(
        self, low: _Node[Key, Measure] | None, high: _Node[Key, Measure] | None
    ) -> _Node[Key, Measure] | None:
        if low is None or high is None:
            return low or high
        if low.priority > high.priority:
            low.right = self._merge(low.right, high)
            return self._folded(low)
        high.left = self._merge(low, high.left)
        return self._folded(high)

    def _folded(self, node: _Node[Key, Measure]) -> _Node[Key, Measure]:
        folded = node.measure
        if node.left is not None:
            folded = self._combine(node.left.folded, folded)
        if node.right is not None:
            folded = self._combine(folded, node.right.folded)
        node.folded = folded
        return node

    def _check(self, node: _Node[Key, Measure] | None) -> int:
        if node is None:
            return 0
        folded = node.folded
        assert self._folded(node).folded == folded
        children = [child for child in (node.left, node.right) if child is not None]
        assert all(child.priority <= node.priority for child in children)
        return 1 + sum(self._check(child) for child in children)
