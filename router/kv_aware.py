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

import math
from collections.abc import Mapping, Sequence

from router.fleet import Worker
from router.knowledge import Knowledge, View
from router.prefix_index import Reach, bits_of
from router.prompt import Choice, Considered, Prompt
from router.work import FIRST_LOAD_SHARE

# 3 % above the least count as they are.
EVENNESS = 30.0
# Of what is above the least, at most this share counts: a long prompt is not followed by
# another one elsewhere, to make up for the first.
MOST_EVENNESS = 0.5
# Less work than this says nothing yet.
FIRST_WORK_S = 30.0
# Costs that differ by less are equal: then the least busy wins.
TIE_S, TIE_SHARE = 0.002, 0.02
# No more are compared: a router with thousands of workers must not stand still.
MOST_CANDIDATES = 512


class KvAware:
    """`step_tokens`: of prompts, in an engine step that has begun, at most.

    `explain`: name every candidate in the choice.
    """

    def __init__(self, knowledge: Knowledge, *, step_tokens: int, explain: bool = False) -> None:
        self._knowledge = knowledge
        self._step_tokens = step_tokens
        self._explain = explain

    def choose(self, candidates: Sequence[Worker], prompt: Prompt, now_s: float) -> Choice:
        usable = (prompt.num_tokens - 1) // prompt.block_tokens  # the last token is computed
        blocks = _blocks_by_bit(self._knowledge.index.match(prompt.prefix_keys), usable)
        if len(candidates) > MOST_CANDIDATES:
            candidates = self._some(candidates, blocks)
        works_s = self._works_s(candidates, prompt, blocks)
        costs_s = self._costs_s(candidates, works_s, prompt, blocks, now_s)
        best_s = min(costs_s)
        most_s = best_s + max(TIE_S, TIE_SHARE * best_s)
        near = [place for place, cost_s in enumerate(costs_s) if cost_s <= most_s]
        place = near[0]
        if len(near) > 1:
            place = min(near, key=lambda each: self._busyness(candidates[each]))
        cached = self._cached(candidates[place], prompt, blocks)
        considered: tuple[Considered, ...] = ()
        if self._explain:
            considered = tuple(
                Considered(
                    worker.announced.id,
                    worker.in_flight,
                    self._cached(worker, prompt, blocks),
                    cost_s,
                )
                for worker, cost_s in zip(candidates, costs_s, strict=True)
            )
        return Choice(
            candidates[place],
            len(candidates),
            "least cost",
            cached,
            prompt.num_tokens - cached,
            works_s[place],
            costs_s[place],
            considered,
            self._best_elsewhere(candidates[place], blocks) * prompt.block_tokens,
        )

    def _best_elsewhere(self, chosen: Worker, blocks: Mapping[int, int]) -> int:
        """Blocks at the one worker of all others that has most, a candidate or not."""
        knowledge = self._knowledge
        nobody = {knowledge.views[chosen].bit, *knowledge.store_bits}
        return max((num for bit, num in blocks.items() if bit not in nobody), default=0)

    def _works_s(
        self, candidates: Sequence[Worker], prompt: Prompt, blocks: Mapping[int, int]
    ) -> list[float]:
        """What each would compute and load. Most of a decision's time is here: one plain loop."""
        views, typical_token_s = self._knowledge.views, self._knowledge.typical_token_s
        num_tokens, block_tokens = prompt.num_tokens, prompt.block_tokens
        works_s = []
        for worker in candidates:
            view = views[worker]
            load = view.load
            token_s = load.token_s or typical_token_s
            work_s = num_tokens * token_s
            held = blocks.get(view.bit, 0)
            if held:
                held = int(held * load.trust)
                work_s -= held * block_tokens * token_s
            if view.store is not None:
                work_s -= _saved_by_loading(view, blocks, held, block_tokens, token_s)
            works_s.append(work_s)
        return works_s

    def _costs_s(
        self,
        candidates: Sequence[Worker],
        works_s: Sequence[float],
        prompt: Prompt,
        blocks: Mapping[int, int],
        now_s: float,
    ) -> list[float]:
        """All in all; infinite where the work alone is more than another's cost."""
        knowledge, views, num_tokens = self._knowledge, self._knowledge.views, prompt.num_tokens
        scale = knowledge.scale(now_s)
        least = min([views[worker].load.recent_s for worker in candidates])
        evenness = EVENNESS / (least / scale + FIRST_WORK_S)

        def cost_of(worker: Worker, work_s: float) -> float:
            load = views[worker].load
            token_s = knowledge.token_s(load)
            excess_s = (load.recent_s - least) / scale
            even_s = excess_s * min(evenness * excess_s, MOST_EVENNESS)
            cost_s = work_s + min(even_s, num_tokens * token_s)
            if load.is_busy:
                cost_s += load.wait_s(work_s, self._step_tokens * token_s, now_s)
            if load.num_free_blocks is not None:
                uncached = num_tokens - self._cached(worker, prompt, blocks)
                num_blocks = uncached // prompt.block_tokens + 1
                if num_blocks > load.num_free_blocks:
                    cost_s += load.room_wait_s(num_blocks)
            return cost_s

        most_s = math.inf
        if not self._explain:
            least_work_s = min(works_s)
            most_s = cost_of(candidates[works_s.index(least_work_s)], least_work_s)
            most_s += max(TIE_S, TIE_SHARE * most_s)
        return [
            cost_of(candidates[place], work_s) if work_s <= most_s else math.inf
            for place, work_s in enumerate(works_s)
        ]

    def _cached(self, worker: Worker, prompt: Prompt, blocks: Mapping[int, int]) -> int:
        """Tokens of the prompt that are expected to be cached there."""
        view = self._knowledge.views[worker]
        return int(blocks.get(view.bit, 0) * view.load.trust) * prompt.block_tokens

    def _some(self, candidates: Sequence[Worker], blocks: Mapping[int, int]) -> Sequence[Worker]:
        """Of very many: those that have most of the prompt, and others in turn."""
        views = self._knowledge.views
        half = MOST_CANDIDATES // 2
        having = [each for each in candidates if views[each].bit in blocks]
        having.sort(key=lambda each: -blocks[views[each].bit])
        others = sorted(candidates, key=lambda each: each.turn)[:half]
        return list(dict.fromkeys([*having[:half], *others]))

    def _busyness(self, worker: Worker) -> tuple[int, int]:
        load = self._knowledge.views[worker].load
        return worker.in_flight + load.foreign_running, worker.turn


def _blocks_by_bit(reaches: Sequence[Reach], most: int) -> dict[int, int]:
    blocks: dict[int, int] = {}
    for num_blocks, mask in reaches:
        blocks.update(dict.fromkeys(bits_of(mask), min(num_blocks, most)))
    return blocks


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
