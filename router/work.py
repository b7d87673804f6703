"""How much one worker has to do, in seconds, as far as this router can tell. Pure.

Exactly known is what this router has sent there and has not yet seen begin. What other
routers sent shows in the worker's own reports, some tenths of a second old: from then on
it is taken to be worked off.
"""

from __future__ import annotations

from bisect import bisect

from router.reports import LoadEvent

# A worker that says it is slower is believed this much, and so is one that is faster: else
# one report could make others' work more than any number.
SLOWEST_TOKENS_PER_S = 0.001
FASTEST_TOKENS_PER_S = 1e12
# Until anything is measured anywhere.
FIRST_TOKEN_S = 1 / 2000
# Loading a block of the node's store takes this share of computing it, until it is measured.
FIRST_LOAD_SHARE = 0.25
# Workers let a prompt wait for others until about this many times its own computing time:
# short prompts pass long ones (worker/order.py). Where sizes are within these bounds, they
# are alike.
PATIENCE = 4.0
SIZES_S = (0.01, 0.04, 0.16, 0.64, 2.56)
# Of a new measurement, how much is believed.
BELIEF = 0.25
# A speed holds for so long; then it fades by so much ten times a second.
SPEED_LASTS_S = 0.2
DOUBT = 0.1
# Trust comes back with each report: who is never asked could not win it back.
RECOVERY = 0.01
# Of a worker that does not say how fast it is, prompts this long tell.
MIN_TELLING_TOKENS = 64


