"""What becomes of those whom the router does not let wait."""

from __future__ import annotations

import asyncio

from tests.gateway.edges import chat_body, refusal, run_edge
from tests.router.meshes import simulated
from tests.runtime.waiting import eventually

CHAT = "/v1/chat/completions"


async def test_who_would_wait_too_long_is_told_when_to_come_back() -> None:
    config = simulated(
        router={"max_wait_interactive_s": 0.001}, num_slots=1, timing={"decode_step_ms": 2.0}
    )
    async with run_edge(config) as edge:
        # While nobody knows how fast the worker is, all may wait; then it is known.
        answers = await asyncio.gather(*(edge.chat(max_tokens=3) for _ in range(8)))
        assert len(answers) == 8
        await edge.idle()  # a worker tells of an answer's end after the client has it
        body = chat_body(max_tokens=2000, ignore_eos=True)
        running = asyncio.ensure_future(edge.http.post(CHAT, json=body))
        await eventually(lambda: edge.mesh.router.mesh.dispatcher.num_in_flight == 1)
        response = await edge.http.post(CHAT, json=chat_body(max_tokens=1))

        assert refusal(response).code == "expected_wait"
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert "router.max_wait_interactive_s is 0.001" in response.text
        running.cancel()
        await edge.idle()
