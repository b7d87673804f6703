"""Calls of every shape at once, with deadlines, cancellations and resets at random moments; and
bytes at a server's port that are no calls."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from tests.runtime.raw_http2 import DATA, HEADERS, PREFACE, SETTINGS, frame
from tests.runtime.waiting import eventually
from tests.transports.relays import open_connection
from tests.transports.ways import KINDS, Kind, Way, open_way, payload

NUM_CALLS = 150
AT_ONCE = 24
PATIENCE_S = 60.0
# Of a call that was cut off.
CUT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
# What grpc.aio 1.76 says to who writes to a call that has just ended, for whatever reason.
WRITTEN_TO_LATE = grpc.StatusCode.INTERNAL

kinds = pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])


@dataclass
class Case:
    """A call, and what may become of it."""

    shape: str
    count: int
    num_bytes: int
    timeout_s: float | None
    cancel_after_s: float | None
    # Resets since it began.
    num_resets: int = 0
    problems: list[str] = field(default_factory=list)

    @classmethod
    def draw(cls, chance: random.Random) -> Case:
        return cls(
            shape=chance.choice(["tell", "many", "count", "echo"]),
            count=chance.choice([0, 1, 2, 20]),
            num_bytes=chance.choice([0, 1, 1000, 70_000]),
            timeout_s=chance.uniform(0.0, 0.05) if chance.random() < 0.2 else None,
            cancel_after_s=chance.uniform(0.0, 0.03) if chance.random() < 0.2 else None,
        )

    @property
    def allowed(self) -> set[grpc.StatusCode]:
        codes = set(CUT) if self.num_resets else set()
        if self.timeout_s is not None:
            codes.add(grpc.StatusCode.DEADLINE_EXCEEDED)
        if self.cancel_after_s is not None:
            codes.add(grpc.StatusCode.CANCELLED)
        if codes and self.shape in ("echo", "count"):
            # CANCELLED: of a call that takes an iterator of requests, where it meets its end.
            codes |= {WRITTEN_TO_LATE, grpc.StatusCode.CANCELLED}
        return codes

    def messages(self) -> Iterator[bytes]:
        return (payload(number, self.num_bytes) for number in range(self.count))

    async def run(self, way: Way) -> None:
        """Exactly what was asked for, or a status that its faults allow.

        It is cancelled as services do it: who waits for the call, and with that the call. Of one
        that was cancelled while its channel was still connecting, grpc.aio 1.76 lets those wait
        for ever who go on using it.
        """
        call, answering = self._begin(way)
        task = asyncio.ensure_future(answering())
        timer = None
        if self.cancel_after_s is not None:
            timer = asyncio.get_running_loop().call_later(self.cancel_after_s, task.cancel)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await task
        except grpc.aio.AioRpcError as error:
            if error.code() not in self.allowed:
                self.problems.append(f"{error.code()}: {error.details()}")
        except (cygrpc.ExecuteBatchError, asyncio.InvalidStateError) as error:  # used after its end
            if not self.allowed:
                self.problems.append(repr(error))
        except asyncio.CancelledError:
            if grpc.StatusCode.CANCELLED not in self.allowed:
                self.problems.append("cancelled")
        except TimeoutError:
            self.problems.append("it hangs")
        finally:
            if timer is not None:
                timer.cancel()
            call.cancel()

    def _begin(self, way: Way) -> tuple[Any, Callable[[], Coroutine[None, None, None]]]:
        match self.shape:
            case "tell":
                call = way.tell(payload(1, self.num_bytes), timeout=self.timeout_s)
                return call, lambda: self._expect_some(call)
            case "many":
                call = way.many(self.count, self.num_bytes, timeout=self.timeout_s)
                return call, lambda: self._expect_messages(call)
            case "count":
                call = way.count(self.messages(), timeout=self.timeout_s)
                return call, lambda: self._expect_sum(call)
        call = way.echo(timeout=self.timeout_s)
        return call, lambda: self._expect_echo(call)

    async def _expect_some(self, call: Any) -> None:
        assert await call

    async def _expect_messages(self, call: Any) -> None:
        self._compare([message async for message in call], list(self.messages()))

    async def _expect_sum(self, call: Any) -> None:
        self._compare(int(await call), self.count * self.num_bytes)

    async def _expect_echo(self, call: Any) -> None:
        for message in self.messages():
            await call.write(message)
            self._compare(await call.read(), message)
        await call.done_writing()
        self._compare(await call.read(), grpc.aio.EOF)

    def _compare(self, found: object, wanted: object) -> None:
        # Where a call has ended, reading says that there is no more; its status says why.
        if found != wanted and not self.allowed:
            self.problems.append(f"{str(found)[:40]} instead of {str(wanted)[:40]}")


@kinds
@pytest.mark.parametrize("has_resets", [False, True], ids=["whole", "cut"])
async def test_each_call_gets_its_own_or_says_why_not(
    kind: Kind, has_resets: bool, tmp_path: Path
) -> None:
    chance = random.Random(f"{kind.name} {has_resets}")
    room = asyncio.Semaphore(AT_ONCE)
    running: set[int] = set()
    async with open_way(kind, tmp_path, relayed=True) as way:
        await way.tell()
        cases = [Case.draw(chance) for _ in range(NUM_CALLS)]

        async def run(number: int) -> None:
            async with room:
                running.add(number)
                await cases[number].run(way)
                running.discard(number)

        async def reset() -> None:
            while True:
                await asyncio.sleep(chance.uniform(0.02, 0.06))
                # Until it has connected again, what begins fails too.
                for number in range(NUM_CALLS):
                    cases[number].num_resets += 1
                way.relay.cut()

        resetting = asyncio.create_task(reset()) if has_resets else None
        await asyncio.gather(*map(run, range(NUM_CALLS)))
        if resetting is not None:
            resetting.cancel()
        await way.idle()
        await eventually(lambda: _answers(way))

    assert not running
    problems = [problem for case in cases for problem in case.problems]
    assert not problems, "\n".join(problems)


async def _answers(way: Way) -> bool:
    try:
        return bool(await way.tell(timeout=5.0))
    except grpc.aio.AioRpcError:
        return False


def garbage(chance: random.Random) -> Iterator[bytes]:
    """No bytes, any bytes, less than HTTP/2's preface, and frames that break its rules."""
    settings = PREFACE + frame(SETTINGS, 0, 0)
    yield b""
    yield chance.randbytes(2000)
    yield b"GET / HTTP/1.1\r\nhost: mesh\r\n\r\n"
    yield PREFACE[:10]
    yield PREFACE + chance.randbytes(500)
    yield settings + frame(DATA, 0, 1, b"for a stream that is none")
    yield settings + frame(HEADERS, 4, 1, chance.randbytes(60))
    yield settings + frame(HEADERS, 4, 0, b"")
    yield settings + frame(SETTINGS, 0, 0, b"odd")
    yield settings + (1 << 23).to_bytes(3, "big") + bytes([DATA, 0]) + bytes(4)
    for kind in range(0, 20, 3):
        yield settings + frame(
            kind, chance.randrange(256), chance.randrange(5), chance.randbytes(9)
        )


@kinds
async def test_bytes_that_are_no_calls_disturb_nobody(kind: Kind, tmp_path: Path) -> None:
    chance = random.Random(kind.name)
    async with open_way(kind, tmp_path) as way:
        held = way.hold()
        await way.service.has_come.wait()
        num_files = len(os.listdir("/proc/self/fd"))
        for sent in garbage(chance):
            reader, writer = await open_connection(way.server.local_address or way.server.address)
            with suppress(OSError):
                writer.write(sent)
                await writer.drain()
                if chance.random() < 0.5:
                    writer.write_eof()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await reader.read(1 << 16)
            writer.transport.abort()
            assert await way.tell()
        assert way.service.num_running == 1
        held.cancel()
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= num_files, "files to close")
