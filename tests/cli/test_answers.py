from __future__ import annotations

import dataclasses

import pytest

from firsttoken.client import MeshClient
from services.cli import answers
from tests.cli.running import Endpoints


@pytest.mark.parametrize(
    ("migrations", "said"),
    [
        (0, " engine (its text and its times are made up)"),
        (1, "; its worker died under it, and it went on at worker-2"),
        (2, "; 2 workers died under it, and it went on at worker-2"),
    ],
)
async def test_an_answer_says_that_its_worker_died(
    mesh: Endpoints, capsys: pytest.CaptureFixture[str], migrations: int, said: str
) -> None:
    async with MeshClient(mesh.router) as client:
        answer = await client.complete("Hello", max_tokens=2)
    moved = dataclasses.replace(answer, migrations=migrations, worker_id="worker-2")

    answers.print_answer_end(moved)

    assert capsys.readouterr().out.splitlines()[-1].endswith(said)
