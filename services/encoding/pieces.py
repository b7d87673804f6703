"""From text to packed ids, at the cost of what is new. Pure, and safe to use from several threads.

A text is taken apart where that changes no id (`borders`), and the pieces whose ids are known
are not encoded again: all of a chat but its last message, or of a text that has grown but its
end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from tokenizers import Tokenizer

from services.core.tokens import BYTES_PER_TOKEN, pack
from services.encoding.borders import read_borders
from services.encoding.metrics import CacheCounts

# The library encodes several texts on all cores. Of shorter ones, waking them costs more.
PARALLEL_CHARACTERS = 16_384
# Of an entry, beside text and ids: its key, its node and its share of the table.
ENTRY_BYTES = 320

_Key: TypeAlias = tuple[bytes, str]


class PieceCache:
    """Ids of the pieces used last.

    A piece is found only under the root under which it was kept, which tenant and salt make: how
    long a prompt takes says nothing of what other tenants send.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: OrderedDict[_Key, bytes] = OrderedDict()
        self._hit_tokens = 0
        self._miss_tokens = 0
        self._num_bytes = 0

    @property
    def counts(self) -> CacheCounts:
        return CacheCounts(self._hit_tokens, self._miss_tokens, self._num_bytes)

    def find(self, root: bytes, pieces: Iterable[str]) -> list[bytes | None]:
        with self._lock:
            found = [self._use((root, piece)) for piece in pieces]
            self._hit_tokens += sum(len(ids) for ids in found if ids) // BYTES_PER_TOKEN
        return found

    def keep(self, root: bytes, new: Iterable[tuple[str, bytes]], *, max_bytes: int) -> None:
        """Afterwards, at most `max_bytes` are held."""
        with self._lock:
            for piece, ids in new:
                self._miss_tokens += len(ids) // BYTES_PER_TOKEN
                if _size(piece, ids) <= max_bytes:
                    self._drop((root, piece))
                    self._ids[root, piece] = ids
                    self._num_bytes += _size(piece, ids)
            while self._num_bytes > max_bytes:
                self._drop(next(iter(self._ids)))

    def check_integrity(self) -> None:
        with self._lock:
            held = sum(_size(piece, ids) for (_, piece), ids in self._ids.items())
            assert held == self._num_bytes, (held, self._num_bytes)

    def _use(self, key: _Key) -> bytes | None:
        ids = self._ids.get(key)
        if ids is not None:
            self._ids.move_to_end(key)
        return ids

    def _drop(self, key: _Key) -> None:
        ids = self._ids.pop(key, None)
        if ids is not None:
            self._num_bytes -= _size(key[1], ids)


def _size(piece: str, ids: bytes) -> int:
    # Beside its own form, CPython keeps the UTF-8 that was once asked for.
    bytes_per_character = 1 if piece.isascii() else 6
    return len(piece) * bytes_per_character + len(ids) + ENTRY_BYTES


class Draft(NamedTuple):
    """A prompt of which is known what of it is new, before that is encoded."""

    # None: that is not known.
    new: Sequence[str] | None
    # To packed ids.
    finish: Callable[[], bytes]


class PieceEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._borders = read_borders(tokenizer)
        self._added_ids = self._borders.added_ids if self._borders else {}
        self._cache = PieceCache()

    @property
    def counts(self) -> CacheCounts:
        return self._cache.counts

    def begin(self, text: str, root: bytes, *, max_bytes: int) -> Draft:
        """`max_bytes` of the cache; 0: the text stays whole, and nothing is kept."""
        if max_bytes:
            pieces = self._borders.pieces(text) if self._borders else [text]
            ids = self._known(pieces, root)
        else:
            pieces, ids = [text], [None]
        pairs = zip(pieces, ids, strict=True)
        # One that comes more than once is encoded once.
        new = list(dict.fromkeys(piece for piece, its_ids in pairs if its_ids is None))
        return Draft(new, lambda: self._finish(pieces, ids, new, root, max_bytes))

    def _known(self, pieces: Sequence[str], root: bytes) -> list[bytes | None]:
        texts = [piece for piece in pieces if piece not in self._added_ids]
        found = iter(self._cache.find(root, texts))
        return [self._added_ids.get(piece) or next(found) for piece in pieces]

    def _finish(
        self,
        pieces: Sequence[str],
        ids: Sequence[bytes | None],
        new: Sequence[str],
        root: bytes,
        max_bytes: int,
    ) -> bytes:
        encoded = dict(zip(new, self._encode(new), strict=True))
        self._cache.keep(root, encoded.items(), max_bytes=max_bytes)
        pairs = zip(pieces, ids, strict=True)
        return b"".join(encoded[piece] if its_ids is None else its_ids for piece, its_ids in pairs)

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        if sum(map(len, texts)) >= PARALLEL_CHARACTERS:
            batches = [list(texts)]
        else:
            batches = [[text] for text in texts]
        # `encode` would hold the GIL, and with it the event loop, until it is done.
        return [
            pack(encoding.ids)
            for batch in batches
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ]
