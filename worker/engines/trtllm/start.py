"""Starting the engine core: TensorRT-LLM is imported and built, then a loop serves.

Only this module may be imported on a machine without TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import sys

from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from services.core.tensorrt import max_prompt_tokens
from services.models.catalog import Kind, ModelFiles, find_model
from services.models.loading import load_vocabulary
from services.runtime.startup import StartupError
from worker.arena import ArenaLayout
from worker.engines.contract import EngineInfo
from worker.engines.trtllm.link import AsyncLink
from worker.link import CoreLink, LinkClosed
from worker.messages import Failed, Ready
from worker.roles import Role

# What the adapter was written against; others have other fields and other traps.
SUPPORTED = "1.2."
NAME = "tensorrt_llm"
FIX = (
    "worker.engine is tensorrt_llm, and TensorRT-LLM cannot be imported here ({reason}): run in"
    " NVIDIA's TensorRT-LLM 1.2.1 image on a machine with a GPU (docker compose --profile gpu),"
    " or set worker.engine to llamacpp"
)
# As little as an arena can be: no KV goes through it.
LAYOUT_BLOCKS = 1


def serve(connection: socket.socket, config: MeshConfig, *, role: Role) -> int:
    """The process's exit status: 0 when the front has gone."""
    try:
        version = installed_version()
        files = find_model(config.mesh.model)
        weights = config.worker.tensorrt_llm.weights or _weights(files)
        info = engine_info(config, files, version=version)
    except (StartupError, InvalidArgument, OSError, ValueError) as error:
        return _refuse(connection, str(error))
    return asyncio.run(_serve(connection, config, info, weights, role=role))


def _refuse(connection: socket.socket, why: str) -> int:
    CoreLink(connection).send(Failed(why))
    return 3


def installed_version() -> str:
    """Raises StartupError that says what to do."""
    try:
        from worker.engines.trtllm import api
    except ImportError as error:
        raise StartupError(FIX.format(reason=error)) from error
    if is_release(api.VERSION) and not api.VERSION.startswith(SUPPORTED):
        raise StartupError(
            f"TensorRT-LLM {api.VERSION} is installed, and this version of firsttoken is for 1.2:"
            " pip install 'tensorrt-llm>=1.2.1,<1.3'"
        )
    return api.VERSION


def is_release(version: str) -> bool:
    """Else it is no TensorRT-LLM, but what stands in for one, and is named so."""
    return re.match(r"\d+\.\d+", version) is not None


def engine_info(config: MeshConfig, files: ModelFiles, *, version: str) -> EngineInfo:
    """But for the number of blocks, which the engine says once it is built."""
    worker, engine = config.worker, config.worker.tensorrt_llm
    vocabulary = load_vocabulary(files)
    block_tokens = config.mesh.block_tokens
    layout = (engine.kv_dtype, engine.tokens_per_block, engine.tensor_parallel_size)
    parts = (NAME, version, files.name, engine.weights, block_tokens, *layout)
    return EngineInfo(
        name=NAME if is_release(version) else version,
        model=files.name,
        fingerprint=hashlib.sha256(repr(parts).encode()).digest(),
        vocabulary_size=vocabulary.vocabulary_size,
        eos_token_ids=vocabulary.eos_token_ids,
        num_slots=worker.num_slots,
        max_context_tokens=worker.max_context_tokens,
        block_tokens=block_tokens,
        block_bytes=block_tokens,
        num_blocks=0,
        kv_in_pool=False,
        transport="" if engine.transport == "none" else f"{NAME}:{engine.transport}",
        max_prompt_tokens=max_prompt_tokens(worker),
        kv_readable=False,
        hears_of_fetch=False,
    )


def _weights(files: ModelFiles) -> str:
    if files.kind is Kind.GGUF:
        raise StartupError(
            f"TensorRT-LLM does not read {files.path.name}: set mesh.model to a folder with"
            " tokenizer and weights as on the Hugging Face hub, or worker.tensorrt_llm.weights"
        )
    return str(files.path)


async def _serve(
    connection: socket.socket, config: MeshConfig, info: EngineInfo, weights: str, *, role: Role
) -> int:
    from worker.engines.trtllm.config import build_llm
    from worker.engines.trtllm.core import TensorRtCore
    from worker.engines.trtllm.vigil import EngineStalled, count_blocks

    if config.worker.tensorrt_llm.capacity_policy == "max_utilization":
        print("engine core: max_utilization is reported to cost 40.6 % throughput", file=sys.stderr)
    try:
        llm = await asyncio.to_thread(build_llm, config, weights, role=role)
        num_blocks = await count_blocks(llm, config, info)
    except Exception as error:  # whatever it may be, it is why there is no engine
        return _refuse(connection, f"TensorRT-LLM does not start: {error}")
    info = info._replace(num_blocks=num_blocks)
    layout = ArenaLayout(info.block_bytes, LAYOUT_BLOCKS, LAYOUT_BLOCKS, LAYOUT_BLOCKS)
    async with AsyncLink(connection) as link:
        link.send(Ready(info, layout))
        try:
            await TensorRtCore(llm, info, config, link).run()
        except LinkClosed:
            await asyncio.to_thread(llm.shutdown)
        except EngineStalled as error:
            # Not shut down: that would wait for what does not answer.
            print(f"engine core: {error}", file=sys.stderr)
            return 1
    return 0
