from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

# They deal with transports themselves; services run on uvloop.
ON_BOTH_LOOPS = ("test_redis_links", "test_redis_tls")


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.stem in ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
