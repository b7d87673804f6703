from __future__ import annotations

import pytest

from services.core.errors import InvalidArgument
from services.core.settings import MeshConfig
from worker.own_settings import read_own, with_own


def test_a_worker_may_differ_in_what_it_reads_at_start() -> None:
    own = with_own(MeshConfig(), read_own('{"worker.simulated.decode_step_ms": 40}'))
    assert own.worker.simulated.decode_step_ms == 40
    assert with_own(MeshConfig(), read_own("")) == MeshConfig()


@pytest.mark.parametrize("key", ["mesh.model", "worker.max_waiting", "worker.nothing"])
def test_what_the_mesh_decides_no_worker_does(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{key}: no setting of one worker's own"):
        with_own(MeshConfig(), {key: 1})


def test_a_value_out_of_bounds_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"worker\.num_slots"):
        with_own(MeshConfig(), {"worker.num_slots": 0})


@pytest.mark.parametrize("text", ["[]", "no JSON", "1"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--settings: must be a JSON object"):
        read_own(text)
