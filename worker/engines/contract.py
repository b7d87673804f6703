"""What the batching loop asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Logits: TypeAlias = npt.NDArray[np.float32]
Generations: TypeAlias = npt.NDArray[np.uint64]


class EngineInfo(NamedTuple):
    """What an engine is, fixed once it has started."""

    name: str
    model: str
    # Engine version, weights, KV layout and dtype: equal fingerprints exchange KV bytes.
    fingerprint: bytes
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    num_slots: int
    max_context_tokens: int
    block_tokens: int
    block_bytes: int
    num_blocks: int
    # True: a running request's KV occupies blocks of the pool (paged).
    # False: the engine keeps it in memory of its own, and the pool only caches.
    kv_in_pool: bool
    # How it moves KV to other engines by itself: those that say the same can. Empty: it
    # does not.
    transport: str = ""
    # The longest prompt it takes; 0: what max_context_tokens has room for.
    max_prompt_tokens: int = 0
    # Its KV can be read and written as bytes. Else it is for engines alone to move.
    kv_readable: bool = True
    # It knows by itself when another engine has fetched KV that it offered.
    hears_of_fetch: bool = True

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_tokens


class Work(NamedTuple):
    """A run of tokens of one sequence to evaluate in a step."""

    slot: int
    # Position of the first of `tokens` in its sequence.
    position: int
    tokens: npt.NDArray[np.uint32]
    # Give the logits after each of so many of them, the last ones.
    num_logits: int

    @property
    def wants_logits(self) -> bool:
        return self.num_logits > 0


Handle: TypeAlias = dict[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregatedParams:
    """What an engine needs to fetch a prompt's KV from the engine that has computed it.

    The fields of TensorRT-LLM's class of this name, which has those of the last group
    since 1.3. None of them means anything to the mesh.
    """

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[Handle] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: Handle | None = None
    mrope_position_deltas_handle: Handle | None = None

    disagg_request_id: int | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: Handle | None = None


class TransferEnded(NamedTuple):
    """`error` is empty when the KV has arrived."""

    slot: int
    error: str


class KvTransport(Protocol):
    """What an engine has that moves KV to another one itself, beside its steps."""

    def offer(self, slot: int, first: int, first_token: int) -> DisaggregatedParams:
        """Let another engine fetch the slot's KV from block `first` on.

        The slot is not to be changed before the transfer has ended or is given up.
        """
        ...

    def fetch(self, slot: int, params: DisaggregatedParams) -> None:
        """Begin to add KV that another engine offers to what the slot holds.

        The slot is not to be used before the transfer has ended or is given up. What is
        wrong with `params` is said by the transfer's end.
        """
        ...

    def give_up(self, slot: int) -> None:
        """Break off the slot's transfer, if it has one; it then does not end."""
        ...

    def ended(self) -> list[TransferEnded]:
        """Transfers of either kind that have ended since the last call. Never waits."""
        ...


class Stepper(Protocol):
    """What an engine has that computes by itself once a step has begun, as a GPU does."""

    @property
    def overlap(self) -> bool:
        """Decode steps run beside prompts, as where both share a GPU's units."""
        ...

    def begin(self, batch: Sequence[Work]) -> float:
        """Begin a step; says when it ends, as a reading of CLOCK_MONOTONIC.

        `evaluate` of the same batch ends the step: it waits until then, if called before.
        One step at most is in progress; with `overlap`, one of prompts alone and one of
        decodes alone. Other calls may come meanwhile, but what the step's slots hold is not
        to be changed.
        """
        ...


class Engine(Protocol):
    """One model in one process, driven by one thread.

    A slot holds the KV of one sequence, positions 0..n-1. Slots are numbered
    0..num_slots-1. Methods block; all but `close` may raise EngineFailure.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def transport(self) -> KvTransport | None:
        """Not None if and only if `info.transport` says how."""
        ...

    @property
    def stepper(self) -> Stepper | None:
        """None: it computes in `evaluate`, and nothing else is done meanwhile."""
        ...

    def evaluate(self, batch: Sequence[Work]) -> Logits:
        """Evaluate a batch in one step and append its KV to the slots.

        Returns shape (sum of the works' num_logits, width), rows in their order;
        width <= vocabulary_size, and ids beyond it have probability 0. The array is
        valid until the next call, and not to be written to.
        """
        ...

    def export_blocks(self, slot: int, first: int, blocks: Sequence[Bytes]) -> None:
        """Copy the slot's blocks first, first+1, ... into `blocks`.

        Each of block_bytes, but the last, which may be shorter: whole tokens only.
        """
        ...

    def append_blocks(self, slot: int, blocks: Sequence[Bytes]) -> None:
        """Add these blocks to what the slot holds, which must be whole blocks itself.

        Sizes as for `export_blocks`.
        """
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget what the slot holds beyond its first `length` tokens."""
        ...

    def clear(self, slot: int) -> None:
        """Forget the slot's sequence."""
        ...

    def close(self) -> None:
        """Free the model. May be called twice."""
        ...


class EngineFailure(Exception):
    """The engine refused a call; what it held is no longer to be trusted."""
