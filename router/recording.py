"""Decisions on their way to a file, by a thread of its own. See decisions.py for the format."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from router.decisions import (
    Anonymous,
    Decision,
    decision_line,
    dropped_line,
    end_line,
    header,
    settings_line,
    workers_line,
)
from router.fleet import Announced
from services.core.config import Snapshot
from services.runtime.logs import event

# Decisions that may wait for the disk.
MAX_QUEUED = 4096
# Names that are tried: a file that is there is never written over.
MAX_FILES = 100
CLOSE_TIMEOUT_S = 2.0
SALT_BYTES = 32
# Lines that a failing disk may take with it, though it had taken them.
MAX_UNFLUSHED = 64

Line: TypeAlias = Callable[[float], bytes]

logger = logging.getLogger(__name__)


class Tally:
    """Decisions, over all files of a router. Threads change it, under its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_written = 0
        self.num_lost = 0


class _Entry(NamedTuple):
    line: Line
    num_decisions: int


class Recorder:
    """Records where the configuration says so. Nothing here waits, but `close`."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._file: RecordFile | None = None
        self._wanted: tuple[str, int] | None = None
        self._sample = 0.0
        self._workers: tuple[Announced, ...] = ()
        self._snapshot: Snapshot | None = None
        self._closing: list[RecordFile] = []
        self._tally = Tally()

    @property
    def num_written(self) -> int:
        return self._tally.num_written

    @property
    def num_dropped(self) -> int:
        """Those that the disk was too slow for, or did not take."""
        return self._tally.num_lost

    @property
    def active(self) -> bool:
        """Whether decisions are asked for: then `record` takes or counts them."""
        return self._file is not None and self._file.wants

    def configure(self, snapshot: Snapshot) -> None:
        settings = snapshot.config.router
        before, self._snapshot = self._snapshot, snapshot
        self._sample = settings.record_sample
        wanted = (settings.record_decisions, settings.record_max_bytes)
        if wanted != self._wanted:
            self._wanted = wanted
            self._close_file()
            if settings.record_decisions:
                self._file = self._open(snapshot, Path(settings.record_decisions), wanted[1])
        elif self._file is not None and before is not None and before.config != snapshot.config:
            self._file.put(lambda at_s: settings_line(at_s, snapshot))

    def update_workers(self, workers: Iterable[Announced]) -> None:
        now = tuple(each for each in workers if each.ready)
        if now != self._workers:
            self._workers = now
            if self._file is not None:
                self._file.put(lambda at_s: workers_line(at_s, now))

    def record(self, decision: Decision) -> None:
        file = self._file
        if file is None or not file.wants or random.random() >= self._sample:
            return
        if decision.arrived_s < file.start_s:
            return  # it came before all that the file says of the mesh
        file.put(
            lambda at_s: decision_line(decision, file.names, start_s=file.start_s), num_decisions=1
        )

    async def close(self) -> None:
        """What waits is written, as far as CLOSE_TIMEOUT_S lets it. May be called twice."""
        self._close_file()
        closing, self._closing = self._closing, []
        for file in closing:
            await asyncio.to_thread(file.join, CLOSE_TIMEOUT_S)

    def _open(self, snapshot: Snapshot, path: Path, max_bytes: int) -> RecordFile:
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        first = header(self._router_id, snapshot, started=started, sample=self._sample)
        lines = [first, workers_line(0.0, self._workers)]
        return RecordFile(path, lines, max_bytes, self._tally)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.end()
            self._closing = [each for each in self._closing if each.running]
            self._closing.append(self._file)
            self._file = None


class RecordFile:
    """One file, from its first line until it is ended, is full, or cannot be written.

    `path`: where a file of that name is there already, a number comes into it.
    """

    def __init__(self, path: Path, first: Iterable[bytes], max_bytes: int, tally: Tally) -> None:
        self.names = Anonymous(secrets.token_bytes(SALT_BYTES))
        self.start_s = time.monotonic()
        self._path = path
        self._first = tuple(first)
        self._max_bytes = max_bytes
        self._tally = tally
        # None: the end.
        self._queue: queue.Queue[_Entry | None] = queue.Queue(MAX_QUEUED)
        self._ended = False
        self._failed = False
        self._num_dropped = 0
        # Decisions that were given to the file, and may not have got there.
        self._num_unflushed = 0
        self._thread = threading.Thread(target=self._run, name="decisions", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def wants(self) -> bool:
        """Whether it takes lines, or counts them where it cannot be written."""
        return not self._ended and (self._failed or self.running)

    def put(self, line: Line, *, num_decisions: int = 0) -> None:
        """What has no room, or cannot be written any more, is counted as lost."""
        with self._tally.lock:
            if not self._failed and not self._queue.full():
                self._queue.put_nowait(_Entry(line, num_decisions))
                return
            self._num_dropped += num_decisions
            self._tally.num_lost += num_decisions

    def end(self) -> None:
        """May be called twice."""
        self._ended = True
        with contextlib.suppress(queue.Full):  # it sees `_ended` when it has caught up
            self._queue.put_nowait(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            path, descriptor = self._create()
            event(logger, logging.INFO, "recording decisions", file=str(path))
            with open(descriptor, "wb") as file:
                reason = self._write(file)
            event(logger, logging.INFO, "recording ended", file=str(path), reason=reason)
        except OSError as error:
            self._fail()
            problem = {"file": str(self._path), "reason": error.strerror or str(error)}
            event(logger, logging.ERROR, "decisions are not recorded", **problem)

    def _fail(self) -> None:
        """What waits is lost, and what comes will be."""
        with self._tally.lock:
            self._failed = True
            num_lost = self._num_unflushed
            with contextlib.suppress(queue.Empty):
                while True:
                    entry = self._queue.get_nowait()
                    num_lost += entry.num_decisions if entry is not None else 0
            self._tally.num_lost += num_lost

    def _create(self) -> tuple[Path, int]:
        """For its owner alone. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for number in range(1, MAX_FILES + 1):
            path = self._path
            if number > 1:
                path = path.with_stem(f"{path.stem}-{number}")
            try:
                return path, os.open(path, flags, 0o600)
            except FileExistsError:
                if not path.is_file():
                    raise OSError("it is there, and no regular file: name another") from None
            except ValueError as error:  # a NUL
                raise OSError(f"no file can have this name: {error}") from None
        raise OSError(f"{MAX_FILES} files of this name are there: move some away")

    def _write(self, file: BinaryIO) -> str:
        """Until the end; returns why it came."""
        size = sum(map(len, self._first))
        file.writelines(self._first)
        told = 0
        while True:
            if self._queue.empty() or self._num_unflushed >= MAX_UNFLUSHED:
                self._flush(file)
                if self._ended and self._queue.empty():
                    reason = "stopped"
                    break
            entry = self._queue.get()
            if entry is None:
                continue
            at_s = round(time.monotonic() - self.start_s, 6)
            data = entry.line(at_s)
            if dropped := self._num_dropped - told:
                told += dropped
                data = dropped_line(at_s, dropped) + data
            if size + len(data) > self._max_bytes:
                reason = f"router.record_max_bytes, {self._max_bytes}, is reached"
                break
            self._num_unflushed += entry.num_decisions
            file.write(data)
            size += len(data)
        at_s = round(time.monotonic() - self.start_s, 6)
        if dropped := self._num_dropped - told:
            file.write(dropped_line(at_s, dropped))
        file.write(end_line(at_s, reason))
        self._flush(file)
        return reason

    def _flush(self, file: BinaryIO) -> None:
        file.flush()
        with self._tally.lock:
            self._tally.num_written += self._num_unflushed
        self._num_unflushed = 0
