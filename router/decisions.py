"""What a router decided, as lines of JSON that hold no text. Pure.

A file has one record a line: `header`, then `workers` and `settings` whenever those change,
`decision` for each request, `dropped` where some are missing, `end` with the reason.
Prompts are chains of block names, tenants are names: both hashed with a salt that is drawn for
each file and never written, and cut to 8 bytes. Equal ones stay equal within a file, and that
is all that can be told.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from router.fleet import Announced
from router.prompt import Choice
from services.core.config import Snapshot, flatten
from services.core.keys import KEY_BYTES
from services.core.settings import MeshConfig

FORMAT = 1
NAME_BYTES = 8
# What a replay needs; nothing of these names a person, a key or a password.
_SECTIONS = ("router.", "worker.", "mesh.block_tokens")


class Decision(NamedTuple):
    """One request, from its arrival to its end. Times are in seconds, on one clock."""

    arrived_s: float
    # The chain's root, then a key for each full block; empty: it came to nothing before.
    prefix_keys: bytes
    prompt_tokens: int
    output_tokens: int
    request_class: str
    tenant: str
    strategy: str
    generation: int
    # The last one, where several workers were tried.
    choice: Choice | None = None
    attempts: int = 0
    migrations: int = 0
    queue_s: float = 0.0
    # None: the request did not come so far.
    ttft_s: float | None = None
    # From one token to the next, after the first.
    tpot_s: float | None = None
    cached_tokens: int | None = None
    # What the engine computed of the prompt, and how long that took.
    evaluated_tokens: int | None = None
    prefill_s: float | None = None
    # Of `ttft_s`, what neither waiting nor an engine took: tokenizing, messages, routing.
    overhead_s: float | None = None
    # From the arrival on; None: without one.
    deadline_s: float | None = None
    # Its status, or reason; empty: the answer was whole.
    error: str = ""


class Anonymous:
    """Names for keys and tenants: the same for the same, in one file."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt

    def chain(self, prefix_keys: bytes) -> str:
        """Of the full blocks, each 8 bytes, in base64."""
        starts = range(KEY_BYTES, len(prefix_keys), KEY_BYTES)
        names = (self._name(prefix_keys[start : start + KEY_BYTES]) for start in starts)
        return base64.b64encode(b"".join(names)).decode()

    def tenant(self, name: str) -> str:
        return self._name(b"tenant " + name.encode()).hex() if name else ""

    def _name(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._salt, digest_size=NAME_BYTES).digest()


def header(router_id: str, snapshot: Snapshot, *, started: str, sample: float) -> bytes:
    """`started`: the wall clock, in ISO 8601; all other times count from then."""
    return _line(
        "header",
        format=FORMAT,
        program="firsttoken",
        router=router_id,
        started=started,
        sample=sample,
        generation=snapshot.generation,
        settings=_settings(snapshot.config),
    )


def settings_line(at_s: float, snapshot: Snapshot) -> bytes:
    return _line(
        "settings",
        at_s=at_s,
        generation=snapshot.generation,
        settings=_settings(snapshot.config),
    )


def workers_line(at_s: float, workers: Iterable[Announced]) -> bytes:
    """Those that are ready. Hosts are numbered: who shares one, shares a node's store."""
    hosts: dict[str, int] = {}
    ready = [
        {
            "id": each.id,
            "role": each.role.value,
            "host": hosts.setdefault(each.address.rpartition(":")[0], len(hosts)),
            "num_slots": each.num_slots,
            "num_blocks": each.num_blocks,
            "max_context_tokens": each.max_context_tokens,
        }
        for each in workers
        if each.ready
    ]
    return _line("workers", at_s=at_s, workers=ready)


def decision_line(decision: Decision, names: Anonymous, *, start_s: float) -> bytes:
    choice = decision.choice
    fields: dict[str, Any] = {
        "at_s": round(decision.arrived_s - start_s, 6),
        "chain": names.chain(decision.prefix_keys),
        "prompt_tokens": decision.prompt_tokens,
        "output_tokens": decision.output_tokens,
        "class": decision.request_class,
        "tenant": names.tenant(decision.tenant),
        "strategy": decision.strategy,
        "generation": decision.generation,
        "attempts": decision.attempts,
        "migrations": decision.migrations,
        "queue_ms": _ms(decision.queue_s),
        "ttft_ms": _ms(decision.ttft_s),
        "tpot_ms": _ms(decision.tpot_s),
        "cached_tokens": decision.cached_tokens,
        "evaluated_tokens": decision.evaluated_tokens,
        "prefill_ms": _ms(decision.prefill_s),
        "overhead_ms": _ms(decision.overhead_s),
        "deadline_s": decision.deadline_s,
        "error": decision.error,
    }
    if choice is not None:
        fields |= {
            "chosen": choice.worker.announced.id,
            "num_candidates": choice.num_candidates,
            "reason": choice.reason,
            "predicted_tokens": choice.predicted_tokens,
            "cost_ms": _ms(choice.cost_s),
            "candidates": [
                [each.worker_id, each.in_flight, each.predicted_tokens, _ms(each.cost_s)]
                for each in choice.considered
            ],
        }
    return _line("decision", **fields)


def dropped_line(at_s: float, count: int) -> bytes:
    """`count`: decisions since the last such line that were not written."""
    return _line("dropped", at_s=at_s, count=count)


def end_line(at_s: float, reason: str) -> bytes:
    return _line("end", at_s=at_s, reason=reason)


def _settings(config: MeshConfig) -> Mapping[str, Any]:
    kept = {key: value for key, value in flatten(config).items() if key.startswith(_SECTIONS)}
    kept.pop("router.record_decisions", None)
    return kept


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _line(kind: str, **fields: Any) -> bytes:
    return orjson.dumps({"kind": kind, **fields}, option=orjson.OPT_APPEND_NEWLINE)
