"""The tokenizer in the router's own process (router.tokenize): its ids cost no call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

from firsttoken.tokenizer.v1 import tokenizer_pb2
from services.core.errors import InvalidArgument
from services.core.ledger import Ledger, Segment
from services.core.metrics import Sample
from services.core.settings import MeshConfig, MeshSettings
from services.core.tokens import BYTES_PER_TOKEN
from services.encoding.metrics import Counts
from services.runtime.delays import inject
from services.runtime.startup import StartupError

if TYPE_CHECKING:
    from services.encoding.on_loop import LoopEncoder

logger = logging.getLogger(__name__)


class EmbeddedTokenizer:
    """Not ready until the vocabulary is loaded, nor where it cannot be: the service encodes then.

    `on_ready` is called each time when it has become so.
    """

    def __init__(self, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._config = MeshConfig()
        # What is loaded, or being loaded, or could not be.
        self._wanted: MeshSettings | None = None
        self._loading: asyncio.Task[None] | None = None
        self._encoder: LoopEncoder | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._counts = Counts()

    @property
    def ready(self) -> bool:
        return self._encoder is not None

    def configure(self, config: MeshConfig) -> None:
        self._config = config
        wanted = config.mesh if config.router.tokenize == "embedded" else None
        if wanted == self._wanted:
            return
        self._drop()
        self._wanted = wanted
        if wanted is not None:
            self._loading = asyncio.create_task(self._load(wanted))

    async def encode(
        self, request: tokenizer_pb2.EncodeRequest, ledger: Ledger, *, began_s: float
    ) -> tokenizer_pb2.EncodeResponse:
        """To be called when it is ready. All time from `began_s` on is preprocess."""
        encoder = self._encoder
        assert encoder is not None
        try:
            with self._counts.encoding():
                await inject(self._config.debug.delay_ms.tokenizer_encode)
                response = await encoder.encode(request, self._config.tokenizer)
        finally:
            ledger.record(Segment.PREPROCESS, began_s, time.monotonic())
        self._counts.encoded(len(response.token_ids) // BYTES_PER_TOKEN)
        return response

    def read_metrics(self) -> Iterator[Sample]:
        """Those of a tokenizer, from a process that is one."""
        if self._encoder is not None:
            yield from self._counts.read(self._encoder.counts)

    async def close(self) -> None:
        """After the last call."""
        loading = self._loading
        self._drop()
        if loading is not None:
            await asyncio.wait([loading])
        if self._threads is not None:
            # Waiting for threads would block the loop.
            await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def _load(self, mesh: MeshSettings) -> None:
        # Kept for what may come after: calls that have begun go on with what they have.
        if self._threads is None:
            num_threads = self._config.tokenizer.threads
            self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        try:
            self._encoder = await asyncio.to_thread(_load, mesh, self._threads)
        except (InvalidArgument, StartupError) as error:
            logger.warning("the tokenizer service encodes, not this process: %s", error)
        else:
            self._on_ready()

    def _drop(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
        self._loading = self._encoder = self._wanted = None


def _load(mesh: MeshSettings, threads: Executor) -> LoopEncoder:
    # 0.2 s of imports that routers do without when the service encodes.
    from services.encoding.loading import load_encoder
    from services.encoding.on_loop import LoopEncoder

    return LoopEncoder(load_encoder(mesh), threads)
