"""Hand-offs whose KV the engines move themselves, as the core sees them."""

from __future__ import annotations

from worker.engines.contract import DisaggregatedParams, EngineFailure, KvTransport
from worker.messages import TransferDone
from worker.sequence import Sequence


class Transfers:
    """Sequences whose KV is fetched by another engine, or from one. Their slots are taken."""

    def __init__(self, transport: KvTransport | None) -> None:
        self._transport = transport
        self._by_slot: dict[int, Sequence] = {}

    @property
    def any(self) -> bool:
        return bool(self._by_slot)

    def offer(self, sequence: Sequence, first_token: int) -> DisaggregatedParams:
        if self._transport is None:
            raise EngineFailure("the engine cannot offer KV to another one")
        self._by_slot[sequence.slot] = sequence
        sequence.transferring = True
        first = sequence.submit.export_from or 0
        return self._transport.offer(sequence.slot, first, first_token)

    def fetch(self, sequence: Sequence, params: DisaggregatedParams) -> None:
        if self._transport is None:
            raise EngineFailure("the engine cannot fetch KV from another one")
        self._by_slot[sequence.slot] = sequence
        sequence.transferring = True
        self._transport.fetch(sequence.slot, params)

    def settle(self) -> list[TransferDone]:
        """What has ended. A prompt that was fetched is computed."""
        if self._transport is None:
            return []
        done = []
        for slot, error in self._transport.ended():
            sequence = self._by_slot.pop(slot)
            sequence.transferring = False
            if not error and not sequence.for_another:
                sequence.num_cached += sequence.num_input - sequence.num_computed
                sequence.num_computed = sequence.num_input
            done.append(TransferDone(sequence.request_id, error))
        return done

    def give_up(self, sequence: Sequence) -> None:
        """May be called for any sequence."""
        if self._transport is not None and self._by_slot.pop(sequence.slot, None) is not None:
            sequence.transferring = False
            self._transport.give_up(sequence.slot)
