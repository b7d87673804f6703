"""What a worker accepts: every broken field is named with its bound."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from firsttoken.worker.v1 import worker_pb2
from services.core.errors import InvalidArgument
from services.core.keys import split_keys
from services.core.ledger import Ledger, Segment
from services.core.sampling import DEFAULT_MAX_TOKENS, Sampling
from services.core.tokens import unpack
from services.runtime.protocol import check_sampling, is_batch, sampling_from_proto
from worker.engines.contract import EngineInfo


class Prompt(NamedTuple):
    """A checked request."""

    token_ids: npt.NDArray[np.uint32]
    prefix_keys: tuple[bytes, ...]
    sampling: Sampling
    batch_class: bool
    # The part of the answer that the client has already.
    answer_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """What is to be computed before the first token that is sampled here."""
        return len(self.token_ids) + len(self.answer_ids)


def check_request(request: worker_pb2.GenerateRequest, info: EngineInfo) -> Prompt:
    """Raises InvalidArgument naming the field and its bound."""
    if request.model not in ("", info.model):
        raise InvalidArgument.of("model", f"must be {info.model!r}; got {request.model!r}")
    token_ids = unpack(request.token_ids, field="token_ids", vocabulary_size=info.vocabulary_size)
    room = info.max_prompt_tokens or info.max_context_tokens - 1
    if not 1 <= len(token_ids) <= room:
        raise InvalidArgument.of("token_ids", f"must be 1 to {room} tokens; got {len(token_ids)}")
    sampling = sampling_from_proto(request.sampling)
    check_sampling(
        sampling,
        max_context_tokens=info.max_context_tokens,
        vocabulary_size=info.vocabulary_size,
    )
    answer_ids = _check_answer(request, sampling, info.vocabulary_size)
    if info.max_prompt_tokens and len(token_ids) + len(answer_ids) > room:
        raise InvalidArgument.of(
            "answer_ids", f"must fit into {room} tokens with token_ids; got {len(answer_ids)}"
        )
    return Prompt(
        token_ids=token_ids,
        prefix_keys=_check_keys(request.prefix_keys, len(token_ids), info.block_tokens),
        sampling=_resolve(sampling, info.max_context_tokens - len(token_ids)),
        batch_class=is_batch(request.request_class),
        answer_ids=answer_ids,
    )


def went_before(
    request: worker_pb2.GenerateRequest, here: Ledger
) -> tuple[tuple[Segment, float], ...]:
    """What a request went through, in order, before the engine core has it."""
    ledger = request.before
    return (
        (Segment.PREPROCESS, ledger.preprocess_ms / 1e3),
        (Segment.TRANSFER, ledger.transfer_ms / 1e3),
        (Segment.QUEUE, ledger.queue_ms / 1e3),
        (Segment.ROUTE, ledger.route_ms / 1e3),
        (Segment.PREFILL_QUEUE, ledger.prefill_queue_ms / 1e3),
        (Segment.KV_LOAD, ledger.kv_load_ms / 1e3),
        (Segment.PREPROCESS, here.spent_s(Segment.PREPROCESS)),
    )


def _check_answer(
    request: worker_pb2.GenerateRequest, sampling: Sampling, vocabulary_size: int
) -> tuple[int, ...]:
    ids = unpack(request.answer_ids, field="answer_ids", vocabulary_size=vocabulary_size)
    most = DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    if len(ids) > most:
        raise InvalidArgument.of(
            "answer_ids", f"must be at most sampling.max_tokens, {most}; got {len(ids)} tokens"
        )
    return tuple(ids.tolist())


def _check_keys(joined: bytes, num_tokens: int, block_tokens: int) -> tuple[bytes, ...]:
    if not joined:
        return ()
    try:
        keys = split_keys(joined)
    except ValueError as error:
        raise InvalidArgument.of("prefix_keys", str(error)) from None
    expected = 1 + num_tokens // block_tokens
    if len(keys) != expected:
        raise InvalidArgument.of(
            "prefix_keys",
            f"must be the root and a key per full block of {block_tokens} tokens:"
            f" {expected} keys; got {len(keys)}",
        )
    return tuple(keys)


def _resolve(sampling: Sampling, room: int) -> Sampling:
    """Fill in what depends on the request: the seed, and a length that fits the context."""
    wanted = DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    seed = random.getrandbits(64) if sampling.seed is None else sampling.seed
    return sampling._replace(max_tokens=min(wanted, room), seed=seed)
