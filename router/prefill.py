"""Which worker computes a prompt for the worker that answers. Pure.

The choice is an offer: whether to take it, the decode worker decides, since it alone
knows what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.fleet import Worker
from router.kv_aware import KvAware
from router.prompt import Choice, Prompt
from router.strategies import Strategy, affinity, fingerprint
from services.core.settings import RouterSettings


class PrefillChoice:
    """The least busy one, or one nearly so that has computed prompts that begin alike.

    Busy is who has many prompt tokens to compute. Among those that have at most
    `affinity_tokens` more than the least busy, each beginning has its own order
    (rendezvous hashing), so that it comes back to where its blocks are cached. With
    kv_aware, the one where it costs least.
    """

    def __init__(self, settings: RouterSettings, strategy: Strategy) -> None:
        self._kv_aware = strategy if isinstance(strategy, KvAware) else None
        self._prefix_length = settings.prefix_length
        self._affinity_tokens = settings.prefill_affinity_tokens

    def choose(
        self, workers: Iterable[Worker], decode: Worker, prompt: Prompt, now_s: float
    ) -> Choice | None:
        """None when no prefill worker is there that `decode` could take KV from."""
        fit = [
            each for each in workers if each.may_be_called(now_s) and _fits(each, decode, prompt)
        ]
        if not fit:
            return None
        if self._kv_aware is not None:
            return self._kv_aware.choose(fit, prompt, now_s)
        most = min(worker.outstanding_tokens for worker in fit) + self._affinity_tokens
        near = [worker for worker in fit if worker.outstanding_tokens <= most]
        beginning = fingerprint(prompt, self._prefix_length)
        chosen = max(near, key=lambda worker: affinity(worker, beginning))
        return Choice(chosen, len(fit), "its beginning")


def _fits(worker: Worker, decode: Worker, prompt: Prompt) -> bool:
    here, there = worker.announced, decode.announced
    return (
        here.id != there.id
        and here.fingerprint == there.fingerprint
        and prompt.num_tokens < here.max_context_tokens
    )
