"""Where the first token comes soonest: the strategy `kv_aware`. Pure.

The cost of a worker, in seconds, is what a request sent there would wait for and take:

    work queued there that it does not pass + room for its KV + what is loaded + what is computed
    + what evens out work: with x seconds of it lately above the least, which had l seconds,
      EVENNESS * x * x / (l + FIRST_WORK_S), or MOST_EVENNESS * x where that is less

Least cost wins. Whoever has the longest prefix wins only while that is worth more than what
else the worker has to do: where all prompts begin alike, the longest prefix would send them
all to one worker. So a prefix that is asked for more than one worker can serve comes to be
at several. The last term keeps work even over an hour, also while no queue shows. It grows
with the square, so that what chance brings costs next to nothing, and is never more than
computing the whole prompt: evenness may outweigh a prefix, and no queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.fleet import Worker
from router.knowledge import Knowledge, View
from router.prefix_index import Reach, bits_of
from router.prompt import Choice, Considered, Prompt
from router.work import FIRST_LOAD_SHARE

# 10 % above the least count as they are.
EVENNESS = 10.0
# Of what is above the least, at most this share counts: a long prompt is not followed by
# another one elsewhere, to make up for the first.
MOST_EVENNESS = 0.5
# Less work than this says nothing yet.
FIRST_WORK_S = 100.0
# Costs that differ by less are equal: then the least busy wins.
TIE_S, TIE_SHARE = 0.0005, 0.02


class KvAware:
    """`step_tokens`: of prompts, in an engine step that has begun, at most.

    `explain`: name every candidate in the choice.
    """

    def __init__(self, knowledge: Knowledge, *, step_tokens: int, explain: bool = False) -> None:
        self._knowledge = knowledge
        self._step_tokens = step_tokens
        self._explain = explain

    def choose(self, candidates: Sequence[Worker], prompt: Prompt, now_s: float) -> Choice:
        knowledge = self._knowledge
        usable = (prompt.num_tokens - 1) // prompt.block_tokens  # the last token is computed
        blocks = _blocks_by_bit(knowledge.index.match(prompt.prefix_keys), usable)
        costs = self._costs(candidates, prompt, blocks, now_s)
        best_s = min(costs)
        best = candidates[costs.index(best_s)]
        most_s = best_s + max(TIE_S, TIE_SHARE * best_s)
        pairs = zip(costs, candidates, strict=True)
        near = [worker for cost_s, worker in pairs if cost_s <= most_s]
        chosen = best if len(near) == 1 else min(near, key=self._busyness)
        return self._explained(chosen, candidates, costs, blocks, prompt)

    def _costs(
        self, candidates: Sequence[Worker], prompt: Prompt, blocks: Mapping[int, int], now_s: float
    ) -> list[float]:
        """Of each candidate. Most of a decision's time is here, so it is written out."""
        views, typical_token_s = self._knowledge.views, self._knowledge.typical_token_s
        scale = self._knowledge.scale(now_s)
        least = min([views[worker].load.recent_s for worker in candidates])
        evenness = EVENNESS / (least / scale + FIRST_WORK_S)
        num_tokens, block_tokens = prompt.num_tokens, prompt.block_tokens
        step_tokens = self._step_tokens
        costs = []
        for worker in candidates:
            view = views[worker]
            load = view.load
            token_s = load.token_s or typical_token_s
            work_s = full_s = num_tokens * token_s
            cached = 0
            if blocks and (held := blocks.get(view.bit)):
                cached = int(held * load.trust) * block_tokens
                work_s -= cached * token_s
            if view.store is not None:
                here = cached // block_tokens
                work_s -= _saved_by_loading(view, blocks, here, block_tokens, token_s)
            excess_s = (load.recent_s - least) / scale
            even_s = excess_s * min(evenness * excess_s, MOST_EVENNESS)
            cost_s = work_s + (even_s if even_s < full_s else full_s)
            if load.is_busy:
                cost_s += load.wait_s(work_s, step_tokens * token_s, now_s)
            num_free = load.num_free_blocks
            if num_free is not None and num_tokens - cached > num_free * block_tokens:
                cost_s += load.room_wait_s((num_tokens - cached) // block_tokens + 1)
            costs.append(cost_s)
        return costs

    def _busyness(self, worker: Worker) -> tuple[int, int]:
        load = self._knowledge.views[worker].load
        return worker.in_flight + load.foreign_running, worker.turn

    def _explained(
        self,
        chosen: Worker,
        candidates: Sequence[Worker],
        costs: Sequence[float],
        blocks: Mapping[int, int],
        prompt: Prompt,
    ) -> Choice:
        views = self._knowledge.views
        view = views[chosen]
        predicted = self._predicted(view, blocks, prompt)
        token_s = self._knowledge.token_s(view.load)
        work_s = (prompt.num_tokens - predicted) * token_s
        if view.store is not None:
            here = predicted // prompt.block_tokens
            work_s -= _saved_by_loading(view, blocks, here, prompt.block_tokens, token_s)
        considered: tuple[Considered, ...] = ()
        if self._explain:
            considered = tuple(
                Considered(
                    worker.announced.id,
                    worker.in_flight,
                    self._predicted(views[worker], blocks, prompt),
                    cost_s,
                )
                for cost_s, worker in zip(costs, candidates, strict=True)
            )
        return Choice(
            chosen,
            len(candidates),
            "least cost",
            predicted,
            prompt.num_tokens - predicted,
            work_s,
            costs[candidates.index(chosen)],
            considered,
        )

    def _predicted(self, view: View, blocks: Mapping[int, int], prompt: Prompt) -> int:
        return int(blocks.get(view.bit, 0) * view.load.trust) * prompt.block_tokens


def _blocks_by_bit(reaches: Sequence[Reach], most: int) -> dict[int, int]:
    return {bit: min(reach.num_blocks, most) for reach in reaches for bit in bits_of(reach.mask)}


def _saved_by_loading(
    view: View, blocks: Mapping[int, int], cached: int, block_tokens: int, token_s: float
) -> float:
    """What the node's store spares a worker that has `cached` blocks itself, in seconds."""
    assert view.store is not None
    more = blocks.get(view.store.bit, 0) - cached
    if more <= 0:
        return 0.0
    compute_s = block_tokens * token_s
    load_s = view.load.load_block_s or FIRST_LOAD_SHARE * compute_s
    return more * max(0.0, compute_s - load_s)
