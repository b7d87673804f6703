"""What is asked of a mesh, and when: traces and synthetic loads in one form, without text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

# A load lasts no longer, so that virtual time, a float, stays exact; nor is it silent for longer,
# unless people pause, so that wrong units and clocks show.
MAX_GAP_S = 86_400.0
MAX_DURATION_S = 30 * 86_400.0


class Arrival(NamedTuple):
    """A request. `at_s`: from the workload's start, where the first one comes.

    `chain`: the prefix keys (services.core.keys) of the prompt's full blocks, from its start;
    it may be shorter, where nothing is known of the rest, and never longer than the prompt.
    """

    at_s: float
    chain: tuple[bytes, ...]
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    request_class: str = "interactive"
    # From the arrival on.
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`arrivals` in the order of time. They may be made anew at each iteration, so that long
    chains need not all lie in memory."""

    name: str
    block_tokens: int
    num_requests: int
    arrivals: Iterable[Arrival]
