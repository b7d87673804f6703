"""Prompts through a model of the workers' caches, whole or with parts cut out. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from services.core.block_cache import Cache
from services.core.keys import extend_keys
from services.core.tokens import BYTES_PER_TOKEN, TokenArray
from services.observer.families import Site, Span, cut
from services.observer.past import Past

# Between the measured hit rate and the model's.
FAITHFUL_WITHIN = 0.03
# Choose by where prefixes are; the first also by how much each worker has had to compute.
_EVEN = "kv_aware"
_BY_PREFIX = (_EVEN, "prefix_aware")


class Chained(NamedTuple):
    """A prompt, as a cache sees it."""

    chain: Sequence[bytes]
    num_tokens: int
    block_tokens: int
    worker_id: str

    @property
    def usable(self) -> Sequence[bytes]:
        """The last token is computed in any case."""
        return self.chain[: max(0, self.num_tokens - 1) // self.block_tokens]


class CacheModel:
    """Asked again and again with other places cut out.

    `spans`: by prompt, those that may be cut. Hit rates are of the prompts from `first_counted`
    on: those before only fill the caches.
    """

    def __init__(
        self,
        past: Sequence[Past],
        token_ids: Sequence[TokenArray],
        spans: Mapping[int, Sequence[Span]],
        *,
        cache_blocks: int | None,
        first_counted: int,
    ) -> None:
        self._past = past
        self._token_ids = token_ids
        self._spans = spans
        self._cache_blocks = cache_blocks
        self._first_counted = first_counted
        self._requests = [each.request for each in past if each.request is not None]

    def measured(self) -> float:
        return _share(
            (each.cached_tokens, each.prompt_tokens)
            for each in self._requests[self._first_counted :]
        )

    def predicted(self, sites: Collection[Site], before: float, measured: float) -> float:
        """As the model has it, less what the mesh failed to reuse of what the model has now."""
        if not sites:
            return measured
        after = self.hit_rate(sites)
        return after * min(1.0, measured / before) if before >= FAITHFUL_WITHIN else after

    def hit_rate(self, sites: Collection[Site]) -> float:
        """With what is at `sites` cut out of all prompts."""
        gone = frozenset(sites)
        chained = [self._chained(number, gone) for number in range(len(self._past))]
        return _share(self._replay(chained)[self._first_counted :])

    def _chained(self, number: int, gone: Collection[Site]) -> Chained:
        past, ids = self._past[number], self._token_ids[number]
        prompt = past.prompt
        spans = [span for span in self._spans.get(number, ()) if span.site in gone]
        if not any(span.end > span.start for span in spans):
            return Chained(prompt.prefix_keys, len(ids), prompt.block_tokens, past.worker_id)
        packed = cut(ids, spans)
        chain = extend_keys(prompt.root, packed, prompt.block_tokens)
        num_tokens = len(packed) // BYTES_PER_TOKEN
        return Chained(chain, num_tokens, prompt.block_tokens, past.worker_id)

    def _replay(self, chained: Sequence[Chained]) -> list[tuple[int, int]]:
        """Cached and all tokens of each prompt, one after the other."""
        strategy = self._requests[-1].strategy
        caches = {each.worker_id: Cache(self._cache_blocks) for each in chained}
        computed = dict.fromkeys(caches, 0)
        results = []
        for each in chained:
            chosen = each.worker_id
            if strategy in _BY_PREFIX:
                costs = {
                    worker: each.num_tokens - cache.match(each.usable) * each.block_tokens
                    for worker, cache in caches.items()
                }
                if strategy == _EVEN:
                    costs = {worker: cost + computed[worker] for worker, cost in costs.items()}
                # Of equals, where it went.
                chosen = min(costs, key=lambda worker: (costs[worker], worker != each.worker_id))
            cached = caches[chosen].match(each.usable) * each.block_tokens
            caches[chosen].use(each.chain)
            computed[chosen] += each.num_tokens - cached
            results.append((cached, each.num_tokens))
        return results


def _share(pairs: Any) -> float:
    cached, total = map(sum, zip(*pairs, strict=True))
    return cached / total if total else 0.0
