"""Names of span attributes: what a hop tells of its request, and an observer reads.

Those of OpenTelemetry's GenAI conventions where there is one, `firsttoken.*` otherwise.
"""

from __future__ import annotations

from typing import Final

# --- any hop
OPERATION: Final = "gen_ai.operation.name"
MODEL: Final = "gen_ai.request.model"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
# Found in a cache, or loaded from a KV store; and those that the engine computed.
CACHED_TOKENS: Final = "firsttoken.usage.cached_tokens"
EVALUATED_TOKENS: Final = "firsttoken.usage.evaluated_prompt_tokens"
# A status or reason, where it failed.
ERROR_TYPE: Final = "error.type"
# Work beside the critical path: this and its name, in milliseconds.
HIDDEN: Final = "firsttoken.hidden."

# --- gateway.request
ROUTE: Final = "http.route"
STATUS: Final = "http.response.status_code"
REQUEST_ID: Final = "firsttoken.request_id"

# --- router.generate
GENERATION: Final = "firsttoken.generation"
TENANT: Final = "firsttoken.tenant"
# "interactive" or "batch".
REQUEST_CLASS: Final = "firsttoken.request_class"
WORKER_ID: Final = "firsttoken.worker_id"
ATTEMPTS: Final = "firsttoken.attempts"
MIGRATIONS: Final = "firsttoken.migrations"
# Its client fetches the answer from the worker, past the router.
DIRECT: Final = "firsttoken.direct"
# Requests before it when it got in line.
QUEUE_POSITION: Final = "firsttoken.queue.position"
STRATEGY: Final = "firsttoken.routing.strategy"
CANDIDATES: Final = "firsttoken.routing.candidates"
ROUTING_REASON: Final = "firsttoken.routing.reason"
ROUTING_COST_S: Final = "firsttoken.routing.cost_s"
# Prompt tokens cached at the worker, as expected (absent: nobody asked) and as found; and
# the most that another worker was expected to have.
PREDICTED_TOKENS: Final = "firsttoken.routing.predicted_cached_tokens"
ACTUAL_TOKENS: Final = "firsttoken.routing.actual_cached_tokens"
BEST_ELSEWHERE_TOKENS: Final = "firsttoken.routing.best_elsewhere_cached_tokens"
# Of a prompt that was not all in a cache, as the observer explains it (services/observer/why.py):
# the cause, a sentence, the tokens it cost; text only where observer.show_text allows it.
MISS_CAUSE: Final = "firsttoken.cache_miss.cause"
MISS_SUMMARY: Final = "firsttoken.cache_miss.summary"
MISS_TOKENS: Final = "firsttoken.cache_miss.lost_tokens"
MISS_TEXT: Final = "firsttoken.cache_miss.text"
# Between two tokens; absent for an answer of one.
TPOT_MS: Final = "firsttoken.tpot_ms"

# --- worker.generate and worker.prefill
ENGINE: Final = "firsttoken.engine"
# Sequences in the first step that had some of its prompt.
BATCH_SIZE: Final = "firsttoken.batch_size"
FINISH_REASON: Final = "firsttoken.finish_reason"
# Between the first token and the second, where another worker computed the prompt.
HANDOFF_MS: Final = "firsttoken.handoff_ms"
KV_HANDED_OFF: Final = "firsttoken.kv.handed_off"
KV_PREFILL_WORKER_ID: Final = "firsttoken.kv.prefill_worker_id"
KV_PREFILL_FAILED: Final = "firsttoken.kv.prefill_failed"
KV_TRANSPORT: Final = "firsttoken.kv.transport"
KV_LOADED_BLOCKS: Final = "firsttoken.kv.loaded_blocks"
KV_EXPECTED_LOAD_MS: Final = "firsttoken.kv.expected_load_ms"
KV_EXPECTED_COMPUTE_MS: Final = "firsttoken.kv.expected_compute_ms"
KV_LOAD_MS: Final = "firsttoken.kv.load_ms"
KV_REASON: Final = "firsttoken.kv.reason"
# Of speculation.
DRAFTED_TOKENS: Final = "firsttoken.speculation.drafted_tokens"
ACCEPTED_TOKENS: Final = "firsttoken.speculation.accepted_tokens"
