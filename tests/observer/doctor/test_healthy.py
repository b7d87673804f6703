"""Nothing is named where nothing is wrong, whatever the load."""

from __future__ import annotations

from typing import Any

import pytest

from services.observer.doctor import diagnose
from tests.observer.doctor.scenarios import healthy

RUNS: list[tuple[float, int, dict[str, Any]]] = [
    (0.2, 1, {}),
    (0.7, 2, {}),
    (0.45, 4, {}),
    (0.6, 4, {"prefix_tokens": 256, "output_tokens": 16}),
    (0.3, 2, {"unique_share": 0.5}),
    (0.5, 4, {"unique_share": 0.5}),
    (0.4, 4, {"unique_share": 1.0}),
    (0.7, 2, {"num_prefixes": 8, "prefix_tokens": 4096}),
    (0.25, 2, {"document_share": 0.02, "document_tokens": 6000}),
    (0.6, 4, {"document_share": 0.02, "document_tokens": 6000}),
]


@pytest.mark.parametrize(("share", "num_workers", "load"), RUNS)
def test_a_healthy_mesh_has_no_findings(
    share: float, num_workers: int, load: dict[str, Any]
) -> None:
    seed = int(100 * share) + num_workers
    seen = healthy(seed, share=share, num_workers=num_workers, **load)
    assert [each.cause.value for each in diagnose(seen.window, seen.clues)] == []
