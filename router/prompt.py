"""What a strategy is asked, and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from services.core.tokens import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from router.fleet import Worker


class Prompt(NamedTuple):
    """What a strategy may know of a request."""

    token_ids: bytes
    # The chain's root, then one key per full block.
    prefix_keys: bytes
    block_tokens: int
    # The first bytes of its text; empty unless the configuration asks for them.
    text_head: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // BYTES_PER_TOKEN


class Considered(NamedTuple):
    """One worker that could have been chosen."""

    worker_id: str
    in_flight: int
    predicted_tokens: int
    cost_s: float


class Choice(NamedTuple):
    """A worker, and why."""

    worker: Worker
    num_candidates: int
    # For people: "least cost", "its turn", ...
    reason: str
    # Of the prompt, what is expected to be cached there; None: nobody asked.
    predicted_tokens: int | None = None
    # What is expected to be computed there, and how long that takes.
    uncached_tokens: int = 0
    work_s: float = 0.0
    # Until the first token, as estimated, and what the choice costs others.
    cost_s: float = 0.0
    # All candidates, where decisions are recorded.
    considered: tuple[Considered, ...] = ()
    # The most of the prompt that another worker is expected to have.
    best_elsewhere_tokens: int = 0
