"""What a process is told to listen on."""

from __future__ import annotations

import pytest

from services.runtime.startup import StartupError, require_named


@pytest.mark.parametrize("host", ["", "0.0.0.0", "[::]"])
def test_others_are_not_told_an_address_that_is_everywhere(host: str) -> None:
    with pytest.raises(StartupError, match="others are told this address"):
        require_named("--direct-listen", f"{host}:7105")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "worker-1", "192.0.2.1"])
def test_an_address_of_its_own_is_fine(host: str) -> None:
    require_named("--listen", f"{host}:0")
