"""The engines behind a worker, one contract."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.models.catalog import find_model
from services.models.gguf import read_metadata
from services.models.loading import load_vocabulary
from services.models.vocabulary import TO_ENCODE
from services.runtime.startup import StartupError
from worker.engines.contract import Engine

if TYPE_CHECKING:
    from worker.engines.llamacpp.context import Threads

# The engines are imported where they are opened: a worker has one of them, and its front,
# which imports their contract, has none.


def open_engine(config: MeshConfig, *, cores_shared_by: int) -> Engine:
    """The engine that `worker.engine` names, loaded.

    `cores_shared_by`: how many workers share this machine's cores, this one included.
    Raises StartupError.
    """
    try:
        files = find_model(config.mesh.model)
        if config.worker.engine == "simulated":
            from worker.engines.simulated import SimulatedEngine

            return SimulatedEngine(config, files.name, load_vocabulary(files))
        from worker.engines.llamacpp.engine import LlamaCppEngine

        metadata = read_metadata(files.gguf_path, without=TO_ENCODE)
        threads = plan_threads(
            config.worker.threads, cores_shared_by=cores_shared_by, num_cores=_num_cores()
        )
        return LlamaCppEngine(config, files, metadata, threads=threads)
    except (InvalidArgument, OSError, ValueError) as error:
        raise StartupError(str(error)) from error


def plan_threads(setting: int, *, cores_shared_by: int, num_cores: int) -> Threads:
    """Threads of one worker; `setting` 0 gives each its share of the cores."""
    from worker.engines.llamacpp.context import Threads

    num_threads = setting or max(1, num_cores // cores_shared_by)
    # Alone, spinning makes a step of several threads twice as fast. With more threads
    # than cores it takes the cores from those that have work.
    crowded = num_threads > 1 and num_threads * cores_shared_by > num_cores
    return Threads(num_threads, passive_wait=crowded)


def _num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
