"""Requests through workers' caches that are models, told to an observer as routers tell them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from router.prompt import Prompt
from router.telling import Telling
from services.core.block_cache import Cache
from services.core.keys import extend_keys, join_keys, root_key
from services.core.tokens import pack
from services.observer.hearing import read_prompt
from services.observer.model import Member, Request, Window
from services.observer.prompts import Prompts, PromptStore
from tests.observer.made import a_hop, a_request

START_S = 1_800_000_000.0
TTFT_S, DURATION_S = 0.05, 0.2
# The router's clock is that much behind the observer's.
CLOCK_BEHIND_S = 40.0


class Traffic:
    """Requests come a second after each other, and each ends before the next, unless told."""

    def __init__(self, *, block_tokens: int = 16, cache_blocks: int | None = None) -> None:
        self.block_tokens = block_tokens
        self.store = PromptStore()
        self.requests: list[Request] = []
        self.now_s = START_S
        self.members = ("w1", "w2")
        # And their hosts; workers are at "h".
        self.stores: tuple[tuple[str, str], ...] = ()
        self._caches: dict[str, Cache] = defaultdict(lambda: Cache(cache_blocks))
        self._telling = Telling()
        self._numbers = itertools.count(1)

    def ask(
        self,
        token_ids: Sequence[int],
        *,
        worker_id: str = "w1",
        tenant: str = "",
        cache_salt: str = "",
        pause_s: float = 1.0,
        tell_s: float = 0.0,
        **changes: Any,
    ) -> str:
        """Its trace id. What was cached comes from the model, unless `changes` say it."""
        number = next(self._numbers)
        trace_id, span_id = f"{number:032x}", f"{number:016x}"
        root = root_key(model="m", block_tokens=self.block_tokens, tenant=tenant, salt=cache_salt)
        packed = pack(token_ids)
        keys = extend_keys(root, packed, self.block_tokens)
        cache = self._caches[worker_id]
        usable = keys[: max(0, len(token_ids) - 1) // self.block_tokens]
        cached = cache.match(usable) * self.block_tokens
        cache.use(keys)
        duration_s = changes.get("duration_s", DURATION_S)
        hop = a_hop(
            trace_id=trace_id,
            span_id=span_id,
            arrived_unix_s=self.now_s - CLOCK_BEHIND_S,
            ended_s=duration_s,
            first_token_s=TTFT_S,
        )
        fields: dict[str, Any] = {
            "trace_id": trace_id,
            "hops": (hop,),
            "arrived_unix_s": self.now_s,
            "ttft_s": TTFT_S,
            "duration_s": duration_s,
            "worker_id": worker_id,
            "tenant": tenant,
            "prompt_tokens": len(token_ids),
            "cached_tokens": cached,
            "predicted_tokens": cached,
        }
        request = a_request(**{**fields, **changes})
        self.requests.append(request)
        message = self._telling.message(
            Prompt(packed, join_keys([root, *keys]), self.block_tokens),
            trace_id=trace_id,
            span_id=span_id,
            tenant=tenant,
            now_s=self.now_s,
        )
        self.store.hear(read_prompt(message), self.now_s + duration_s + tell_s)
        self.store.check_integrity()
        self.now_s += pause_s
        return trace_id

    def keys(self, token_ids: Sequence[int]) -> list[bytes]:
        root = root_key(model="m", block_tokens=self.block_tokens)
        return extend_keys(root, pack(token_ids), self.block_tokens)

    def evict(self, worker_id: str, token_ids: Sequence[int]) -> None:
        """Now, all blocks of a prompt."""
        self._caches.pop(worker_id, None)
        self.store.hear_evictions(worker_id, self.keys(token_ids), self.now_s)

    def evict_below(self, token_ids: Sequence[int], *, store_id: str = "kv1") -> None:
        """The KV store drops them."""
        self.store.hear_evictions(store_id, self.keys(token_ids), self.now_s, of_store=True)

    @property
    def window(self) -> Window:
        return Window(
            begin_unix_s=START_S,
            end_unix_s=self.now_s,
            requests=tuple(self.requests),
            readings=(),
            bubbles=(),
            members=(
                *(Member(each, "worker", "ready", "", "h", 1, "") for each in self.members),
                *(Member(each, "kvstore", "ready", "", host, 1, "") for each, host in self.stores),
            ),
            generations=(),
        )

    @property
    def prompts(self) -> Prompts:
        return self.store.snapshot()

    @property
    def hit_rate(self) -> float:
        return sum(each.cached_tokens for each in self.requests) / sum(
            each.prompt_tokens for each in self.requests
        )
