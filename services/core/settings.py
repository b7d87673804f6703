"""Every setting of the mesh: its default, its bounds, what it does.

config.py parses and changes values of these. A setting marked `at_start` is read once
by the process that uses it, and cannot be changed while the mesh runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core import redis_url
from services.core.rules import Form, setting
from services.core.tensorrt import TensorRtSettings

ROUTING_STRATEGIES = (
    "round_robin",
    "random",
    "least_outstanding",
    "prefix_aware",
    "kv_aware",
)
ENGINES = ("llamacpp", "simulated", "tensorrt_llm")
EVICTION_POLICIES = ("s3fifo", "slru", "lru")
KV_LOAD_MODES = ("auto", "always", "never")
TOOL_ARGUMENTS = ("parsed", "text")
TOKENIZE = ("service", "embedded")
REQUEST_CLASSES = ("interactive", "batch")


REDIS_URL = Form(redis_url.PATTERN, redis_url.WORDS)
OTLP_ENDPOINT = Form(
    r"(https?://(\[[0-9A-Fa-f:.]+\]|[^\s/:@?#\[\]]+):[0-9]{1,5})?",
    "empty, http://host:port or https://host:port",
)


ORIGINS = Form(
    r"( *(\*|https?://[^\s/*]+)( +|$))*",
    "http:// or https:// and a host each, with spaces between, or *",
)

KEY_HASHES = Form(
    r"(sha256:[0-9a-f]{64}( +|$))*",
    "sha256: and 64 hexadecimal digits, once for each key, with spaces between",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    model: str = setting(
        "smollm2-135m-instruct",
        "The model served: a known name, the path of a GGUF file, or, for the simulated engine,"
        " a folder with tokenizer.json and tokenizer_config.json, or with tekken.json.",
        at_start=True,
    )
    block_tokens: int = setting(
        64, "Tokens in a KV block, the unit of reuse.", low=8, high=512, at_start=True
    )
    max_channels_per_peer: int = setting(
        1,
        "Connections from one process to another at most, the one used longest ago taken first;"
        " one more is opened when each has streams_per_channel calls.",
        low=1,
        high=64,
        at_start=True,
    )
    streams_per_channel: int = setting(
        64,
        "Calls on a connection before another is opened, where max_channels_per_peer allows it.",
        low=1,
        high=10_000,
        at_start=True,
    )
    unix_sockets: bool = setting(
        True,
        "Processes on one host call each other over unix sockets, where there is no TLS: Linux.",
        at_start=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    redis_url: str = setting(
        "",
        "Where several control replicas keep the configuration; empty keeps it in memory.",
        form=REDIS_URL,
        at_start=True,
    )
    ticket_key_lifetime_s: float = setting(
        3600.0,
        "How long routers sign tickets for workers with the same key.",
        low=10,
        high=30 * 86_400,
        at_start=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    nfc: bool = setting(False, "Bring text to Unicode normal form C before encoding.")
    max_text_bytes: int = setting(
        1 << 20, "Longest text of one request, in UTF-8 bytes.", low=1, high=1 << 24
    )
    threads: int = setting(2, "Threads that encode.", low=1, high=64, at_start=True)
    cache_bytes: int = setting(
        1 << 25,
        "Memory for ids of texts seen before, for each tenant and salt apart: messages of a chat,"
        " pieces of long texts. About 12 bytes a token; 0: every prompt is encoded as a whole.",
        low=0,
        high=1 << 36,
    )
    sort_tools: bool = setting(
        False,
        "Render tools with sorted keys: clients that order them differently then share a prefix,"
        " but the text is no longer exactly what the model's own template gives.",
    )
    tool_arguments: str = setting(
        "parsed",
        "The arguments of earlier tool calls, for the chat template: parsed, or the JSON text as"
        " it was sent, which only some templates take.",
        choices=TOOL_ARGUMENTS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    routing_strategy: str = setting(
        "kv_aware", "How a worker is chosen.", choices=ROUTING_STRATEGIES
    )
    tokenize: str = setting(
        "service",
        "Who encodes prompts: the tokenizer service, or the router itself, which spares the call."
        " Until its vocabulary is loaded, and where it cannot be, the service does.",
        choices=TOKENIZE,
    )
    index_max_blocks: int = setting(
        1_000_000,
        "kv_aware: most KV blocks of the workers that the router remembers, about 400 bytes each.",
        low=1,
        high=100_000_000,
    )
    prefix_length: int = setting(
        256,
        "prefix_aware: requests whose first prefix_length tokens agree go to the same worker."
        " Counted in whole blocks.",
        low=8,
        high=65536,
    )
    prefix_length_bytes: int = setting(
        0,
        "prefix_aware: when not 0, take the beginning of the prompt's text instead of tokens: so"
        " many bytes, or of a chat so many characters of its messages.",
        low=0,
        high=65536,
    )
    concurrency_threshold: int = setting(
        4,
        "prefix_aware: requests in flight at the preferred worker from which another is taken.",
        low=1,
        high=1024,
    )
    max_queue: int = setting(
        1024, "Requests that may wait for a worker; one more is refused.", low=0, high=1_000_000
    )
    batch_ageing_s: float = setting(
        5.0,
        "A waiting batch request goes before interactive ones that came this much later.",
        low=0,
        high=3600,
    )
    # Half a minute is far beyond what a person waits for, and near what callers' proxies allow.
    max_wait_interactive_s: float = setting(
        30.0,
        "Longest wait for a worker that an interactive request is let in for, by the rate at which"
        " workers take requests; one that would wait longer is refused at once. 0: any.",
        low=0,
        high=86_400,
    )
    # Who asks for batch would rather wait: its deadline and max_queue bound that.
    max_wait_batch_s: float = setting(
        0.0, "The same for a batch request. 0: any.", low=0, high=86_400
    )
    worker_wait_s: float = setting(
        10.0, "How long a request waits while no worker is ready at all.", low=0, high=3600
    )
    direct: bool = setting(
        True,
        "Let clients that ask for it fetch their answers from the workers themselves, past the"
        " router. Not for tenants that have limits.",
    )
    max_attempts: int = setting(3, "Workers tried before the first token, at most.", low=1, high=16)
    max_migrations: int = setting(
        3,
        "How often an answer may go on at another worker because its own died.",
        low=0,
        high=16,
    )
    max_unread_bytes: int = setting(
        4 << 20,
        "Most bytes of an answer that wait for a client that reads slowly; with more, the answer"
        " ends.",
        low=0,
        high=1 << 32,
    )
    max_deadline_s: float = setting(
        600.0,
        "Longest life of a request, whatever its caller's deadline, and without one.",
        low=0.01,
        high=604_800,
    )
    request_timeout_s: float = setting(
        10.0,
        "A call whose request message has not come whole within this time ends.",
        low=0.01,
        high=3600,
    )
    require_credentials: bool = setting(
        False,
        "Ask callers who they are also while there is no tenant, so that nobody gets in when the"
        " last one is removed.",
    )
    reflection: str = setting(
        "auto",
        "Whether callers may ask for the list of services (gRPC reflection): auto refuses where"
        " there are tenants or TLS.",
        choices=("auto", "always", "never"),
        at_start=True,
    )
    record_decisions: str = setting(
        "",
        "JSONL file to which each router writes what it decided, without any text, for `firsttoken"
        " replay`. A file that is there is kept, and a number comes into the new one's name."
        " Empty: none.",
    )
    record_sample: float = setting(
        1.0, "Share of requests recorded, drawn by chance.", low=0, high=1
    )
    record_max_bytes: int = setting(
        256 << 20, "Recording ends when its file is as large as this.", low=4096, high=1 << 40
    )
    prefill_affinity_tokens: int = setting(
        512,
        "How many more prompt tokens than the least busy one a prefill worker may have to"
        " compute and still get a prompt that begins like those it had before.",
        low=0,
        high=1_000_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """The timing model of the simulated engine."""

    prefill_tokens_per_s: float = setting(
        8000.0, "Prompt tokens computed a second.", low=0.001, high=1e9, at_start=True
    )
    decode_step_ms: float = setting(
        8.0, "Duration of a decode step.", low=0, high=60_000, at_start=True
    )
    decode_step_ms_per_seq: float = setting(
        0.05, "Added to a decode step for each sequence in it.", low=0, high=60_000, at_start=True
    )
    num_blocks: int = setting(
        2048,
        "KV blocks, shared by running requests and cache.",
        low=1,
        high=10_000_000,
        at_start=True,
    )
    kv_bytes_per_token: int = setting(
        1024, "KV bytes a token occupies and moves.", low=1, high=1 << 20, at_start=True
    )
    transfer_gb_per_s: float = setting(
        20.0, "Speed at which KV enters and leaves the engine.", low=0.001, high=1e6, at_start=True
    )
    engine_transport: bool = setting(
        False,
        "Move KV to other simulated engines on this host at transfer_gb_per_s, as GPUs do, beside"
        " the steps and past the workers.",
        at_start=True,
    )
    decode_overlap: bool = setting(
        False,
        "Decode steps run beside prompts, as on a GPU that shares its units between the two: a"
        " prompt neither waits for a decode step nor lengthens one.",
        at_start=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    engine: str = setting("llamacpp", "The engine.", choices=ENGINES, at_start=True)
    num_slots: int = setting(8, "Requests that run at once.", low=1, high=256, at_start=True)
    max_context_tokens: int = setting(
        2048,
        "Most tokens of prompt and answer together, in one request.",
        low=16,
        high=1 << 20,
        at_start=True,
    )
    num_cache_blocks: int = setting(
        192, "llamacpp: KV blocks kept for reuse.", low=1, high=1_000_000, at_start=True
    )
    kv_type: str = setting(
        "bf16", "llamacpp: type of KV values.", choices=("bf16", "q8_0"), at_start=True
    )
    threads: int = setting(
        0,
        "llamacpp: threads of one worker; 0 shares the machine's cores among the workers.",
        low=0,
        high=256,
        at_start=True,
    )
    max_step_ms: float = setting(
        250.0,
        "Longest engine step aimed at: it bounds cancellation and interference. Where decoding"
        " alone takes most of it, prompts still get a quarter of that on top.",
        low=1,
        high=60_000,
    )
    max_draft_tokens: int = setting(
        0,
        "Longest draft of an answer's next tokens that a step verifies; 0: none. Drafts come from"
        " where the prompt or the answer said the same before; answers stay as they are, bit for"
        " bit. Where drafts cost more than they bring, a worker stops making them for a while.",
        low=0,
        high=64,
    )
    max_batch_tokens: int = setting(
        512,
        "Most tokens in one engine step; at least num_slots.",
        low=16,
        high=65536,
        at_start=True,
    )
    num_inbox_blocks: int = setting(
        32,
        "KV blocks that may be on their way into the engine at once.",
        low=1,
        high=1_000_000,
        at_start=True,
    )
    num_outbox_blocks: int = setting(
        32,
        "KV blocks that may be on their way to other workers at once.",
        low=1,
        high=1_000_000,
        at_start=True,
    )
    handoff_export_blocks: int = setting(
        1,
        "Finished blocks of a prompt that leave for a decode worker together, while the rest is"
        " computed; 0 sends all at the prompt's end.",
        low=0,
        high=1_000_000,
    )
    kv_load: str = setting(
        "auto",
        "Whether KV blocks come out of the KV store: auto loads them where that is expected to be"
        " faster than computing them.",
        choices=KV_LOAD_MODES,
    )
    kv_load_timeout_ms: float = setting(
        2000.0,
        "Longest load of a request's blocks. It ends earlier where computing would have ended.",
        low=1,
        high=60_000,
    )
    kv_write_queue_blocks: int = setting(
        256,
        "Blocks that may wait to be written to the KV store; one more is dropped. 0 writes none.",
        low=0,
        high=1_000_000,
    )
    handoff_transport: str = setting(
        "auto",
        "How KV comes from a prefill worker: by the engines themselves where both can, else"
        " through memory where both are on one host, else as bytes over gRPC (auto); or only one"
        " of these.",
        choices=("auto", "engine", "shared_memory", "grpc"),
    )
    handoff_min_tokens: int = setting(
        0,
        "Uncached prompt tokens from which another worker computes the prompt; 0 decides by"
        " what was measured.",
        low=0,
        high=1_000_000,
    )
    handoff_timeout_ms: float = setting(
        10_000.0,
        "A prefill worker that says nothing for so long is given up, and the prompt computed here.",
        low=1,
        high=3_600_000,
    )
    max_unread_tokens: int = setting(
        4096,
        "Most tokens of an answer that wait in a worker for whoever reads it slowly; with more, the"
        " answer ends.",
        low=16,
        high=1 << 20,
    )
    max_waiting: int = setting(
        256, "Requests that may wait inside a worker; one more is refused.", low=0, high=100_000
    )
    simulated: SimulatedSettings = field(default_factory=SimulatedSettings)
    tensorrt_llm: TensorRtSettings = field(default_factory=TensorRtSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreSettings:
    capacity_mb: int = setting(
        512,
        "L1: node memory for KV blocks, in MiB. It is taken as blocks come.",
        low=1,
        high=1 << 24,
        at_start=True,
    )
    eviction_policy: str = setting(
        "s3fifo",
        "Which block goes when L1 is full. lru is the baseline; the others withstand scans.",
        choices=EVICTION_POLICIES,
        at_start=True,
    )
    local_redis_mb: int = setting(
        1024,
        "firsttoken up: most memory, in MiB, of the Redis that it runs as L2 when redis_url is"
        " empty; 0 runs none.",
        low=0,
        high=1 << 20,
        at_start=True,
    )
    max_tenant_share: float = setting(
        1.0,
        "The share of L1 that one tenant may fill; beyond it, its blocks push out its own.",
        low=0.001,
        high=1,
    )
    redis_url: str = setting(
        "",
        "L2: a Redis or Valkey that keeps KV blocks when workers and kvstore stop. Empty: none.",
        form=REDIS_URL,
        at_start=True,
    )
    redis_user_file: str = setting(
        "", "File that holds the name of the ACL user, instead of the URL.", at_start=True
    )
    redis_password_file: str = setting(
        "", "File that holds the password, instead of the URL.", at_start=True
    )
    redis_ca_file: str = setting(
        "",
        "rediss://: certificates of the authorities to trust, in PEM; empty trusts the system's.",
        at_start=True,
    )
    redis_cluster: bool = setting(
        False, "redis_url names a node of a Redis Cluster.", at_start=True
    )
    redis_connections: str = setting(
        "multiplexed",
        "multiplexed: all reads share one connection. fifo_pool: a connection for each, the one"
        " that rested longest first. A Redis Cluster always has a pool for each node.",
        choices=("multiplexed", "fifo_pool"),
        at_start=True,
    )
    redis_pool_size: int = setting(
        16, "Most connections for reads in a pool.", low=1, high=1024, at_start=True
    )
    redis_connect_timeout_s: float = setting(
        1.0, "Longest wait for a connection to Redis.", low=0.01, high=60, at_start=True
    )
    redis_timeout_s: float = setting(
        1.0,
        "Longest wait for Redis: multiplexed, without a byte coming or leaving; in a pool, for all"
        " of an answer.",
        low=0.01,
        high=60,
        at_start=True,
    )
    redis_retry_s: float = setting(
        1.0,
        "Time between two tries while Redis does not answer, or refuses blocks.",
        low=0.01,
        high=600,
        at_start=True,
    )
    redis_batch_bytes: int = setting(
        4 << 20,
        "Most bytes of blocks in one command to Redis; at least one block.",
        low=1,
        high=1 << 28,
        at_start=True,
    )
    redis_write_queue_bytes: int = setting(
        64 << 20,
        "Most bytes of blocks that wait to be written to Redis; more are dropped.",
        low=0,
        high=1 << 36,
        at_start=True,
    )
    redis_ttl_s: float = setting(
        86400.0,
        "How long Redis keeps a block after it was written; 0 keeps it until Redis evicts it.",
        low=0,
        high=31536000,
        at_start=True,
    )
    debug_l2_bytes_per_s: float = setting(
        0.0,
        "Read blocks from Redis no faster than this, for benchmarks; 0: as fast as it goes.",
        low=0,
        high=1e12,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The OpenAI-compatible HTTP edge."""

    direct: bool = setting(
        True,
        "Fetch answers from the workers themselves, where router.direct lets it; else they come"
        " through the router.",
    )
    cors_origins: str = setting(
        "",
        "Origins whose pages may call from a browser, with spaces between; * is any. Empty: none.",
        form=ORIGINS,
    )
    default_temperature: float = setting(
        1.0, "Where a request names none; 1 is OpenAI's.", low=0, high=100
    )
    default_max_tokens: int = setting(
        0,
        "Chats: most tokens of an answer where the request does not say; 0: to the end of the"
        " context.",
        low=0,
        high=1 << 20,
    )
    max_choices: int = setting(
        64, "Most answers of one request: its prompts times n.", low=1, high=1024
    )
    request_timeout_s: float = setting(
        600.0, "Longest time for the whole of an answer.", low=0.1, high=86400
    )
    max_body_bytes: int = setting(8 << 20, "Longest request body.", low=1024, high=1 << 24)
    body_timeout_s: float = setting(
        30.0, "Longest time for a request's body to come.", low=0.1, high=3600
    )
    max_header_bytes: int = setting(
        32 << 10, "Longest request line and headers.", low=1024, high=1 << 20, at_start=True
    )
    header_timeout_s: float = setting(
        10.0,
        "Longest time from a request's first byte to the end of its headers, and from a"
        " connection to its first request.",
        low=0.1,
        high=3600,
        at_start=True,
    )
    keep_alive_s: float = setting(
        75.0,
        "How long a connection is kept without a request.",
        low=0.1,
        high=3600,
        at_start=True,
    )
    write_timeout_s: float = setting(
        60.0,
        "A client that takes nothing of its answer for so long is disconnected.",
        low=0.1,
        high=3600,
        at_start=True,
    )
    max_connections: int = setting(
        4096, "Connections at a time; one more is refused.", low=1, high=1_000_000, at_start=True
    )
    drain_s: float = setting(
        5.0, "How long answers may go on when the gateway stops.", low=0, high=600, at_start=True
    )
    access_log: bool = setting(True, "Log a line for each request.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    otlp_endpoint: str = setting(
        "",
        "OTLP gRPC collector to which the observer exports spans and metrics; empty: none.",
        form=OTLP_ENDPOINT,
        at_start=True,
    )
    sample_ratio: float = setting(
        1.0, "Share of requests traced when the caller did not decide.", low=0, high=1
    )
    log_level: str = setting(
        "info", "Least severity logged.", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverSettings:
    enabled: bool = setting(True, "Tell the observer of requests, and how each process is.")
    key_hashes: str = setting(
        "",
        "Who may see the page: keys, hashed; `firsttoken keys new` makes one of each. A browser"
        " asks for it as a password. Empty: whoever reaches it.",
        form=KEY_HASHES,
    )
    window_minutes: float = setting(
        60.0, "For how long requests are kept.", low=1, high=1440, at_start=True
    )
    max_requests: int = setting(
        5000, "Requests kept at most, about 10 KB each.", low=10, high=1_000_000, at_start=True
    )
    slow_ttft_ms: float = setting(
        0.0,
        "Spans of requests whose first token came later than this are always exported, as are"
        " those of the slowest twentieth of a class, and of failed ones; 0: no time is slow.",
        low=0,
        high=600_000,
    )
    slo_ttft_ms: float = setting(
        500.0,
        "A first token that comes later counts against the objective that alerts watch.",
        low=1,
        high=600_000,
    )
    show_text: bool = setting(
        False, "Show text of prompts to whoever may see the page; else only where tokens differ."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """Who a caller is, by its API key or its certificate, and what it may do.

    While there is no tenant, callers are not asked who they are.
    """

    key_hashes: str = setting(
        "",
        "Its API keys, hashed; `firsttoken keys new` makes one of each. Several, with spaces"
        " between, are how a key is changed without a pause.",
        form=KEY_HASHES,
    )
    identities: str = setting(
        "",
        "Client certificates that are this tenant: their subject alternative names (DNS or URI),"
        " with spaces between.",
    )
    salt: str = setting(
        "",
        "Enters the keys of all its KV blocks: with another, nothing cached before is found again.",
    )
    max_class: str = setting(
        "interactive",
        "The class it may ask for: with batch, its requests always wait as batch.",
        choices=REQUEST_CLASSES,
    )
    weight: float = setting(
        1.0,
        "Its share of what workers take, beside the other tenants that wait in the same class.",
        low=0.01,
        high=1000,
    )
    requests_per_s: float = setting(
        0.0, "Requests a second at each router, in the long run; 0: any.", low=0, high=1e6
    )
    burst_requests: int = setting(
        10, "Requests at once beyond requests_per_s, after a pause.", low=1, high=1_000_000
    )
    max_concurrent: int = setting(
        0, "Requests at a time at each router; 0: any.", low=0, high=1_000_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelaySettings:
    """Delays to inject, in milliseconds: they show that each lands in its own segment."""

    gateway_read: float = setting(
        0.0, "While the body of an HTTP request comes.", low=0, high=60_000
    )
    gateway_parse: float = setting(
        0.0, "While the gateway makes a request of it.", low=0, high=60_000
    )
    gateway_unowned: float = setting(
        0.0, "In the gateway, where no segment owns it.", low=0, high=60_000
    )
    gateway_to_router: float = setting(
        0.0, "On the way from gateway to router.", low=0, high=60_000
    )
    gateway_to_client: float = setting(
        0.0, "On the way from gateway to client.", low=0, high=60_000
    )
    router_check: float = setting(0.0, "While the router checks a request.", low=0, high=60_000)
    router_unowned: float = setting(
        0.0, "In the router, where no segment owns it.", low=0, high=60_000
    )
    router_to_tokenizer: float = setting(
        0.0, "On the way from router to tokenizer.", low=0, high=60_000
    )
    tokenizer_encode: float = setting(0.0, "While encoding.", low=0, high=60_000)
    tokenizer_unowned: float = setting(
        0.0, "In the tokenizer, where no segment owns it.", low=0, high=60_000
    )
    router_queue: float = setting(0.0, "While queued in the router.", low=0, high=60_000)
    router_route: float = setting(0.0, "While choosing a worker.", low=0, high=60_000)
    router_to_worker: float = setting(0.0, "On the way from router to worker.", low=0, high=60_000)
    router_to_client: float = setting(0.0, "On the way from router to client.", low=0, high=60_000)
    worker_unowned: float = setting(
        0.0, "In the worker, where no segment owns it.", low=0, high=60_000
    )
    worker_prefill_queue: float = setting(
        0.0, "In the worker, before a batch takes the request.", low=0, high=60_000
    )
    worker_between_steps: float = setting(
        0.0, "Between two steps of one prompt.", low=0, high=60_000
    )
    worker_kv_match: float = setting(
        0.0, "While the KV store is asked what it has.", low=0, high=60_000
    )
    worker_kv_load: float = setting(0.0, "While cached KV is loaded.", low=0, high=60_000)
    worker_prefill: float = setting(0.0, "While the prompt is computed.", low=0, high=60_000)
    worker_sampling: float = setting(0.0, "While the first token is sampled.", low=0, high=60_000)
    worker_from_core: float = setting(
        0.0, "On the way of a token from the engine core.", low=0, high=60_000
    )
    worker_to_router: float = setting(0.0, "On the way from worker to router.", low=0, high=60_000)
    handoff_reserve: float = setting(
        0.0, "Before a hand-off, while there is no room for its KV.", low=0, high=60_000
    )
    handoff_call: float = setting(
        0.0, "On the way from decode worker to prefill worker.", low=0, high=60_000
    )
    handoff_unowned: float = setting(
        0.0, "In the prefill worker, where no segment owns it.", low=0, high=60_000
    )
    handoff_first_token: float = setting(
        0.0, "On the way from prefill worker to decode worker.", low=0, high=60_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSettings:
    delay_ms: DelaySettings = field(default_factory=DelaySettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    mesh: MeshSettings = field(default_factory=MeshSettings)
    control: ControlSettings = field(default_factory=ControlSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    kvstore: KvStoreSettings = field(default_factory=KvStoreSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    observer: ObserverSettings = field(default_factory=ObserverSettings)
    # By name.
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)
    debug: DebugSettings = field(default_factory=DebugSettings)
