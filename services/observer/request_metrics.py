"""What requests add to the metrics: each once, when all its hops are known. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from services.core.attributes import ERROR_TYPE, MODEL, OPERATION
from services.core.ledger import Segment
from services.observer.model import Request
from services.observer.objective import Outcome, outcome_of
from services.observer.series import Counter, Example, Family, Histogram, Names

# Told apart; those that come later share a name.
MAX_TENANTS = 50
MAX_MODELS = 8
MAX_CLASSES = 4
MAX_ERRORS = 32
MAX_HIDDEN = 32

PROVIDER = "gen_ai.provider.name"
UNKNOWN_ERROR = "_OTHER"
# A ledger balances when what no segment owns is below both.
BALANCED_S, BALANCED_SHARE = 0.001, 0.01

# As the GenAI conventions have them.
TTFT_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TPOT_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
DURATION_BOUNDS_S = tuple(0.01 * 2**power for power in range(14))
# Segments are often far below a millisecond.
SEGMENT_BOUNDS_S = (0.0001, 0.00025, 0.0005, *TTFT_BOUNDS_S)
COUNT_BOUNDS = (0.0, *(float(2**power) for power in range(11)))


class RequestMetrics:
    """Segments are observed for every whole answer, also those of 0 s: so their sums, and that of
    the residual, divided by the count of residuals, stack up to the mean TTFT.
    """

    def __init__(self) -> None:
        self.slo_ttft_s = 0.5
        self.block_tokens = 64
        self._tenants, self._models = Names(MAX_TENANTS), Names(MAX_MODELS)
        self._classes, self._errors = Names(MAX_CLASSES), Names(MAX_ERRORS)
        self._hidden = Names(MAX_HIDDEN)
        self._make_conventional()
        self._make_ledger()
        self._make_counts()
        self._make_cache()
        for each in (self._retried, self._migrated, self._elsewhere):
            each.add(0)
        for each in (self._drafted, self._accepted, self._verified):
            each.add(0)

    def families(self) -> Iterator[Family]:
        for each in vars(self).values():
            if isinstance(each, Counter | Histogram):
                yield each.family()

    def add(self, request: Request) -> None:
        who = {
            "tenant": self._tenants.of(request.tenant),
            "request_class": self._classes.of(request.request_class),
        }
        error = self._errors.of(_error_type(request)) if request.error else ""
        self._requests.add(1, {**who, ERROR_TYPE: error})
        self._add_conventional(request, who, error)
        self._add_cache(request, who)
        self._add_extras(request)
        request_class = who["request_class"]
        self._judge(request, request_class)
        if request.ttft_s is not None:
            self._add_ledger(request, request.ttft_s, request_class)

    def _make_conventional(self) -> None:
        self._ttft = Histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From a request's arrival to its first token, as the outermost process saw it.",
            TTFT_BOUNDS_S,
        )
        self._tpot = Histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time between two tokens of an answer, after the first.",
            TPOT_BOUNDS_S,
        )
        self._duration = Histogram(
            "gen_ai.server.request.duration",
            "s",
            "From a request's arrival to the end of its answer, or its failure.",
            DURATION_BOUNDS_S,
        )

    def _make_ledger(self) -> None:
        self._segments = Histogram(
            "firsttoken.ttft.segment",
            "s",
            "Parts of the time to the first token; with the residual they add up to it.",
            SEGMENT_BOUNDS_S,
        )
        self._residual = Histogram(
            "firsttoken.ttft.residual",
            "s",
            "Of the time to the first token what no segment owns; its amount, if it is negative.",
            SEGMENT_BOUNDS_S,
        )
        self._unbalanced = Counter(
            "firsttoken.ttft.unbalanced",
            "{request}",
            "Requests whose residual is over a millisecond, and over a hundredth of their TTFT.",
        )
        self._beside = Counter(
            "firsttoken.ttft.hidden", "s", "Work beside the critical path, by its name."
        )
        self._slo = Counter(
            "firsttoken.slo.requests",
            "{request}",
            "Requests by whether their first token came in time (good), late (slow), or never"
            " (failed). Callers who left in time, or asked for what cannot be, are left out.",
        )

    def _make_counts(self) -> None:
        self._requests = Counter("firsttoken.requests", "{request}", "Requests that have ended.")
        self._retried = Counter(
            "firsttoken.requests.retried", "{attempt}", "Workers tried in vain before an answer."
        )
        self._migrated = Counter(
            "firsttoken.requests.migrated", "{worker}", "Workers that died under an answer."
        )
        self._positions = Histogram(
            "firsttoken.queue.position",
            "{request}",
            "Requests that were before a request in the router's queue.",
            COUNT_BOUNDS,
        )
        self._batches = Histogram(
            "firsttoken.batch.size",
            "{sequence}",
            "Sequences in the first step that had some of a request's prompt.",
            COUNT_BOUNDS,
        )

    def _make_cache(self) -> None:
        self._prompt_tokens = Counter(
            "firsttoken.prompt.tokens",
            "{token}",
            "Prompt tokens by where their KV came from: computed, a worker's cache, or loaded"
            " from a KV store.",
        )
        self._output_tokens = Counter("firsttoken.output.tokens", "{token}", "Tokens of answers.")
        self._elsewhere = Counter(
            "firsttoken.cache.elsewhere",
            "{token}",
            "Prompt tokens not found at the worker chosen, which another was known to have.",
        )
        self._loads = Histogram(
            "firsttoken.kv.load",
            "s",
            "Loading KV from a store, of requests for which some was loaded.",
            SEGMENT_BOUNDS_S,
        )
        self._expected = Counter(
            "firsttoken.kv.expected",
            "s",
            "What loading was expected to take, and computing instead.",
        )
        self._handoffs = Histogram(
            "firsttoken.handoff.gap",
            "s",
            "Between first and second token, where another worker computed the prompt.",
            SEGMENT_BOUNDS_S,
        )
        self._drafted = Counter(
            "firsttoken.speculation.drafted", "{token}", "Tokens drafted by speculation."
        )
        self._accepted = Counter(
            "firsttoken.speculation.accepted", "{token}", "Drafted tokens that were accepted."
        )
        self._verified = Counter(
            "firsttoken.speculation.steps",
            "{step}",
            "Steps that verified drafts: the mean length is 1 + accepted / steps.",
        )

    def _add_conventional(self, request: Request, who: dict[str, str], error: str) -> None:
        common = {
            OPERATION: _operation(request),
            PROVIDER: "firsttoken",
            MODEL: self._models.of(request.model),
        }
        failure = {ERROR_TYPE: error} if error else {}
        of_class = {**common, "request_class": who["request_class"], **failure}
        self._duration.observe(request.duration_s, of_class)
        if request.ttft_s is not None:
            example = _example(request, request.ttft_s)
            self._ttft.observe(request.ttft_s, {**common, **who}, example)
        if request.tpot_s is not None:
            self._tpot.observe(request.tpot_s, {**common, **who})

    def _add_ledger(self, request: Request, ttft_s: float, request_class: str) -> None:
        of_class = {"request_class": request_class}
        # One that broke off never heard where its worker's part of the time had gone.
        if not request.error:
            self._add_segments(request, ttft_s, of_class)
        for name, duration_s in request.hidden_s.items():
            self._beside.add(max(0.0, duration_s), {"work": self._hidden.of(name)})
        self._positions.observe(request.queue_position, of_class)
        if request.batch_size:
            self._batches.observe(request.batch_size, of_class)

    def _add_segments(self, request: Request, ttft_s: float, of_class: dict[str, str]) -> None:
        for segment in Segment:
            spent_s = max(0.0, request.spent_s.get(segment, 0.0))
            self._segments.observe(spent_s, {"segment": str(segment), **of_class})
        residual_s = abs(request.residual_s)
        self._residual.observe(residual_s, of_class)
        unbalanced = residual_s > max(BALANCED_S, BALANCED_SHARE * ttft_s)
        self._unbalanced.add(unbalanced, of_class)

    def _add_cache(self, request: Request, who: dict[str, str]) -> None:
        loaded = min(request.loaded_blocks * self.block_tokens, request.cached_tokens)
        sources = {
            "computed": max(0, request.prompt_tokens - request.cached_tokens),
            "worker": request.cached_tokens - loaded,
            "store": loaded,
        }
        for source, num_tokens in sources.items():
            self._prompt_tokens.add(num_tokens, {**who, "source": source})
        self._output_tokens.add(request.output_tokens, who)
        self._elsewhere.add(max(0, request.best_elsewhere_tokens - request.cached_tokens))
        if request.loaded_blocks:
            self._loads.observe(request.load_s)
            self._expected.add(request.expected_load_s, {"way": "load"})
            self._expected.add(request.expected_compute_s, {"way": "compute"})

    def _add_extras(self, request: Request) -> None:
        self._retried.add(max(0, request.attempts - 1))
        self._migrated.add(request.migrations)
        if request.handed_off:
            self._handoffs.observe(request.handoff_s)
        if request.drafted_tokens:
            self._drafted.add(request.drafted_tokens)
            self._accepted.add(request.accepted_tokens)
            # Each step gives a token of its own beside those accepted.
            self._verified.add(max(0, request.output_tokens - request.accepted_tokens))

    def _judge(self, request: Request, request_class: str) -> None:
        outcome = outcome_of(request, self.slo_ttft_s)
        if outcome is None:
            return
        # Each is there from the first request on: what is not there is not 0 to a query.
        for each in Outcome:
            self._slo.add(each is outcome, {"request_class": request_class, "outcome": str(each)})


def _example(request: Request, ttft_s: float) -> Example | None:
    """Where its trace is to be found."""
    if not any(hop.sampled for hop in request.hops):
        return None
    return Example(request.trace_id, ttft_s, request.arrived_unix_s + ttft_s)


def _error_type(request: Request) -> str:
    """The outermost hop that names one."""
    for hop in request.hops:
        if hop.error and (found := hop.attributes.get(ERROR_TYPE)):
            return str(found)
    return UNKNOWN_ERROR


def _operation(request: Request) -> str:
    for hop in request.hops:
        if found := hop.attributes.get(OPERATION):
            return str(found)
    return "chat"
