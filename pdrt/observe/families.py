"""Every metric of pdrt: name, type, labels and meaning. docs/metrics.md is made from this table.

All series carry `role` and `worker` (an incarnation), which stand in no list here.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Family(msgspec.Struct, frozen=True):
    """One metric. A counter's name stands without `_total`, which its samples carry."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without +Inf."""


STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Seconds between two tokens, of a forward, and of one phase of a hand-over."""
WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds until a first token, and until a revoked room has drained."""
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds of whole requests; the longest is `--request-timeout-seconds` by default."""
SIZE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0)
"""Sequences and tokens of a step."""
LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds that a timer came late."""


def _counter(name: str, text: str, *labels: str) -> Family:
    return Family(name, Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Family:
    return Family(name, Kind.GAUGE, text, labels)


def _histogram(name: str, buckets: tuple[float, ...], text: str, *labels: str) -> Family:
    return Family(name, Kind.HISTOGRAM, text, labels, buckets)


INFO = _gauge("pdrt_info", "1; its labels say what runs", "version")

WORKERS = _gauge(
    "pdrt_workers", "Gateway: registered workers by role and state", "worker_role", "state"
)
PAIRS = _gauge("pdrt_pairs", "Gateway: pairs of a live decode and a live prefill worker that serve")
IN_FLIGHT = _gauge(
    "pdrt_requests_in_flight",
    "Requests by state; the gateway's are `open`, or `waiting` for a decode worker as theirs is "
    "gone; of prefill workers they are rooms",
    "state",
)
READY = _gauge("pdrt_ready", "Gateway: 1 while a full pair of workers can serve, else 0")
UNHEALTHY = _gauge(
    "pdrt_unhealthy",
    "Workers: 1 while that is why it is not healthy, else 0: forward_hangs, forwards_fail, "
    "no_progress, admission_stopped, peers_full",
    "reason",
)
ATTEMPTS = _gauge("pdrt_attempts", "Gateway: attempts that decode workers have not ended")
QUEUE = _gauge("pdrt_queue", "Requests that wait for pages, or for a place in the batch")

PAGES = _gauge("pdrt_pages", "KV pages by owner; their sum is the pool", "rank", "owner")
LEASES = _gauge("pdrt_leases", "Decode: leases by state", "state")
ROOMS = _gauge("pdrt_rooms", "Prefill: rooms by state", "state")
QUARANTINED_PAGES = _gauge("pdrt_quarantined_pages", "Decode: pages of quarantined leases")
QUARANTINED_LEASES = _gauge(
    "pdrt_quarantined_leases", "Decode: quarantined leases by why they were revoked", "reason"
)

RANKS = _gauge(
    "pdrt_ranks",
    "Workers: their ranks by state: starting, serving, silent (its signs of life do not come)",
    "state",
)

TTFT = _histogram(
    "pdrt_ttft_seconds",
    WAIT_BUCKETS,
    "Time to first token: at the gateway the client's, at a decode worker from submission on",
)
ITL = _histogram(
    "pdrt_itl_seconds", STEP_BUCKETS, "Time between two output tokens, as gateway and decode see it"
)
REQUEST = _histogram(
    "pdrt_request_seconds", REQUEST_BUCKETS, "Gateway: a whole request, from its body to its end"
)
STEP = _histogram("pdrt_step_seconds", STEP_BUCKETS, "Workers: one forward with its sampling")
STEP_SEQUENCES = _histogram("pdrt_step_sequences", SIZE_BUCKETS, "Workers: sequences of one step")
STEP_TOKENS = _histogram("pdrt_step_tokens", SIZE_BUCKETS, "Workers: tokens computed in one step")
DRAIN = _histogram(
    "pdrt_drain_seconds", WAIT_BUCKETS, "Decode: from a lease's Revoke until its pages are free"
)
HANDOVER = _histogram(
    "pdrt_handover_seconds",
    STEP_BUCKETS,
    "Phases of requests: on decode queued, prefill, transfer, decode; on prefill queued, compute, "
    "drain",
    "phase",
)
LOOP_LAG = _histogram(
    "pdrt_event_loop_lag_seconds", LAG_BUCKETS, "How late the process's timer came"
)

REQUESTS = _counter(
    "pdrt_requests", "Requests by how they ended; on prefill workers rooms", "outcome"
)
ROOM_ENDS = _counter(
    "pdrt_room_ends", "Rooms that ended before all of their KV had landed, by reason", "reason"
)
PROMPT_TOKENS = _counter(
    "pdrt_prompt_tokens",
    "Prompt tokens: at the gateway of requests that have ended, at prefill workers those computed",
)
OUTPUT_TOKENS = _counter(
    "pdrt_output_tokens",
    "Output tokens: at the gateway those passed on to clients, at decode workers those taken",
)
CACHED_TOKENS = _counter(
    "pdrt_cached_prompt_tokens", "Gateway: prompt tokens that were found in a prefix cache"
)
RECOMPUTED = _counter(
    "pdrt_recomputed_prompt_tokens", "Prompt tokens computed again for a request that moved"
)
LOCAL_PREFILL_REQUESTS = _counter(
    "pdrt_local_prefill_requests",
    "Decode: prompts that it computed itself, by why: unpaired (no prefill worker was there), "
    "rooms_failed, short",
    "reason",
)
LOCAL_PREFILL_TOKENS = _counter(
    "pdrt_local_prefill_tokens", "Decode: prompt tokens that it computed itself"
)
PREEMPTIONS = _counter("pdrt_preemptions", "Decode: sequences preempted for pages")
PREFIX_CACHE_PAGES = _counter(
    "pdrt_prefix_cache_pages",
    "Prefix cache: pages by what became of them: inserted, duplicate (of these), evicted",
    "event",
)
PREFIX_CACHE_TOKENS = _counter(
    "pdrt_prefix_cache_tokens",
    "Prefix cache: prompt tokens of rooms by what a look-up gave: hit, missed, bypassed",
    "result",
)
TRANSFERRED = _counter(
    "pdrt_transfer_bytes",
    "KV bytes: prefill counts those written, decode those landed",
    "rank",
    "engine",
)
CHECKSUM_PAGES = _counter(
    "pdrt_kv_checksum_pages",
    "Decode, with `--kv-checksum`: pages compared with what was sent: equal, different",
    "result",
)
WRITERS = _gauge(
    "pdrt_writers",
    "Decode: prefill workers that it can send grants to, by the engine that they write through",
    "engine",
)
FENCES = _counter("pdrt_fences", "Decode: fences carried out", "engine")
STALE = _counter(
    "pdrt_stale_messages", "Messages that came too late to change anything, by reason", "reason"
)
REJECTED = _counter("pdrt_rejected_frames", "Frames that were not a message, by reason", "reason")
REFUSED_PEERS = _counter(
    "pdrt_refused_peers",
    "Handshakes between processes that failed: mechanism (one side has no cluster key), key "
    "(another one), protocol, closed (the peer hung up); at the tcp engine's port of any rank "
    "wrong_token, stale (of a segment that is gone), crowded, malformed",
    "reason",
)
REFUSED_WRITES = _counter(
    "pdrt_refused_writes",
    "Decode: pieces of writes that the tcp engine did not take: no_room (it is over), "
    "other_pairing (of another worker or generation), outside (of the room's pages)",
    "rank",
    "reason",
)

RESIDENT = _gauge("pdrt_process_resident_memory_bytes", "Resident memory of the process")
OPEN_FDS = _gauge("pdrt_process_open_fds", "Open file descriptors of the process")
THREADS = _gauge("pdrt_process_threads", "Threads of the process")
CPU_SECONDS = _counter("pdrt_process_cpu_seconds", "CPU time of the process, user and system")
START_TIME = _gauge("pdrt_process_start_time_seconds", "When the process began, in Unix time")
LOG_LINES_DROPPED = _counter(
    "pdrt_log_lines_dropped",
    "Log lines that were dropped as nobody read them, or the disk was full",
)

FAMILIES: tuple[Family, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Family)
)
"""All of the above, in that order."""
