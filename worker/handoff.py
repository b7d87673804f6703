"""The decode worker's side of a hand-off: another worker computes the prompt.

Decode leads. It has a slot and KV room of its own before it calls; it says which
blocks it holds, takes the others as they are finished, and passes the first token on
at once. Whatever goes wrong, it computes what is missing itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError

from firsttoken.common.v1 import common_pb2
from firsttoken.control.v1 import control_pb2
from firsttoken.worker.v1 import worker_pb2
from services.core.errors import MeshError
from services.core.ledger import Interval, Segment
from services.core.settings import DelaySettings, WorkerSettings
from services.runtime.channels import Channels
from services.runtime.delays import inject
from worker.copying import Copier
from worker.front import EngineFront
from worker.messages import Token, TokenLogprobs
from worker.origin import Origin
from worker.peers import PeerMemory
from worker.requests import Prompt
from worker.stream import TokenStream
from worker.taking import BlockTaker, HandoffFailed
from worker.wire import SERVICE_NAME, Received, decode

Metadata: TypeAlias = tuple[tuple[str, str], ...]
PrefillMethod: TypeAlias = "grpc.aio.StreamStreamMultiCallable[worker_pb2.PrefillRequest, Received]"

METHOD = f"/{SERVICE_NAME}/Prefill"

_log = logging.getLogger(__name__)

_NAMES = {
    worker_pb2.KV_TRANSPORT_SHARED_MEMORY: "shared_memory",
    worker_pb2.KV_TRANSPORT_GRPC: "grpc",
    worker_pb2.KV_TRANSPORT_ENGINE: "engine",
}
_FINISH = {
    common_pb2.FINISH_REASON_UNSPECIFIED: "",
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


class HandoffCost:
    """What a hand-off adds to computing, as a moving estimate. Pure."""

    FIRST_GUESS_S = 0.02

    def __init__(self) -> None:
        self.overhead_s = self.FIRST_GUESS_S

    def observe(self, overhead_s: float) -> None:
        self.overhead_s += 0.2 * (overhead_s - self.overhead_s)

    def threshold_tokens(self, *, prefill_tokens_per_s: float, block_tokens: int) -> int:
        """Below this many tokens computing them here costs less than a hand-off."""
        return max(block_tokens, round(prefill_tokens_per_s * self.overhead_s))


class Handoffs:
    """Opens calls to prefill workers. `find_member`: by address."""

    def __init__(
        self,
        front: EngineFront,
        channels: Channels,
        memory: PeerMemory,
        copier: Copier,
        *,
        find_member: Callable[[str], control_pb2.Member | None],
        settings: Callable[[], WorkerSettings],
        delays: Callable[[], DelaySettings] = DelaySettings,
    ) -> None:
        self._front = front
        self._channels = channels
        self._memory = memory
        self._copier = copier
        self._find_member = find_member
        self._settings = settings
        self._delays = delays
        self.cost = HandoffCost()

    def why_not(self, prompt: Prompt, num_cached_blocks: int) -> str:
        """Empty when a hand-off pays."""
        block_tokens = self._front.info.block_tokens
        uncached = prompt.num_tokens - num_cached_blocks * block_tokens
        threshold = self._settings().handoff_min_tokens or self.cost.threshold_tokens(
            prefill_tokens_per_s=self._front.hub.load.prefill_tokens_per_s,
            block_tokens=block_tokens,
        )
        if uncached < threshold:
            return f"uncached part of {uncached} tokens is below {threshold}"
        return ""

    async def run(
        self,
        stream: TokenStream,
        request: worker_pb2.GenerateRequest,
        num_cached_blocks: int,
        origin: Origin,
        metadata: Metadata,
    ) -> None:
        """Raises HandoffFailed; what has come by then is kept."""
        member = self._find_member(request.prefill_address)
        if member is None:
            raise HandoffFailed("the prefill worker is gone")
        delay_ms = self._delays()
        started_s = time.monotonic()
        mapped = await self._memory.outbox(member.memory_socket)
        mapped_s = time.monotonic()
        start = self._start(request, num_cached_blocks, member, same_host=mapped is not None)
        num_tokens = (len(request.token_ids) + len(request.answer_ids)) // 4
        taker = BlockTaker(self._front, self._copier, stream, start, num_tokens, mapped)
        call = None
        try:
            async with self._patience() as patience:
                await inject(delay_ms.handoff_reserve)
                await taker.reserve()
                called_s = time.monotonic()
                came = (
                    *stream.phases,
                    Interval(Segment.PREFILL_QUEUE, stream.phases[-1].end_s, started_s),
                    Interval(Segment.TRANSFER, started_s, mapped_s),
                    # For room for what is to come.
                    Interval(Segment.KV_LOAD, mapped_s, called_s),
                )
                _add_before(start.request.before, came)
                await inject(delay_ms.handoff_call)
                call = self._prefill(member.address)(taker.requests(), metadata=metadata)
                async for received in call:
                    patience.reschedule(self._deadline_s())
                    if (first := _first_token(received)) is not None:
                        origin.path.prefill_worker_id = member.id
                        origin.path.transport = _NAMES[start.transport]
                        origin.hand_off(
                            first,
                            before=came,
                            called_s=called_s,
                            same_clock=mapped is not None,
                        )
                        stream.first_token(_to_token(stream.request_id, first))
                    await taker.take(received)
        except DecodeError as error:
            raise HandoffFailed(f"{member.id}: {error}") from error
        except grpc.aio.AioRpcError as error:
            # Who says just then what it has taken hears INTERNAL where the call ended well.
            if not taker.complete and not stream.finished:
                said = f"{member.id}: {error.code().name}: {error.details()}"
                raise HandoffFailed(said) from error
        except TimeoutError:
            raise HandoffFailed(f"{member.id} does not answer") from None
        except (HandoffFailed, MeshError):
            raise
        except Exception as error:
            _log.exception("the hand-off from %s failed", member.id)
            raise HandoffFailed("internal error") from error
        finally:
            taker.close()
            if call is not None:
                call.cancel()
        if not taker.complete and not stream.finished:
            raise HandoffFailed(f"{member.id} ended the call early")
        if origin.first_token_s is not None:
            self.cost.observe(time.monotonic() - origin.first_token_s)

    def _prefill(self, address: str) -> PrefillMethod:
        return self._channels.get(address).stream_stream(
            METHOD,
            request_serializer=worker_pb2.PrefillRequest.SerializeToString,
            response_deserializer=decode,
        )

    def _patience(self) -> asyncio.Timeout:
        return asyncio.timeout_at(self._deadline_s())

    def _deadline_s(self) -> float:
        """By when a prefill worker must say something more."""
        return asyncio.get_running_loop().time() + self._settings().handoff_timeout_ms / 1e3

    def _start(
        self,
        request: worker_pb2.GenerateRequest,
        num_cached_blocks: int,
        member: control_pb2.Member,
        *,
        same_host: bool,
    ) -> worker_pb2.PrefillStart:
        transport = choose_transport(
            self._settings().handoff_transport,
            same_host=same_host,
            ours=self._front.info.transport,
            theirs=member.worker.engine_transport,
        )
        if transport != worker_pb2.KV_TRANSPORT_ENGINE and not self._front.info.kv_readable:
            raise HandoffFailed(
                "the engines cannot move KV to each other, and nobody else can"
                " (worker.tensorrt_llm.transport)"
            )
        return worker_pb2.PrefillStart(
            request=request,
            first_block=num_cached_blocks,
            transport=transport,
            fingerprint=self._front.info.fingerprint.hex(),
        )


def choose_transport(
    setting: str, *, same_host: bool, ours: str, theirs: str
) -> worker_pb2.KvTransport.ValueType:
    """`ours`, `theirs`: how the two engines move KV by themselves. Pure.

    Raises HandoffFailed when it cannot be as `setting` wants it.
    """
    engines_can = bool(ours) and ours == theirs
    if setting == "engine" and not engines_can:
        raise HandoffFailed(
            f"the engines cannot move KV ({ours or 'none'} here, {theirs or 'none'} there;"
            " worker.handoff_transport)"
        )
    if setting == "shared_memory" and not same_host:
        raise HandoffFailed("it is on another host (worker.handoff_transport)")
    if engines_can and setting in ("auto", "engine"):
        return worker_pb2.KV_TRANSPORT_ENGINE
    if same_host and setting in ("auto", "shared_memory"):
        return worker_pb2.KV_TRANSPORT_SHARED_MEMORY
    return worker_pb2.KV_TRANSPORT_GRPC


def _add_before(before: common_pb2.Ledger, came: Iterable[Interval]) -> None:
    """For the prefill worker, which lays such durations end to end."""
    for segment, start_s, end_s in came:
        field = f"{segment}_ms"
        setattr(before, field, getattr(before, field) + (end_s - start_s) * 1e3)


def _first_token(received: Received) -> worker_pb2.FirstToken | None:
    response = received.response
    return response.first_token if response.HasField("first_token") else None


def _to_token(request_id: int, first: worker_pb2.FirstToken) -> Token:
    logprobs = None
    if first.HasField("logprobs"):
        top = first.logprobs.top
        logprobs = TokenLogprobs(
            first.logprobs.chosen.logprob,
            tuple(each.token_id for each in top),
            tuple(each.logprob for each in top),
        )
    return Token(request_id, first.token_id, _FINISH[first.finish_reason], logprobs, None)
