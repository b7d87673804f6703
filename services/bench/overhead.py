"""What the service layer costs: the ways to an answer side by side, in one run and by turns.

The engine is simulated and takes as good as no time, so that what is left is ours. CPU is
what each process spends beyond what it spends when nobody asks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.bench import overhead_figures as figures
from services.bench.overhead_command import Foreign, open_foreign
from services.bench.overhead_floor import Messages
from services.bench.overhead_load import Pace, Processes, Turn, stand_still, take_turn
from services.bench.overhead_prompts import LOADS, Load, texts
from services.bench.overhead_rows import (
    NAMES,
    STREAM,
    UNARY,
    WORKER,
    Addresses,
    Row,
    Ways,
    open_ways,
)
from services.bench.processes import descendants, family
from services.bench.programs import program
from services.core.config import parse
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel
from services.runtime.startup import StartupError

FLOOR = "services.bench.overhead_floor"
CONFIG: MeshConfig = parse(
    {
        "worker": {
            "engine": "simulated",
            "num_slots": 64,
            "max_context_tokens": 8192,
            # A prompt is one step.
            "max_batch_tokens": 16384,
            # As good as nothing: what is left is the service layer's.
            "simulated": {
                "prefill_tokens_per_s": 1e9,
                "decode_step_ms": 0,
                "decode_step_ms_per_seq": 0,
                "transfer_gb_per_s": 1e6,
                "kv_bytes_per_token": 16,
                "num_blocks": 16384,
            },
        }
    }
)
WARM_UP = 4
# All is compared with these.
ALWAYS = (UNARY, WORKER)

Tell: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`num_requests`: of each row and load, in all turns of a closed loop; `seconds`: those of
    an open one. `num_streams` answers of `answer_tokens` at a time say what a token costs."""

    rows: Sequence[str] = NAMES
    loads: Sequence[Load] = LOADS
    num_turns: int = 5
    num_requests: int = 300
    concurrency: int = 16
    rate_per_s: float = 40.0
    seconds: float = 5.0
    num_streams: int = 64
    answer_tokens: int = 200
    long_answers: int = 320

    def paces(self) -> dict[str, tuple[Pace, int]]:
        """How requests come, and how many of them in all."""
        at_rate = max(self.num_turns, round(self.rate_per_s * self.seconds))
        return {
            "alone": (Pace(), self.num_requests),
            "closed": (Pace(self.concurrency), self.num_requests),
            "open": (Pace(rate_per_s=self.rate_per_s), at_rate),
        }


