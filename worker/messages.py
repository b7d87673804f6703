"""What front and core say to each other.

Both are the same program on the same machine, parent and child, so the messages
are pickled: one batch each way per engine step. Times are readings of
CLOCK_MONOTONIC, which the two processes share.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from services.core.ledger import Interval, Segment
from services.core.sampling import Sampling
from services.core.settings import DelaySettings
from worker.arena import ArenaLayout
from worker.engines.contract import DisaggregatedParams, EngineInfo

# --- front to core


class Source(enum.Enum):
    """Where the KV of a prompt comes from, beside the core's own pool."""

    COMPUTE = "compute"
    # Computed from its head, while blocks may come that are joined to it.
    JOIN = "join"
    # Not computed: blocks come, until Compute or LoadingEnded says otherwise.
    HOLD = "hold"


class Submit(NamedTuple):
    request_id: int
    token_ids: npt.NDArray[np.uint32]
    # The chain's root, then one key per full block; empty: no reuse.
    prefix_keys: tuple[bytes, ...]
    sampling: Sampling  # seed and max_tokens resolved by the front
    batch_class: bool
    submitted_s: float
    # The part of the answer that exists already, from a worker that died.
    answer_ids: tuple[int, ...] = ()
    source: Source = Source.COMPUTE
    # For another worker: end after the first token, and export the KV from this block
    # on to the outbox. None: an answer of our own.
    export_from: int | None = None
    # Blocks that may be exported before MoreCredit: the other worker has room for them.
    export_credit: int = 0
    # The engines move that KV themselves.
    offer: bool = False
    # What it went through before it came here, in order, in seconds.
    before: tuple[tuple[Segment, float], ...] = ()


class Cancel(NamedTuple):
    request_id: int


class StagedBlock(NamedTuple):
    """A block of a prompt that lies in the inbox. The last may hold fewer tokens than a block."""

    block_index: int
    inbox_slot: int
    num_tokens: int


class Stage(NamedTuple):
    """The core takes the inbox slots over, whatever becomes of the request."""

    request_id: int
    blocks: tuple[StagedBlock, ...]
    # The sender waits for these slots: join what there is.
    flush: bool = False


class Compute(NamedTuple):
    """Do not wait: compute from the head, and join the blocks that come."""

    request_id: int


class LoadingEnded(NamedTuple):
    """No more blocks come: join what is contiguous, compute the rest."""

    request_id: int


class FirstToken(NamedTuple):
    """Another worker has sampled it; its KV may still be on the way."""

    request_id: int
    token_id: int


class MoreCredit(NamedTuple):
    """The other worker has room for as many more blocks."""

    request_id: int
    num_blocks: int


class Fetch(NamedTuple):
    """Have the engine fetch the prompt's KV from another one; TransferDone says how it went."""

    request_id: int
    params: DisaggregatedParams


class Taken(NamedTuple):
    """The other engine says that it has all the KV it was offered."""

    request_id: int


class FreeOutbox(NamedTuple):
    """These slots have been read."""

    slots: tuple[int, ...]


class Settings(NamedTuple):
    """What may change while the core runs."""

    max_step_ms: float
    max_draft_tokens: int
    handoff_export_blocks: int
    delay_ms: DelaySettings


Command: TypeAlias = (
    Submit
    | Cancel
    | Stage
    | Compute
    | LoadingEnded
    | FirstToken
    | MoreCredit
    | Fetch
    | Taken
    | FreeOutbox
    | Settings
)

# --- core to front


class Ready(NamedTuple):
    """The first message of a core: the engine is loaded, and the arena has its size."""

    info: EngineInfo
    layout: ArenaLayout


class Failed(NamedTuple):
    """The last message of a core that could not start."""

    message: str


class TokenLogprobs(NamedTuple):
    logprob: float
    # Likeliest first.
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class FirstTokenTimes(NamedTuple):
    """The core's part of TTFT: see worker.phases. Times are readings, or in seconds."""

    submitted_s: float
    # Its turn came; the prompt's last step had ended; the first token was sampled.
    started_s: float
    evaluated_s: float
    sampled_s: float
    # The first of the phases in order, and the sums of all.
    intervals: tuple[Interval, ...]
    spent_s: dict[Segment, float]
    cached_tokens: int
    evaluated_prompt_tokens: int
    # Sequences in its first step.
    batch_size: int

    @property
    def queue_s(self) -> float:
        """Until its turn came."""
        return self.started_s - self.submitted_s

    @property
    def kv_load_s(self) -> float:
        return self.spent_s.get(Segment.KV_LOAD, 0.0)

    @property
    def computing_s(self) -> float:
        """From then on, KV left out, with the time that others' steps took."""
        return self.sampled_s - self.started_s - self.kv_load_s


