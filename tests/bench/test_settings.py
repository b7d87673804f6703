from __future__ import annotations

import pytest

from services.bench.settings import configure
from services.runtime.startup import StartupError
from tests.runtime.ports import free_port


async def test_a_mesh_that_is_gone_is_said_to_be() -> None:
    with pytest.raises(StartupError, match="the mesh's control service failed"):
        await configure(f"127.0.0.1:{free_port()}", {"router.max_queue": 5})
