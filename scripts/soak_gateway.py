"""Cancel a third of many streams, round after round, and see that nothing is left.

    .venv/bin/python -m scripts.soak_gateway --rounds 20

Prints a line a round: resident memory, sockets and open calls of gateway and router.
Exit status 1 when a counter is not zero, a socket is left, or memory goes on growing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
from pathlib import Path
from typing import NamedTuple

import orjson

from firsttoken.control.v1 import control_pb2, control_pb2_grpc
from services.cli.plans import run_quiet_mesh
from services.core import config
from services.runtime.channels import open_channel

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Allocators settle in the first rounds.
SETTLING_ROUNDS = 5
GROWTH_MB = 8.0
IDLE_S = 30.0


class Resources(NamedTuple):
    rss_mb: float
    sockets: int

    @classmethod
    def of(cls, pid: int) -> Resources:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        sockets = 0
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets += os.readlink(descriptor).startswith("socket:")
        return cls(pages * PAGE_BYTES / 2**20, sockets)


class Client(NamedTuple):
    host: str
    port: int

    async def ask(self, *, num_tokens: int, leave_after_s: float | None) -> bytes:
        """All that came. On a connection of its own, like the next one."""
        body = orjson.dumps(
            {
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: mesh\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(head.encode() + body)
            async with asyncio.timeout(leave_after_s):
                return await reader.read()
        except TimeoutError:
            return b""
        finally:
            writer.close()

    async def open_counts(self) -> dict[str, float]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        wanted = ("requests_in_flight", "mesh_calls_in_flight", "connections")
        lines = [line.split() for line in text.splitlines() if line.startswith("firsttoken_")]
        return {name: float(v) for key, v in lines for name in wanted if key.endswith(f"_{name}")}

    async def idle(self) -> bool:
        """The one who asks is counted too."""
        own = {"requests_in_flight": 1.0, "mesh_calls_in_flight": 0.0, "connections": 1.0}
        deadline_s = asyncio.get_running_loop().time() + IDLE_S
        while await self.open_counts() != own:
            if asyncio.get_running_loop().time() > deadline_s:
                return False
            await asyncio.sleep(0.05)
        return True


async def soak(num_rounds: int, num_streams: int) -> int:
    timing = {"prefill_tokens_per_s": 1e6, "decode_step_ms": 2.0}
    worker = {"engine": "simulated", "num_slots": 16, "simulated": timing}
    settings = config.parse({"worker": worker})
    seeded = random.Random(1)
    async with run_quiet_mesh(
        settings, num_workers=4, with_kvstore=False, with_gateway=True
    ) as mesh:
        host, _, port = mesh.http.removeprefix("http://").rpartition(":")
        client, pids = Client(host, int(port)), await _pids(mesh.control)
        seen: list[dict[str, Resources]] = []
        for number in range(1, num_rounds + 1):
            await _round(client, num_streams, seeded)
            if not await client.idle():
                print(f"not idle: {await client.open_counts()}", file=sys.stderr)
                return 1
            seen.append({name: Resources.of(pid) for name, pid in pids.items()})
            shown = ", ".join(
                f"{k} {v.rss_mb:.1f} MiB {v.sockets} sockets" for k, v in seen[-1].items()
            )
            print(f"round {number}: {shown}", flush=True)
    return _judge(seen)


async def _round(client: Client, num_streams: int, seeded: random.Random) -> None:
    asked = []
    for number in range(num_streams):
        leaves = number % 3 == 0
        num_tokens = 1000 if leaves else seeded.randint(5, 20)
        leave_after_s = seeded.random() if leaves else None
        asked.append(client.ask(num_tokens=num_tokens, leave_after_s=leave_after_s))
    received = await asyncio.gather(*asked)
    whole = sum(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in received)
    assert whole >= num_streams * 2 // 3, f"only {whole} answers came whole"


async def _pids(control: str) -> dict[str, int]:
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        listed = await stub.ListMembers(control_pb2.ListMembersRequest())
    roles = {
        control_pb2.MEMBER_ROLE_GATEWAY: "gateway",
        control_pb2.MEMBER_ROLE_ROUTER: "router",
    }
    return {roles[member.role]: member.pid for member in listed.members if member.role in roles}


def _judge(seen: list[dict[str, Resources]]) -> int:
    status = 0
    settled = seen[min(SETTLING_ROUNDS, len(seen)) - 1]
    for name, last in seen[-1].items():
        growth_mb = last.rss_mb - settled[name].rss_mb
        more_sockets = last.sockets - settled[name].sockets
        print(f"{name}: {growth_mb:+.1f} MiB and {more_sockets:+d} sockets since it settled")
        if growth_mb > GROWTH_MB or more_sockets > 0:
            status = 1
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=200)
    arguments = parser.parse_args()
    return asyncio.run(soak(arguments.rounds, arguments.streams))


if __name__ == "__main__":
    sys.exit(main())