class Token(NamedTuple):
    """One generated token of one request."""

    request_id: int
    token_id: int
    # "", "stop" (its id ends generation and is not part of the answer) or "length".
    finish: str
    logprobs: TokenLogprobs | None
    first: FirstTokenTimes | None
    # When the step that gave it began.
    began_s: float = 0.0
    # For another worker: what its engine needs to fetch the KV.
    params: DisaggregatedParams | None = None


# A Token without its class. There is one for each sequence and step: a NamedTuple takes ten
# times as long to make, and to pickle.
PlainToken: TypeAlias = (
    "tuple[int, int, str, TokenLogprobs | None, FirstTokenTimes | None, float,"
    " DisaggregatedParams | None]"
)


def to_token(plain: PlainToken) -> Token:
    token: Token = tuple.__new__(Token, plain)
    return token


class DraftCounts(NamedTuple):
    """Of one class of requests, since the core's start: see worker.speculation."""

    num_drafts: int = 0
    # Their tokens, and those of them that came true.
    num_drafted: int = 0
    num_accepted: int = 0
    # What verifying took beside the steps themselves, as measured, and tokens won by it: less
    # those that the same time would have brought otherwise.
    spent_s: float = 0.0
    won_tokens: float = 0.0
    # How often drafts did not pay, and whether they are tried now.
    num_rests: int = 0
    is_on: bool = True


class CoreLoad(NamedTuple):
    """Fields as in firsttoken.worker.v1.Load."""

    num_running: int
    num_waiting: int
    num_blocks_cached: int
    num_blocks_reserved: int
    num_blocks_total: int
    num_outbox_blocks: int
    prompt_tokens_evaluated: int
    decode_tokens_evaluated: int
    prompt_tokens_cached: int
    num_steps: int
    engine_busy_s: float
    longest_step_ms: float
    prefill_tokens_per_s: float
    queued_prompt_tokens: int
    # Never changed: there is another one instead.
    bubble_s: dict[str, float]
    drafts: dict[str, DraftCounts]


class Bubble(NamedTuple):
    """The engine had nothing to do, and `stage` held work for it: see worker.bubbles."""

    stage: str
    duration_s: float


class Started(NamedTuple):
    """A request has its slot, and in it what the pool held."""

    request_id: int
    num_cached_blocks: int
    # How it came so far, from its submission on.
    phases: tuple[Interval, ...]


class Progress(NamedTuple):
    """Of a request that blocks may be loaded for, or that is computed for another worker."""

    request_id: int
    num_computed: int


class StoredBlock(NamedTuple):
    """A block that entered the pool. `generation` changes before its place is overwritten."""

    prefix_key: bytes
    # Of the block before it in its chain; empty: it is the first.
    previous_key: bytes
    block_index: int
    place: int
    generation: int


class ExportedBlock(NamedTuple):
    """A block of a prompt that lies in the outbox, until FreeOutbox."""

    request_id: int
    block_index: int
    num_tokens: int
    outbox_slot: int
    checksum: bytes


class TransferDone(NamedTuple):
    """Engines have moved a prompt's KV, from here or to here; or not, and why."""

    request_id: int
    error: str


class Verified(NamedTuple):
    """A draft of a request's next tokens, and how many of them came true."""

    request_id: int
    num_drafted: int
    num_accepted: int


class RequestFailed(NamedTuple):
    """The engine does not take it, or has lost it; another one may not. It is released too."""

    request_id: int
    error: str


class StepReport(NamedTuple):
    """All that one turn of the loop produced."""

    tokens: list[PlainToken]
    # Requests gone since the last report (finished or cancelled): their slot and KV are free.
    released: list[int]
    # In order: blocks that entered the cache, and the prefix keys of those that left it.
    stored: list[StoredBlock]
    evicted: list[bytes]
    load: CoreLoad
    started: list[Started]
    progress: list[Progress]
    exported: list[ExportedBlock]
    # Inbox slots whose blocks are in the engine, or are not needed.
    inbox_freed: list[int]
    transfers: list[TransferDone]
    bubbles: list[Bubble]
    verified: list[Verified]
    failed: tuple[RequestFailed, ...] = ()


Report: TypeAlias = Ready | Failed | StepReport