class WorkerLoad:
    """`token_s`: seconds to compute a prompt token."""

    __slots__ = (
        "_busy_until_s",
        "_foreign_tokens",
        "_measured_s",
        "_num_outstanding",
        "_outstanding_s",
        "_outstanding_tokens",
        "_reported_s",
        "_told_speed",
        "_up_to_s",
        "foreign_running",
        "has_reported",
        "is_busy",
        "load_block_s",
        "num_blocks",
        "num_free_blocks",
        "num_reserved_blocks",
        "recent_s",
        "residence_s",
        "token_s",
        "trust",
    )

    def __init__(self, *, recent_s: float = 0.0) -> None:
        # 0: not known yet.
        self.token_s = 0.0
        self.load_block_s = 0.0
        # How long a request stays.
        self.residence_s = 0.0
        # Of what it was believed to have cached, the share that it had.
        self.trust = 1.0
        # Work given to it lately, on the scale of `RecentWork`.
        self.recent_s = recent_s
        self.has_reported = False
        # It may have a queue.
        self.is_busy = False
        self.foreign_running = 0
        self.num_reserved_blocks = 0
        # As it reports them; 0: its KV is not in blocks, or it has not said.
        self.num_blocks = 0
        # None: its KV is not in blocks, or it has not said.
        self.num_free_blocks: int | None = None
        self._outstanding_s = 0.0
        self._outstanding_tokens = 0
        self._num_outstanding = 0
        # Of those that take up to so long, in the order of SIZES_S, and of all.
        self._up_to_s = [0.0] * (len(SIZES_S) + 1)
        self._busy_until_s = 0.0
        self._foreign_tokens = 0
        self._reported_s = 0.0
        # As it was said last, and after how many tokens; and since when.
        self._told_speed = (0.0, 0)
        self._measured_s = 0.0

    @property
    def is_idle(self) -> bool:
        """This router has nothing there that has not begun to answer."""
        return not self._num_outstanding and not self._outstanding_tokens

    def queue_s(self, now_s: float) -> float:
        """Until it has computed all the prompts that it has."""
        own_s = min(self._outstanding_s, max(0.0, self._busy_until_s - now_s))
        return own_s + self._foreign_s(now_s)

    def wait_s(self, work_s: float, step_s: float, now_s: float) -> float:
        """Until a prompt that takes `work_s` begins to be computed.

        It passes those that take longer, but for the step that has begun.
        """
        wait_s = self._busy_until_s - now_s
        outstanding_s = self._outstanding_s
        if wait_s > outstanding_s:
            wait_s = outstanding_s
        if wait_s > 0.0:
            longer_s = outstanding_s - self._up_to_s[bisect(SIZES_S, work_s)]
            passed_s = wait_s * longer_s / outstanding_s
            if passed_s > step_s:
                wait_s -= passed_s - step_s
        elif self._num_outstanding:
            # It should have begun by now: it may take as long again.
            wait_s = -wait_s
        else:
            wait_s = 0.0
        if self._foreign_tokens:
            wait_s += min(self._foreign_s(now_s), PATIENCE * work_s + step_s)
        return wait_s

    def begin(self, work_s: float, num_tokens: int, now_s: float) -> None:
        """A prompt is sent there, of which so many tokens are to be computed."""
        self._busy_until_s = max(self._busy_until_s, now_s) + work_s
        self._outstanding_s += work_s
        self._outstanding_tokens += num_tokens
        self._num_outstanding += 1
        for size in range(bisect(SIZES_S, work_s), len(self._up_to_s)):
            self._up_to_s[size] += work_s
        self.is_busy = True

    def end(self, work_s: float, num_tokens: int, now_s: float) -> None:
        """It is computed, or given up: once for each `begin`, with the same figures."""
        self._outstanding_tokens -= num_tokens
        self._num_outstanding -= 1
        if self._num_outstanding:
            self._outstanding_s = max(0.0, self._outstanding_s - work_s)
            for size in range(bisect(SIZES_S, work_s), len(self._up_to_s)):
                self._up_to_s[size] -= work_s
        else:
            self._outstanding_s = 0.0
            self._up_to_s = [0.0] * len(self._up_to_s)
            self.is_busy = self._foreign_tokens > 0
        self._busy_until_s = min(self._busy_until_s, now_s + self._outstanding_s)

    def _foreign_s(self, now_s: float) -> float:
        """Of other routers' prompts, what was reported and has not been worked off since."""
        if not self._foreign_tokens:
            return 0.0
        return max(0.0, self._foreign_tokens * self.token_s - (now_s - self._reported_s))

    def hear(self, load: LoadEvent, in_flight: int, now_s: float) -> None:
        self.has_reported = True
        self.trust += RECOVERY * (1.0 - self.trust)
        told_speed = (load.prefill_tokens_per_s, load.prompt_tokens_evaluated)
        if load.prefill_tokens_per_s > 0 and told_speed != self._told_speed:
            # Not what is said again with each token of an answer: it was measured before.
            self._told_speed = told_speed
            self._measured_s = now_s
            tokens_per_s = max(load.prefill_tokens_per_s, SLOWEST_TOKENS_PER_S)
            self.token_s = 1 / min(tokens_per_s, FASTEST_TOKENS_PER_S)
        self._foreign_tokens = max(0, load.queued_prompt_tokens - self._outstanding_tokens)
        self.is_busy = bool(self._foreign_tokens or self._num_outstanding)
        self._reported_s = now_s
        self.foreign_running = max(0, load.num_running + load.num_waiting - in_flight)
        self.num_reserved_blocks = load.num_blocks_reserved
        total = self.num_blocks = load.num_blocks_total
        self.num_free_blocks = total - load.num_blocks_reserved if total else None

    def doubt_speed(self, typical_token_s: float, now_s: float) -> None:
        """What it measured long ago, perhaps when it was cold, fades: else who was slow at first
        would never be asked again.

        Tokens a second fade, not seconds a token: those of a worker that took a hundred times
        as long once would need as long again to be forgotten.
        """
        if self.token_s and now_s - self._measured_s > SPEED_LASTS_S:
            self.token_s = 1 / ((1 - DOUBT) / self.token_s + DOUBT / typical_token_s)

    def go_deaf(self) -> None:
        """Reports have ended: what they said of now is worth nothing."""
        self.has_reported = False
        self._foreign_tokens = 0
        self.is_busy = self._num_outstanding > 0
        self.foreign_running = 0
        self.num_free_blocks = None

    def room_wait_s(self, num_blocks: int) -> float:
        """Until requests that end have freed the room that so many blocks need."""
        free = self.num_free_blocks
        if free is None or num_blocks <= free or not self.num_reserved_blocks:
            return 0.0
        return self.residence_s * min(1.0, (num_blocks - free) / self.num_reserved_blocks)

    def learn_token(self, num_tokens: int, took_s: float) -> None:
        """From a prompt that had nothing before it, where the worker does not say."""
        if not self.has_reported and num_tokens >= MIN_TELLING_TOKENS:
            self.token_s = _blend(self.token_s, took_s / num_tokens)

    def learn_load(self, num_blocks: int, took_s: float) -> None:
        self.load_block_s = _blend(self.load_block_s, took_s / num_blocks)

    def learn_residence(self, took_s: float) -> None:
        self.residence_s = _blend(self.residence_s, took_s)

    def learn_trust(self, predicted: int, actual: int) -> None:
        self.trust += BELIEF * (min(1.0, actual / predicted) - self.trust)


# After so many, nothing is left of old work.
MOST_HALF_LIVES = 64.0


class RecentWork:
    """Work given out lately counts half after `half_life_s`.

    Kept by letting newer work count more: then old figures need no touching.
    """

    LARGEST = 1e9

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._since_s: float | None = None

    def scale(self, now_s: float) -> float:
        """What a second of work given now counts; above LARGEST it is time to `rebase`."""
        if self._since_s is None:
            self._since_s = now_s
        return float(2.0 ** min((now_s - self._since_s) / self._half_life_s, MOST_HALF_LIVES))

    def rebase(self, now_s: float) -> float:
        """By what all figures are to be multiplied."""
        factor = 1 / self.scale(now_s)
        self._since_s = now_s
        return factor


def _blend(known: float, seen: float) -> float:
    return known + BELIEF * (seen - known) if known else seen
