"""What requests have of the block pool: at admission, at their start, and as blocks are complete.

Pure: it says what is to be copied and copies nothing. The core copies; a worker under a
virtual clock takes as long as copying would take. Such a worker needs no token, engine or
array: of a Submit's `token_ids` only the length is read (one number broadcast to a prompt's
length will do), and `name` may give its blocks any names. In this order:

    scheduler.add(submit)
    scheduler.admit()            # asks `admit`
    scheduler.plan(start)        # asks `awaited` and `begin`; start: sets `started_s`, `bring_in`
    sequence.num_computed += ... # when the step has ended
    if cache.due(sequence):      # of every running sequence, after every step
        cache.keep(sequence)
    scheduler.remove(request_id) # asks `release`

In a paged engine a running request shares the cached blocks that it uses: they are pinned,
and its claim has room for the others alone, which move from there into the cache as they
are complete. Another engine has its KV elsewhere, and gives the pool a copy when a prompt
is computed, or when somebody waits for a part of it.

No prompt is computed twice at once: a request whose next block is being computed for
another waits for it. Only one that has not begun waits, and only for one that has: so
nobody waits in a circle, nor for one that is not at work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from services.core.keys import extend_keys, storage_key
from services.core.tokens import pack
from worker.engines.contract import Bytes, EngineInfo
from worker.pool import BlockPool, Kept, NewBlock
from worker.sequence import Sequence

# Makes a sequence's chain at least so long, or as long as it has names.
Name: TypeAlias = Callable[[Sequence, int], None]


class PrefixCache:
    """The pool, and whose blocks are coming into it."""

    def __init__(self, info: EngineInfo, pool: BlockPool, name: Name) -> None:
        self._pool = pool
        self._paged = info.kv_in_pool
        self._block_tokens = info.block_tokens
        self._max_context_tokens = info.max_context_tokens
        self._name = name
        # By storage key: who computes that block right now.
        self._computing: dict[bytes, Sequence] = {}

    def admit(self, sequence: Sequence) -> bool:
        """Take the blocks that it uses, and room for the rest; False: there is none."""
        if self._paged:
            claim = self._pool.claim(self._usable(sequence), self._num_blocks(sequence))
            if claim is None:
                return False
            sequence.claim = claim
        return True

    def num_to_compute(self, sequence: Sequence) -> int:
        """Tokens of its prompt that are left for it, as things stand."""
        known = sequence.num_computed
        if known >= sequence.num_input:
            return 0
        if not sequence.begun:
            known = max(known, self._look(sequence) * self._block_tokens)
        return max(0, sequence.num_input - known)

    def awaited(self, sequence: Sequence) -> Sequence | None:
        """Who computes now what it would compute next."""
        position, rest = divmod(sequence.num_computed, self._block_tokens)
        if sequence.begun or rest:
            return None
        known = self._look(sequence)
        if known <= max(position, sequence.claim.num_pinned):
            return None
        last = sequence.chain[known - 1]
        if self._pool.has(last):
            return None
        other = self._computing[last.storage_key]
        other.num_awaited = max(other.num_awaited, known)
        return other

    def bring_in(self, sequence: Sequence) -> list[Bytes]:
        """The cached blocks that follow what its slot holds: append them there.

        All but the last input token at most. They count as computed.
        """
        first, rest = divmod(sequence.num_computed, self._block_tokens)
        usable = self._usable(sequence)
        if rest or first >= len(usable):
            return []
        if self._paged:
            self._pool.pin_more(sequence.claim, usable)
        length = self._pool.length(usable, first)
        self._pool.use(usable[:length])
        if sequence.num_kept >= first:
            sequence.num_kept = length
        sequence.num_computed = length * self._block_tokens
        sequence.num_cached += (length - first) * self._block_tokens
        return self._pool.read(usable[first:length])

    def begin(self, sequence: Sequence) -> None:
        """From now on it computes its prompt: others wait for what comes of that."""
        sequence.begun = True
        coming = self._chain(sequence, sequence.num_input // self._block_tokens)
        for block in coming[sequence.num_computed // self._block_tokens :]:
            self._computing.setdefault(block.storage_key, sequence)

    def due(self, sequence: Sequence, *, ending: bool = False) -> bool:
        """Whether it has blocks to keep now. `ending`: it is about to be removed."""
        complete = sequence.num_computed // self._block_tokens
        if complete <= sequence.num_kept:
            return False
        if self._paged:
            return True
        if sequence.num_awaited > sequence.num_kept:
            return complete >= sequence.num_awaited or not sequence.prefilling
        if sequence.for_another:
            return ending  # not before: the other worker waits for it
        num_prompt = sequence.num_input // self._block_tokens
        computed = bool(sequence.num_evaluated) and not sequence.prefilling
        return sequence.finished or (computed and sequence.num_kept < num_prompt)

    def keep(self, sequence: Sequence) -> Kept:
        """Cache its full blocks: the caller writes those that are told before all else."""
        complete = sequence.num_computed // self._block_tokens
        chain = self._chain(sequence, complete)
        sequence.num_kept = complete
        if self._paged:
            kept = self._pool.keep(sequence.claim, chain)
            if sequence.claim.num_pinned < len(chain):
                sequence.num_kept = sequence.claim.num_pinned
        else:
            have = self._pool.match(chain)
            kept = Kept(have, self._pool.store(chain, have))
        self._forget(sequence, chain)
        return kept

    def release(self, sequence: Sequence) -> None:
        """It has ended, however that was."""
        self._forget(sequence, sequence.chain)
        self._pool.release(sequence.claim)

    def check_integrity(self, running: Collection[Sequence]) -> None:
        assert all(other in running for other in self._computing.values())
        self._pool.check_integrity([sequence.claim for sequence in running])

    def _look(self, sequence: Sequence) -> int:
        """How many blocks of its prompt are here or being computed, from the first."""
        usable = self._usable(sequence)
        known = min(sequence.num_known, len(usable))
        if known and not self._is_coming(usable[known - 1], sequence):
            known = 0  # it was evicted, or is not computed after all
        while known < len(usable) and self._is_coming(usable[known], sequence):
            known += 1
        sequence.num_known = known
        return known

    def _is_coming(self, block: NewBlock, sequence: Sequence) -> bool:
        other = self._computing.get(block.storage_key)
        return self._pool.has(block) or (other is not None and other is not sequence)

    def _forget(self, sequence: Sequence, chain: Iterable[NewBlock]) -> None:
        if not sequence.begun:
            return
        for block in chain:
            if self._computing.get(block.storage_key) is sequence:
                del self._computing[block.storage_key]

    def _usable(self, sequence: Sequence) -> list[NewBlock]:
        """The full blocks before its last input token, which is always computed."""
        return self._chain(sequence, (sequence.num_input - 1) // self._block_tokens)

    def _chain(self, sequence: Sequence, num_blocks: int) -> list[NewBlock]:
        if len(sequence.chain) < num_blocks:
            self._name(sequence, num_blocks)
        return sequence.chain[:num_blocks]

    def _num_blocks(self, sequence: Sequence) -> int:
        """For all of prompt and answer."""
        max_tokens = sequence.submit.sampling.max_tokens or 1
        num_tokens = len(sequence.submit.token_ids) + max_tokens
        return -(-min(num_tokens, self._max_context_tokens) // self._block_tokens)


class TokenNames:
    """Names made of a request's keys and, past those, of its tokens."""

    def __init__(self, info: EngineInfo) -> None:
        self._fingerprint = info.fingerprint
        self._block_tokens = info.block_tokens

    def __call__(self, sequence: Sequence, num_blocks: int) -> None:
        while len(sequence.chain) < num_blocks and sequence.submit.prefix_keys:
            key = self._next_key(sequence)
            sequence.chain.append(NewBlock(storage_key(key, self._fingerprint), key))

    def _next_key(self, sequence: Sequence) -> bytes:
        prefix_keys, index = sequence.submit.prefix_keys, len(sequence.chain)
        if index + 1 < len(prefix_keys):
            return prefix_keys[index + 1]
        last_key = sequence.chain[-1].prefix_key if index else prefix_keys[0]
        start, end = index * self._block_tokens, (index + 1) * self._block_tokens
        num_prompt = len(sequence.submit.token_ids)
        answer = sequence.answer[max(0, start - num_prompt) : max(0, end - num_prompt)]
        tokens = pack(sequence.submit.token_ids[start:end]) + pack(answer)
        (key,) = extend_keys(last_key, tokens, self._block_tokens)
        return key
