"""firsttoken why and firsttoken hygiene, of a running mesh."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from firsttoken.client import MeshClient
from services.cli import hygiene, why
from services.cli.failures import Failure
from services.cli.observer import ask
from services.control.node import ControlNode
from services.observer.hygiene import report
from services.observer.why import explain
from tests.cli.running import Endpoints, run_to_end
from tests.observer.chats import chat, prose, spelling
from tests.observer.traffic import Traffic

# Until the observer has a request, well beyond what it takes.
PATIENCE_S = 30.0
RULES = prose(1, 160)


async def send(router: str, systems: Sequence[str]) -> list[str]:
    """Trace ids."""
    found = []
    async with MeshClient(router) as client:
        for number, system in enumerate(systems):
            messages = [
                {"role": "system", "content": system},
                {"role": "user", "content": prose(100 + number, 9)},
            ]
            answer = await client.complete(messages, max_tokens=1)
            found.append(answer.trace_id)
    return found


def explained(mesh: Endpoints, trace_id: str) -> Any:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        with suppress(Failure):
            ask(argparse.Namespace(control=mesh.control, tls_dir=None), "api", "why", trace_id)
            return run_to_end("why", trace_id, "--json", env=mesh.env).json
        time.sleep(0.05)
    pytest.fail("never explained")


def test_a_stamp_is_named_and_its_removal_predicted(mesh: Endpoints) -> None:
    systems = [f"Now: 2026-11-30T11:{20 + n}:{50 - 3 * n}Z. {RULES}" for n in range(10)]
    ids = asyncio.run(send(mesh.router, systems))
    found = explained(mesh, ids[-1])

    assert found["cause"] == "changing_text"
    assert found["change"]["kind"] == "time stamp"
    assert found["compared_prompts"] >= 9  # other tests ask the same mesh
    assert (found["change"]["message"], found["change"]["character"]) == (0, 5)
    assert "here" not in found["difference"]
    shown = run_to_end("hygiene", env=mesh.env).stdout
    assert "1. time stamp: 10 values in 10 requests" in shown
    assert "message 0 (system), characters 5 to 25" in shown


def test_an_unknown_id_is_said_to_be_unknown(mesh: Endpoints) -> None:
    result = run_to_end("why", "abcdef01", "--json", env=mesh.env)

    assert result.status == 1
    assert result.json["error"]["code"] == "NOT_FOUND"
    assert "no request abcdef01 among the" in result.json["error"]["message"]


def test_what_is_no_id_is_not_asked_for(mesh: Endpoints) -> None:
    result = run_to_end("why", "xyz", env=mesh.env)

    assert result.status == 2
    assert "must be 6 to 32 hexadecimal digits; got 'xyz'" in result.stderr


async def test_a_mesh_without_an_observer_says_so() -> None:
    async with ControlNode() as control:
        arguments = ("hygiene", "--control", control.address)
        result = await asyncio.to_thread(run_to_end, *arguments)

    assert result.status == 1
    assert "no observer is in this mesh" in result.stderr


def stamped(num_requests: int) -> Traffic:
    traffic = Traffic()
    for number in range(num_requests):
        traffic.ask(chat(f"Now: 11:{20 + number}:{50 - 3 * number}. {RULES}", "go on\x1b[2J\x9b2J"))
    return traffic


def test_people_read_the_cause_first_and_no_text_moves_their_cursor() -> None:
    traffic = stamped(8)
    trace_id = traffic.requests[-1].trace_id
    found = explain(trace_id, traffic.window, traffic.prompts, spelling=spelling(), show_text=True)
    lines = list(why.show(found))

    assert lines[0] == f"{trace_id}: changing text"
    assert lines[1].startswith(
        "  a time stamp in message 0 (system), characters 5 to 13 is different"
    )
    assert any(line.startswith('    here   "11:27:29"') for line in lines)
    assert all(line.isprintable() for line in lines)
    named = {
        **found,
        "summary": "tenant \x1b[2J",
        "also": [{"summary": "\x9b2J", "lost_tokens": 1}],
    }
    assert all(line.isprintable() for line in why.show(named))


def test_every_cause_can_be_shown() -> None:
    traffic = Traffic()
    first = traffic.ask(range(100))
    hit = traffic.ask(range(100))
    for trace_id, cause in ((first, "first of its kind"), (hit, "hit")):
        found = explain(trace_id, traffic.window, traffic.prompts)
        assert f"{trace_id}: {cause}" in "\n".join(why.show(found))
    assert f"An earlier prompt has all of its tokens: {first}, 1.0 s" in "\n".join(why.show(found))
    found = explain(first, traffic.window, Traffic().prompts)
    assert "its tokens have not been told" in "\n".join(why.show(found))


def test_hygiene_shows_examples_advice_and_notes() -> None:
    traffic = stamped(12)
    found = report(traffic.window, traffic.prompts, spelling=spelling(), show_text=True)
    text = "\n".join(hygiene.show(found))

    assert "without the stamps below" in text
    assert '     "11:31:17"' in text
    assert "move the time behind what does not change" in text
    few = report(Traffic().window, Traffic().prompts)
    assert "Note: not enough evidence: 0 answered requests" in "\n".join(hygiene.show(few))
