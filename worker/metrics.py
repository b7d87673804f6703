"""What a worker says of itself in numbers, for the observer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from services.core.metrics import LEAK, Labels, Metric, Sample
from worker.engines.contract import EngineInfo
from worker.estimates import ReadCost, Tier
from worker.messages import CoreLoad
from worker.tier import TierStats

_BUSY = Metric("firsttoken.worker.engine.busy", "s", "Time inside the engine.", True)
_STEPS = Metric("firsttoken.worker.engine.steps", "{step}", "Steps of the engine.", True)
_LONGEST = Metric(
    "firsttoken.worker.engine.longest_step", "s", "The longest of the last 100 steps.", False
)
_PREFILL_RATE = Metric(
    "firsttoken.worker.prefill.rate", "{token}/s", "Prompt tokens computed a second.", False
)
_REQUESTS = Metric(
    "firsttoken.worker.requests", "{request}", "Requests that run, and that wait inside.", False
)
_QUEUED = Metric(
    "firsttoken.worker.prompt.queued",
    "{token}",
    "Prompt tokens still to be computed, or brought from elsewhere.",
    False,
)
_PROMPT = Metric(
    "firsttoken.worker.prompt.tokens",
    "{token}",
    "Prompt tokens by where their KV came from: computed, the worker's own cache, the node's"
    " memory (l1), or Redis (l2).",
    True,
)
_DECODED = Metric("firsttoken.worker.decode.tokens", "{token}", "Tokens of answers.", True)
_DRAFTED = Metric(
    "firsttoken.worker.draft.tokens",
    "{token}",
    "Tokens drafted for answers, by whether they came true, and by class of requests.",
    True,
)
_DRAFTING = Metric(
    "firsttoken.worker.drafting",
    "",
    "1 while drafts are made for a class of requests, 0 while they do not pay.",
    False,
)
_CACHED = Metric("firsttoken.worker.kv.cached", "{block}", "KV blocks kept for reuse.", False)
_RESERVED = Metric(
    "firsttoken.worker.kv.reserved", "{block}", "KV blocks that running requests hold.", False
)
_CAPACITY = Metric("firsttoken.worker.kv.capacity", "{block}", "KV blocks that fit.", False)
_MOVING = Metric(
    "firsttoken.worker.kv.moving",
    "{block}",
    "KV blocks on their way into the engine, and out to other workers.",
    False,
)
_HANDOFFS = Metric(
    "firsttoken.worker.handoffs",
    "{handoff}",
    "Prompts that others computed for this worker (taken), and it for others (given).",
    True,
)
_LOADED = Metric(
    "firsttoken.worker.kv.loaded", "By", "KV out of the KV store, by its tier there.", True
)
_STORED = Metric("firsttoken.worker.kv.stored", "By", "KV written to the KV store.", True)
_READ_RATE = Metric(
    "firsttoken.worker.kv.read.bandwidth",
    "By/s",
    "Speed of the latest reads from the KV store, once they have begun.",
    False,
)
_READ_LATENCY = Metric(
    "firsttoken.worker.kv.read.latency",
    "s",
    "Until the first byte of the latest reads from the KV store.",
    False,
)
_CHOICES = Metric(
    "firsttoken.worker.kv.choices",
    "{request}",
    "Requests for which the KV store had blocks, by what was done.",
    True,
)
_SPENT = Metric("firsttoken.worker.kv.spent", "s", "What those spent until KV was there.", True)
_REGRET = Metric(
    "firsttoken.worker.kv.regret",
    "s",
    "Of that, what the best way not taken would have saved, as estimated.",
    True,
)
_LOST = Metric(
    "firsttoken.worker.kv.lost",
    "{block}",
    "KV blocks not written (dropped), and that did not verify (rejected).",
    True,
)
_FAILED = Metric(
    "firsttoken.worker.kv.failed_loads", "{load}", "Loads that ended early, by reason.", True
)
_WRITING = Metric(
    "firsttoken.worker.kv.writing", "{block}", "KV blocks that wait to be written.", False
)
_PLANS = Metric(
    "firsttoken.worker.plans", "{request}", "Answers that callers fetch themselves, now.", False
)
_TICKETS = Metric(
    "firsttoken.worker.tickets.refused", "{request}", "Calls whose ticket was not taken.", True
)
METRICS = (
    *(
        _BUSY,
        _STEPS,
        _LONGEST,
        _PREFILL_RATE,
        _REQUESTS,
        _QUEUED,
        _PROMPT,
        _DECODED,
        _DRAFTED,
        _DRAFTING,
        _CACHED,
    ),
    *(_RESERVED, _CAPACITY, _MOVING, _HANDOFFS, _LOADED, _STORED, _READ_RATE, _READ_LATENCY),
    *(_CHOICES, _SPENT, _REGRET, _LOST, _FAILED, _WRITING, _PLANS, _TICKETS, LEAK),
)


class Readings(NamedTuple):
    """All that is read of a worker at one time."""

    load: CoreLoad
    info: EngineInfo
    tier: TierStats
    # Of each tier that was read, or is known from hearsay.
    read_costs: Mapping[Tier, ReadCost]
    num_streams: int
    # Requests that the core has not let go of.
    num_held: int
    num_inbox_blocks: int
    handoffs_taken: int
    handoffs_given: int
    num_plans: int = 0
    # Calls, by the reason for which they were refused.
    tickets_refused: Mapping[str, int] = MappingProxyType({})


def read(now: Readings) -> Iterator[Sample]:
    load = now.load
    yield Sample(_BUSY.name, load.engine_busy_s)
    yield Sample(_STEPS.name, load.num_steps)
    yield Sample(_LONGEST.name, load.longest_step_ms / 1e3)
    yield Sample(_PREFILL_RATE.name, load.prefill_tokens_per_s)
    yield Sample(_REQUESTS.name, load.num_running, _label("state", "running"))
    yield Sample(_REQUESTS.name, load.num_waiting, _label("state", "waiting"))
    yield Sample(_QUEUED.name, load.queued_prompt_tokens)
    yield Sample(_DECODED.name, load.decode_tokens_evaluated)
    for name, drafts in load.drafts.items():
        missed = drafts.num_drafted - drafts.num_accepted
        yield Sample(_DRAFTED.name, drafts.num_accepted, (("class", name), ("end", "accepted")))
        yield Sample(_DRAFTED.name, missed, (("class", name), ("end", "rejected")))
        yield Sample(_DRAFTING.name, int(drafts.is_on), _label("class", name))
    yield Sample(_CACHED.name, load.num_blocks_cached)
    yield Sample(_RESERVED.name, load.num_blocks_reserved)
    yield Sample(_CAPACITY.name, load.num_blocks_total)
    yield Sample(_MOVING.name, now.num_inbox_blocks, _label("direction", "in"))
    yield Sample(_MOVING.name, load.num_outbox_blocks, _label("direction", "out"))
    yield Sample(_HANDOFFS.name, now.handoffs_taken, _label("role", "taken"))
    yield Sample(_HANDOFFS.name, now.handoffs_given, _label("role", "given"))
    yield Sample(_PLANS.name, now.num_plans)
    for reason, count in now.tickets_refused.items():
        yield Sample(_TICKETS.name, count, _label("reason", reason))
    yield from _kv(now)
    yield from _leaks(now)


def _kv(now: Readings) -> Iterator[Sample]:
    load, tier, block_tokens = now.load, now.tier, now.info.block_tokens
    blocks = {
        "l1": tier.blocks_loaded - tier.blocks_loaded_from_l2,
        "l2": tier.blocks_loaded_from_l2,
    }
    yield Sample(_PROMPT.name, load.prompt_tokens_evaluated, _label("source", "computed"))
    yield Sample(_PROMPT.name, load.prompt_tokens_cached, _label("source", "worker"))
    for name, num_blocks in blocks.items():
        yield Sample(_PROMPT.name, num_blocks * block_tokens, _label("source", name))
        yield Sample(_LOADED.name, num_blocks * now.info.block_bytes, _label("tier", name))
    yield Sample(_STORED.name, tier.blocks_stored * now.info.block_bytes)
    for read_tier, cost in now.read_costs.items():
        label = _label("tier", read_tier.value.lower())
        yield Sample(_READ_LATENCY.name, cost.latency_s, label)
        if cost.block_s > 0:
            yield Sample(_READ_RATE.name, now.info.block_bytes / cost.block_s, label)
    ways = {"compute": tier.num_compute, "load": tier.num_load, "both": tier.num_both}
    for way, count in ways.items():
        yield Sample(_CHOICES.name, count, _label("way", way))
    yield Sample(_SPENT.name, tier.spent_ms / 1e3)
    yield Sample(_REGRET.name, tier.regret_ms / 1e3)
    for what, reasons in (("dropped", tier.dropped), ("rejected", tier.rejected)):
        for reason, count in reasons.items():
            yield Sample(_LOST.name, count, (("what", what), ("reason", reason)))
    for reason, count in tier.failed.items():
        yield Sample(_FAILED.name, count, _label("reason", reason))
    yield Sample(_WRITING.name, tier.num_writing)


def _leaks(now: Readings) -> Iterator[Sample]:
    held = {
        "requests": now.num_held,
        "blocks": now.load.num_blocks_reserved,
        "outbox": now.load.num_outbox_blocks,
        "inbox": now.num_inbox_blocks,
        "loads": now.tier.num_loads,
    }
    for what, count in held.items():
        yield Sample(LEAK.name, 0 if now.num_streams else count, _label("what", what))


def _label(name: str, value: str) -> Labels:
    return ((name, value),)
