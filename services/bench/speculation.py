"""What drafts of the next tokens bring: the same answers with them and without, by turns.

One mesh and one worker; the setting is pushed to it before each turn, so that what the worker
has learned about drafts stays. Prompts are cached before: what is measured is the answers.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from firsttoken.client import Answer, MeshClient, Options
from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from firsttoken.worker.v1 import worker_pb2
from services.bench.processes import list_members
from services.bench.worker_load import LoadWatch, watch_load
from services.core.config import parse
from services.core.settings import MeshConfig
from services.runtime.channels import open_channel

SETTING = "worker.max_draft_tokens"
CONFIG: MeshConfig = parse({"worker": {"num_slots": 8, "max_context_tokens": 2048}})
HARBOUR = (
    "The harbour of Tessaly lies between two cliffs. Ships come in with the tide at dawn, unload"
    " salt and copper, and leave at dusk with wool, oranges and letters. Ines Varga, the harbour"
    " master, keeps a book in which she writes the name of each ship, the number of its crew and"
    " the weather. "
)
CODE = """def add_all(numbers):
    total = 0
    for number in numbers:
        total = total + number
        print('the total is', total)
    return total


def mean(numbers):
    total = add_all(numbers)
    return total / len(numbers)
"""
MAX_PUSH_S = 30.0


class Workload(NamedTuple):
    name: str
    prompt: str
    temperature: float = 0.0


WORKLOADS = (
    Workload("copy", f"Repeat this text exactly:\n{HARBOUR * 2}"),
    Workload("edit", f"Rename the variable total to result and print all of the code:\n{CODE}"),
    Workload("story", "Tell me a long story about a lighthouse keeper and a storm."),
    Workload("sampled", "Tell me a long story about a fox who wanted to fly.", temperature=1.0),
)

Tell = Callable[[str], None]


class Part(NamedTuple):
    """One workload at one concurrency, with drafts or without."""

    tokens_per_s: float
    answers: list[tuple[int, ...]]


class Mesh(NamedTuple):
    client: MeshClient
    control: Any
    watch: LoadWatch


async def measure(
    router: str,
    control: str,
    *,
    max_draft_tokens: int,
    num_turns: int,
    answer_tokens: int,
    concurrencies: Sequence[int],
    tell: Tell,
) -> list[dict[str, Any]]:
    """Of a mesh of CONFIG with one worker: a row for each workload and concurrency."""
    async with open_channel(control) as channel, MeshClient(router) as client:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        [worker] = await list_members(stub, control_pb2.MEMBER_ROLE_WORKER)
        async with watch_load(worker.address) as watch:
            mesh = Mesh(client, stub, watch)
            rows = []
            for workload in WORKLOADS:
                for at_once in concurrencies:
                    tell(f"{workload.name}, {at_once} at a time")
                    rows.append(
                        await _compare(
                            mesh, workload, at_once, max_draft_tokens, num_turns, answer_tokens
                        )
                    )
            return rows


async def _compare(
    mesh: Mesh,
    workload: Workload,
    at_once: int,
    max_draft_tokens: int,
    num_turns: int,
    answer_tokens: int,
) -> dict[str, Any]:
    await _ask(mesh.client, workload, at_once, 1)
    off: list[Part] = []
    on: list[Part] = []
    spent = worker_pb2.Drafts()
    for turn in range(num_turns):
        # The one that goes first changes, so that a slower machine counts for both.
        for drafts in (False, True) if turn % 2 else (True, False):
            await _push(mesh.control, max_draft_tokens if drafts else 0)
            before = await mesh.watch.settled()
            part = await _ask(mesh.client, workload, at_once, answer_tokens)
            (on if drafts else off).append(part)
            _add(spent, before.drafts, (await mesh.watch.settled()).drafts)
    return {
        "workload": workload.name,
        "at_once": at_once,
        "off_tokens_per_s": statistics.median(part.tokens_per_s for part in off),
        "on_tokens_per_s": statistics.median(part.tokens_per_s for part in on),
        "ratio": statistics.median(
            with_drafts.tokens_per_s / without.tokens_per_s
            for with_drafts, without in zip(on, off, strict=True)
        ),
        "identical": all(part.answers == off[0].answers for part in (*off, *on)),
        **describe(spent),
    }


def describe(drafts: worker_pb2.Drafts) -> dict[str, Any]:
    """`mean_length`: tokens of an answer that a step with a draft of it brings."""
    num_drafts, num_drafted = drafts.num_drafts, drafts.num_drafted
    return {
        "drafts": num_drafts,
        "drafted": num_drafted,
        "accepted": drafts.num_accepted,
        "accepted_of_drafted": drafts.num_accepted / num_drafted if num_drafted else None,
        "mean_length": 1 + drafts.num_accepted / num_drafts if num_drafts else None,
        "verify_ms_per_drafted": drafts.spent_s / num_drafted * 1e3 if num_drafted else None,
        "won_tokens": drafts.won_tokens,
        "rests": drafts.num_rests,
    }


async def _ask(client: MeshClient, workload: Workload, at_once: int, num_tokens: int) -> Part:
    async def one(number: int) -> Answer:
        options: Options = {
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": workload.temperature,
            "seed": number,
        }
        prompt = f"{workload.prompt}{' Please.' * number}"
        return await client.complete([{"role": "user", "content": prompt}], **options)

    began_s = time.monotonic()
    answers = await asyncio.gather(*map(one, range(at_once)))
    took_s = time.monotonic() - began_s
    return Part(at_once * num_tokens / took_s, [answer.token_ids for answer in answers])


async def _push(control: Any, max_draft_tokens: int) -> None:
    """Until the worker has it, and with it its engine core, whose next message that is."""
    request = control_pb2.SetConfigRequest(changes={SETTING: json.dumps(max_draft_tokens)})
    generation = (await control.SetConfig(request)).configuration.generation
    async with asyncio.timeout(MAX_PUSH_S):
        while not await _all_have(control, generation):  # noqa: ASYNC110  # they tell no event
            await asyncio.sleep(0.02)


async def _all_have(control: Any, generation: int) -> bool:
    workers = await list_members(control, control_pb2.MEMBER_ROLE_WORKER)
    return all(worker.generation >= generation for worker in workers)


def _add(
    sums: worker_pb2.Drafts,
    before: Mapping[str, worker_pb2.Drafts],
    after: Mapping[str, worker_pb2.Drafts],
) -> None:
    for name, now in after.items():
        then = before.get(name, worker_pb2.Drafts())
        sums.num_drafts += now.num_drafts - then.num_drafts
        sums.num_drafted += now.num_drafted - then.num_drafted
        sums.num_accepted += now.num_accepted - then.num_accepted
        sums.spent_s += now.spent_s - then.spent_s
        sums.won_tokens += now.won_tokens - then.won_tokens
        sums.num_rests += now.num_rests - then.num_rests
