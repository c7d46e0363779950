"""Every setting of every role, defined once: frozen structs that become flags, TOML keys and
environment variables. A field's `Meta` description is its help text and its type the range;
units are in the name. A name is used once per role, because flags are flat.

Validated once at start (`pdrt.cli.validate`) and passed in; library code reads no environment.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
LogLevel = Literal["debug", "info", "warning", "error"]


def _doc(text: str, alias: str | None = None) -> Meta:
    """Help text; `alias` is a second name accepted wherever the field's own name is."""
    return Meta(description=text, extra=None if alias is None else {"alias": alias})


class ProtocolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and periods of the hand-over (docs/protocol.md, Defaults). No flag for safety:
    these change when something is resent, alarmed or refused, never whether a page is safe."""

    hello_interval_seconds: Annotated[Seconds, _doc("heartbeat period")] = 1.0
    silence_seconds: Annotated[Seconds, _doc("a peer silent this long is lost")] = 5.0
    tick_late_seconds: Annotated[
        Seconds, _doc("a timer this late restarts the silence clock: we were asleep, not the peer")
    ] = 1.0
    revoke_resend_seconds: Annotated[Seconds, _doc("first resend of a Revoke, doubling")] = 0.2
    revoke_resend_seconds_max: Annotated[Seconds, _doc("longest pause between resends")] = 2.0
    write_seconds_max: Annotated[Seconds, _doc("a write without progress is unsettled")] = 30.0
    fence_after_seconds: Annotated[
        Seconds, _doc("age of a revoked lease that sets off a fence")
    ] = 45.0
    kill_lost_after_seconds: Annotated[
        Seconds, _doc("local engine: a lost but living writer is killed after this long")
    ] = 15.0
    retire_seconds_max: Annotated[
        Seconds, _doc("a rank that does not confirm a teardown in time ends its worker")
    ] = 10.0
    quarantine_after_seconds: Annotated[Seconds, _doc("revoked lease counts as quarantined")] = 5.0
    quarantine_pages_max: Annotated[
        Count | None, _doc("quarantined pages at which admission stops; a quarter of the pool")
    ] = None
    request_timeout_seconds: Annotated[Seconds, _doc("longest life of a request")] = 600.0
    rooms_per_request_max: Annotated[Count, _doc("rooms of one request that may fail")] = 3
    unpaired_seconds_max: Annotated[
        Seconds, _doc("how long accepted requests wait for a prefill worker when none is left")
    ] = 30.0
    rooms_max: Annotated[Count, _doc("rooms alive per worker")] = 4096
    inbox_max: Annotated[Count, _doc("events waiting in one room's inbox")] = 64
    frame_bytes_max: Annotated[Count, _doc("largest frame accepted")] = 16 * 1024 * 1024
    decode_incarnations_max: Annotated[
        Count, _doc("decode incarnations a prefill worker remembers before it drains and exits")
    ] = 4096
    prefill_endpoints_max: Annotated[Count, _doc("prefill endpoints a decode worker knows")] = 1024


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the pool that its KV lives in. Prefill and decode must agree on all but the
    pool's size; workers that differ are never paired."""

    model: Annotated[
        str, _doc("Hugging Face directory or id, GGUF file, or 'smollm2-135m-instruct'")
    ] = "smollm2-135m-instruct"
    served_model_name: Annotated[
        str | None, _doc("name clients use; the directory's name if not given")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _doc("dtype of weights and KV; auto: the checkpoint's where the CPU is fast in it"),
    ] = "auto"
    max_model_len: Annotated[
        Count | None, _doc("prompt + output tokens at most; the model's own limit if not given")
    ] = None
    page_size: Annotated[Count, _doc("tokens per KV page", alias="block_size")] = 16
    kv_cache_memory_bytes: Annotated[
        Count | None, _doc("size of the KV pool; 1 GiB on CPU if not given")
    ] = None
    gpu_memory_utilization: Annotated[
        Share, _doc("share of GPU memory for weights and pool (CUDA only)")
    ] = 0.9
    load_format: Annotated[
        Literal["auto", "dummy"], _doc("dummy: random weights of the model's shape")
    ] = "auto"
    quantization: Annotated[
        str | None, _doc("quantize the weights while loading: int8 or nf4 (docs/models.md)")
    ] = None
    kv_checksum: Annotated[
        bool, _doc("compare checksums of KV pages before they are used; on all workers or on none")
    ] = False


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker computes."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], _doc("device kind; auto is the CPU unless --gpus is given")
    ] = "auto"
    gpus: Annotated[
        str | None, _doc("CUDA devices, as in 0-3 or 0,2: one rank on each; up deals them out")
    ] = None
    tensor_parallel_size: Annotated[
        Count | None, _doc("ranks of a worker; if not given, one per device of --gpus, or 1")
    ] = None
    threads: Annotated[
        Count | None, _doc("compute threads; the cores of --cpus, or all usable ones")
    ] = None
    cpus: Annotated[
        str | None, _doc("cores that compute threads are pinned to, as in 0 or 2-5")
    ] = None


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How KV passes from prefill to decode workers (docs/operations.md, Transfer engines)."""

    transfer: Annotated[
        Literal["auto", "local", "tcp", "mooncake"],
        _doc("transfer engine; auto: the best that both workers of a pair have"),
    ] = "auto"
    tcp_connections: Annotated[
        Count | None,
        _doc("connections of the tcp engine between two ranks; 4, or 2 on two cores or fewer"),
    ] = None


class MooncakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `mooncake` transfer engine (docs/operations.md, Transfer engines)."""

    mooncake_protocol: Annotated[
        Literal["auto", "tcp", "rdma", "efa", "nvlink"],
        _doc("what mooncake moves KV over; auto: rdma where there are devices, else tcp"),
    ] = "auto"
    mooncake_devices: Annotated[
        str, _doc("RDMA devices that mooncake uses, as in mlx5_0,mlx5_1; all if not given")
    ] = ""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much runs at once."""

    max_num_seqs: Annotated[Count, _doc("sequences per step at most")] = 64
    max_num_batched_tokens: Annotated[Count, _doc("tokens per step at most (chunk size)")] = 512
    queue_max: Annotated[Count, _doc("requests waiting for pages before 429")] = 1024
    stall_seconds_max: Annotated[
        Seconds,
        _doc(
            "a forward, or waiting work, that stands still this long makes a worker unhealthy; a "
            "forward that hangs for five times as long ends it"
        ),
    ] = 60.0
    stream_tokens_max: Annotated[
        Count, _doc("tokens a client may leave unread before its sequence pauses")
    ] = 256
    enable_prefix_caching: Annotated[
        bool, _doc("keep computed pages for prompts that begin alike")
    ] = True
    local_prefill: Annotated[
        Literal["off", "fallback", "short"],
        _doc("prompts that decode computes itself: none, what no prefill worker takes, short ones"),
    ] = "fallback"
    local_prefill_tokens: Annotated[
        Count, _doc("prompt tokens that decode computes in a step beside running sequences")
    ] = 64
    local_prefill_short_tokens: Annotated[
        Count,
        _doc("with short: prompts of so many uncached tokens, if that beats a hand-over"),
    ] = 64


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What those who run it see."""

    log_level: Annotated[LogLevel, _doc("log level")] = "info"
    log_format: Annotated[
        Literal["text", "json"], _doc("log lines for people, or one JSON object a line")
    ] = "text"
    otlp_endpoint: Annotated[
        str | None,
        _doc("send OpenTelemetry traces to this OTLP/HTTP URL; 'console' prints them to stderr"),
    ] = None


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the channels between processes let in (docs/operations.md, Security)."""

    cluster_key: Annotated[
        str | None,
        _doc("file of the key that all processes of a cluster share; `pdrt keygen` makes one"),
    ] = None
    insecure: Annotated[
        bool, _doc("bind to a network without a cluster key: anybody who reaches it reads prompts")
    ] = False


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may do."""

    api_key: Annotated[
        tuple[str, ...],
        _doc("clients must send one of these as a bearer token; repeat for several"),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...], _doc("web origins that may call this, or *; repeat for several")
    ] = ()
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"],
        _doc("how tool calls are found in the output; auto asks the chat template"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think"],
        _doc("how reasoning is told from the answer; auto asks the chat template"),
    ] = "auto"
    body_bytes_max: Annotated[Count, _doc("largest HTTP body")] = 4 * 1024 * 1024
    choices_max: Annotated[Count, _doc("prompts times n of one request at most")] = 128
    logprobs_max: Annotated[int, _doc("most likely tokens reported per token at most")] = 20
    grammar_bytes_max: Annotated[Count, _doc("largest schema, regex or grammar")] = 64 * 1024


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`pdrt prefill` and `pdrt decode`."""

    gateway: Annotated[
        tuple[str, ...], _doc("gateway worker address HOST:PORT; repeat for several")
    ] = ("127.0.0.1:8001",)
    host: Annotated[str, _doc("address to bind to")] = "127.0.0.1"
    port: Annotated[Port, _doc("bootstrap channel port (prefill); 0 picks one")] = 0
    metrics_port: Annotated[Port, _doc("HTTP port of /metrics, /health, /ready; 0 picks one")] = 0
    data_port: Annotated[
        Port, _doc("port for KV of the tcp engine (decode), rank r's is r higher; 0 picks some")
    ] = 0
    shutdown_timeout: Annotated[Seconds, _doc("seconds to finish running requests")] = 30.0
    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    engines: TransferConfig = TransferConfig()
    mooncake: MooncakeConfig = MooncakeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    security: SecurityConfig = SecurityConfig()
    observe: ObserveConfig = ObserveConfig()
    protocol: ProtocolConfig = ProtocolConfig()


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`pdrt gateway`."""

    host: Annotated[str, _doc("HTTP address to bind to")] = "127.0.0.1"
    port: Annotated[Port, _doc("HTTP port; 0 picks one")] = 8000
    worker_host: Annotated[str, _doc("address that workers dial")] = "127.0.0.1"
    worker_port: Annotated[Port, _doc("port that workers dial (--gateway HOST:PORT)")] = 8001
    model: Annotated[str, _doc("model whose tokenizer is used; must be the workers' model")] = (
        "smollm2-135m-instruct"
    )
    served_model_name: Annotated[str | None, _doc("name clients use")] = None
    requests_max: Annotated[Count, _doc("requests in flight before 429")] = 4096
    workers_max: Annotated[Count, _doc("workers that may register")] = 4096
    attempts_max: Annotated[Count, _doc("decode workers one request may be sent to")] = 3
    worker_wait_seconds: Annotated[
        Seconds, _doc("how long a request that has begun waits for a decode worker")
    ] = 60.0
    cpus: Annotated[
        str | None, _doc("cores that it keeps to, as in 0 or 2-5; up names those of all workers")
    ] = None
    shutdown_timeout: Annotated[Seconds, _doc("seconds to finish running requests")] = 30.0
    api: ApiConfig = ApiConfig()
    security: SecurityConfig = SecurityConfig()
    observe: ObserveConfig = ObserveConfig()
    protocol: ProtocolConfig = ProtocolConfig()


class UpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`pdrt up`: one gateway, prefill and decode workers on this machine, supervised: one that dies
    or leaves (`pdrt drain`) is started anew."""

    host: Annotated[str, _doc("HTTP address to bind to")] = "127.0.0.1"
    port: Annotated[Port, _doc("HTTP port; 0 picks one")] = 8000
    worker_port: Annotated[Port, _doc("port that more workers can dial; 0 picks one")] = 0
    prefill_workers: Annotated[Count, _doc("prefill workers")] = 1
    decode_workers: Annotated[Count, _doc("decode workers")] = 1
    ready_timeout: Annotated[Seconds, _doc("seconds to wait for the first full pair")] = 300.0
    hang_seconds_max: Annotated[
        Seconds, _doc("a role whose event loop stands still this long is killed and started anew")
    ] = 30.0
    worker_wait_seconds: Annotated[
        Seconds, _doc("how long a request that has begun waits for a decode worker")
    ] = 60.0
    shutdown_timeout: Annotated[Seconds, _doc("seconds to finish running requests")] = 30.0
    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    engines: TransferConfig = TransferConfig()
    mooncake: MooncakeConfig = MooncakeConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    api: ApiConfig = ApiConfig()
    security: SecurityConfig = SecurityConfig()
    observe: ObserveConfig = ObserveConfig()
    protocol: ProtocolConfig = ProtocolConfig()