async def measure(
    router: str,
    control: str,
    url: str,
    plan: Plan,
    *,
    foreign: Foreign | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Of a mesh of CONFIG on this host, with one worker. Raises StartupError."""
    async with AsyncExitStack() as stack:
        floor = await stack.enter_async_context(program(FLOOR))
        passing = await stack.enter_async_context(program(FLOOR, "--pass-to", floor.address))
        members = await _find_members(control)
        ways = await stack.enter_async_context(
            open_ways(
                Addresses(
                    floor.address,
                    passing.address,
                    members["tokenizer"].address,
                    members["worker"].address,
                    router,
                    url,
                )
            )
        )
        processes = {
            **_processes(members, control),
            "floor": [floor.pid],
            "passing": [passing.pid],
        }
        if foreign is not None:
            tell(f"starting {foreign.line} …")
            opened = await stack.enter_async_context(open_foreign(foreign))
            ways.rows.update(opened.rows)
            processes["command"] = descendants(opened.pid)
        return await Laboratory(ways, processes, plan, tell).measure()


class Laboratory:
    """All ways, open, and whose CPU is counted."""

    def __init__(self, ways: Ways, processes: Processes, plan: Plan, tell: Tell) -> None:
        self._ways = ways
        self._processes = processes
        self._plan = plan
        self._tell = tell
        wanted = {*plan.rows, *ALWAYS}
        self._rows = {
            name: row for name, row in ways.rows.items() if name in wanted or name not in NAMES
        }
        self._seed = 0

    async def measure(self) -> dict[str, Any]:
        loads: list[dict[str, Any]] = []
        for load in self._plan.loads:
            found: dict[str, Any] = {}
            for name, (pace, number) in self._plan.paces().items():
                self._tell(f"{load.name} prompts, {name} …")
                turns, idle = await self._compare(self._rows, load, pace, number)
                found[name] = figures.compare(turns, idle)
                found[f"{name}_idle_us_per_s"] = _us(figures.idle_rates(idle))
            loads.append({"load": load.name, "prompt_tokens": load.prompt_tokens, **found})
        self._tell("long answers …")
        return {
            "engine": CONFIG.worker.engine,
            "concurrency": self._plan.concurrency,
            "rate_per_s": self._plan.rate_per_s,
            "turns": self._plan.num_turns,
            "skipped": {
                name: why for name, why in self._ways.skipped.items() if name in self._plan.rows
            },
            "loads": loads,
            "long_answers": await self._long_answers(loads[0]["closed"]),
        }

    async def _long_answers(self, short: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a token costs, beside as many messages of the same size that nobody looks at.

        `short`: rows of answers of one token.
        """
        plan, load = self._plan, self._plan.loads[0]
        pace = Pace(plan.num_streams)
        source = texts(load, seed=-1)
        asked = [
            await self._ways.sizes.prepare(next(source), plan.answer_tokens)
            for _ in range(2 * plan.num_streams)
        ]
        seen = (await take_turn(self._ways.sizes, asked, pace, {})).heard
        num_messages = statistics.fmean(heard.num_messages for heard in seen)
        num_bytes = statistics.fmean(heard.num_bytes for heard in seen)
        like = Messages(max(1, round(num_messages)), max(1, round(num_bytes / num_messages)))
        floors = (UNARY, STREAM)
        rows = {name: row for name, row in self._rows.items() if name not in floors}
        rows |= self._ways.like(like)
        turns, idle = await self._compare(
            rows, load, pace, plan.long_answers, max_tokens=plan.answer_tokens
        )
        answers = figures.per_token(turns, idle, answer_tokens=plan.answer_tokens)
        return {
            "streams": plan.num_streams,
            "tokens": plan.answer_tokens,
            "proxied_messages_per_answer": num_messages,
            "proxied_bytes_per_message": num_bytes / num_messages,
            "proxied_bytes_per_token": num_bytes / plan.answer_tokens,
            "rows": answers,
            "beside_the_floor": figures.beside_the_floor(answers, short),
            "idle_us_per_s": _us(figures.idle_rates(idle)),
        }

    async def _compare(
        self, rows: Mapping[str, Row], load: Load, pace: Pace, number: int, *, max_tokens: int = 1
    ) -> tuple[dict[str, list[Turn]], list[Turn]]:
        """Turns of each, and of standing still."""
        turns: dict[str, list[Turn]] = {name: [] for name in rows}
        idle: list[Turn] = []
        per_turn = -(-number // self._plan.num_turns)
        sources = {name: self._texts(load) for name in rows}
        for name, row in rows.items():
            warm_up = await _prepare(row, sources[name], WARM_UP, max_tokens)
            await take_turn(row, warm_up, Pace(), {})
        for turn in range(self._plan.num_turns):
            for name in _rotated(list(rows), turn):
                requests = await _prepare(rows[name], sources[name], per_turn, max_tokens)
                taken = await take_turn(rows[name], requests, pace, self._processes, seed=turn)
                turns[name].append(taken)
            mean_s = statistics.fmean(each[-1].took_s for each in turns.values())
            idle.append(await stand_still(mean_s, self._processes))
        return turns, idle

    def _texts(self, load: Load) -> Iterator[str]:
        """A beginning that is shared is that of this row and pace alone."""
        self._seed += 1
        return texts(load, seed=self._seed)


async def _prepare(row: Row, source: Iterator[str], number: int, max_tokens: int) -> list[Any]:
    return [await row.prepare(next(source), max_tokens) for _ in range(number)]


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _us(rates: Mapping[str, float]) -> dict[str, float]:
    return {name: rate * 1e6 for name, rate in rates.items()}


async def _find_members(control: str) -> dict[str, control_pb2.Member]:
    """By role; there is one of each."""
    roles = {
        control_pb2.MEMBER_ROLE_GATEWAY: "gateway",
        control_pb2.MEMBER_ROLE_ROUTER: "router",
        control_pb2.MEMBER_ROLE_TOKENIZER: "tokenizer",
        control_pb2.MEMBER_ROLE_WORKER: "worker",
    }
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        members = (await stub.ListMembers(control_pb2.ListMembersRequest())).members
    found = {roles[each.role]: each for each in members if each.role in roles}
    if missing := {"router", "tokenizer", "worker"} - found.keys():
        raise StartupError(f"the mesh has no {', '.join(sorted(missing))}")
    return found


def _processes(members: Mapping[str, control_pb2.Member], control: str) -> dict[str, list[int]]:
    """A worker's engine is a process that it has started."""
    found = {}
    for name, member in members.items():
        own, *started = family(member, control)
        found[name] = [own]
        if started:
            found[figures.ENGINE] = started
    return found
