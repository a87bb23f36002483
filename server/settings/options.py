"""Every option of the server, once: its name, type, default and meaning.

The names are tritonserver's if it has the option. A field `grpc_port` is the flag `--grpc-port`, the environment
variable `INFERD_GRPC_PORT` and the key `grpc-port` of a `--config` file; `inferd.server.program` derives all three
from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from inferd.server.addresses import Address, Bind, parse_address, parse_bind
from inferd.server.caching import CacheConfig, parse_cache_config
from inferd.server.settings.tracing import TraceConfig, parse_trace_config
from inferd.server.settings.values import (
    parse_backend_config,
    parse_fractions,
    parse_metrics_config,
    parse_pools,
    parse_restricted_protocols,
)

T = TypeVar("T")

HELD_DIVISOR = 4
"""The part of the memory that --max-held-bytes 0 stands for: 1/HELD_DIVISOR."""

CORES_PER_IO_THREAD = 4
"""--io-threads 0 stands for one thread for each so many cores that the process may use; instances need the others."""

DEVICE_POOL_SIZE = 64 << 20
"""Bytes that are pooled of a GPU which no --cuda-memory-pool-byte-size names."""

DEFAULT_MAX_BATCH_SIZE = 4
"""The default-max-batch-size of --backend-config."""

SECTIONS = {
    "model_repository": "Models",
    "backend_directory": "Backends and instances",
    "transport": "Where it listens",
    "grpc_use_ssl": "TLS",
    "grpc_restricted_protocol": "Access",
    "grpc_max_message_size": "Messages",
    "max_inflight_requests": "Admission and response cache",
    "allow_client_shm": "Shared memory of clients",
    "cuda_driver": "GPUs",
    "grpc_keepalive_time": "Connections",
    "max_held_bytes": "Limits of the native transport",
    "orca_load_metrics": "Balancers and stopping",
    "allow_metrics": "Metrics",
    "trace_config": "Traces",
    "log_verbose": "Logs",
}
"""The first option of each part of the list, and the part's heading."""


def _told(default: T, meaning: str) -> T:
    """An option whose text has the number of a constant above."""
    made: T = dataclasses.field(default=default, metadata={"help": meaning})
    return made


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one server as written; `inferd.server.settings.Settings` has checked values."""

    # -- Models --

    model_repository: tuple[str, ...]
    """Folder of model folders, local or at s3://, gs:// or as://; or one model: its folder, its file, a folder with its
    file, or hf://. May be given several times, also as --model-store, and as an argument without option name."""

    model_name: str = ""
    """Name of the model, if --model-repository is one model."""

    id: str = "inferd"
    """Name of the server in its metadata."""

    exit_on_error: bool = True
    """Exit when a model fails to load at start; otherwise serve the others."""

    strict_readiness: bool = True
    """Be ready only while every model is; otherwise as soon as the server runs."""

    disable_auto_complete_config: bool = False
    """Use config.pbtxt as it is, without completing it from the model file."""

    model_config_name: str = ""
    """Prefer configs/NAME.pbtxt of a model folder to its config.pbtxt."""

    config_variable: tuple[str, ...] = ("MODEL_*",)
    """Name of a variable of the environment, or a pattern of names, that a config.pbtxt may use as ${NAME} or
    ${NAME:-default}; may be given several times."""

    model_control_mode: Literal["none", "explicit", "poll", "lazy"] = "none"
    """none: every model is loaded at start; explicit: those of --load-model, and clients load and unload; poll: every
    model, and what changes in the repositories; lazy: those of --load-model, others at the first request."""

    load_model: tuple[str, ...] = ()
    """A model to be loaded at start with --model-control-mode explicit or lazy, or * for all; with lazy it stays. May
    be given several times."""

    model_memory_budget: int = 0
    """Limit of the total bytes of the files of loaded models with --model-control-mode lazy; beyond it the models that
    were used least recently are unloaded. 0 for no limit."""

    repository_poll_secs: int = 15
    """Seconds between checks of the repositories with --model-control-mode poll."""

    model_load_thread_count: int = 4
    """How many models are loaded at a time."""

    model_load_retry_count: int = 0
    """How many times the load of a model is repeated after it failed."""

    model_load_gpu_limit: tuple[str, ...] = ()
    """GPU:FRACTION: no model is loaded on this GPU while more than that fraction (0 to 1) of its memory is in use; once
    for each GPU."""

    # -- Backends and instances --

    backend_directory: Path | None = None
    """Folder with further backends: Python modules or packages, or libraries compiled for Triton."""

    backend_config: tuple[str, ...] = ()
    """BACKEND,KEY=VALUE for one backend or KEY=VALUE for all; may be given several times."""

    rate_limit: Literal["off", "execution_count"] = "off"
    """Whether instances execute only while they hold the resources of their rate_limiter."""

    rate_limit_resource: tuple[str, ...] = ()
    """NAME:COUNT or NAME:COUNT:DEVICE: how much there is of a resource; may be given several times."""

    host_policy: tuple[str, ...] = ()
    """NAME,numa-node=N or NAME,cpu-cores=0-3,8-11: where instances run; may be given several times."""

    # -- Where it listens --

    transport: Literal["native", "grpcio"] = "native"
    """The gRPC implementation: the native one, or grpcio."""

    grpc_address: tuple[str, ...] = ("127.0.0.1",)
    """Where the gRPC service listens: HOST, HOST:PORT, [IPV6]:PORT or unix:PATH, then rules of this address (see
    docs/operations.md); may be given several times."""

    grpc_port: int = 8001
    """Port of the addresses without a port; 0 for any free one."""

    reuse_grpc_port: bool = False
    """Share the ports with other processes that do the same (SO_REUSEPORT)."""

    grpc_unix_mode: str = "0660"
    """Mode of unix sockets, octal."""

    grpc_unix_owner: str = ""
    """Owner of unix sockets: USER, USER:GROUP or :GROUP, as names or numbers."""

    # -- TLS --

    grpc_use_ssl: bool = False
    """Serve TLS on TCP; unix sockets stay plain."""

    grpc_use_ssl_mutual: bool = False
    """Ask clients for a certificate that --grpc-root-cert has signed; implies --grpc-use-ssl."""

    grpc_server_cert: Path | None = None
    """PEM file with the server's certificate chain. The server reads this file, the key and the root certificates again
    when they change."""

    grpc_server_key: Path | None = None
    """PEM file with the private key of the certificate."""

    grpc_root_cert: Path | None = None
    """PEM file with the certificates that clients' certificates are checked against."""

    # -- Access --

    grpc_restricted_protocol: tuple[str, ...] = ()
    """GROUP,GROUP:KEY=VALUE: these calls need the header triton-grpc-protocol-KEY; may be given several times."""

    grpc_token_file: Path | None = None
    """File with one token on each line, and its rights; callers then need a token. Read again when it changes."""

    model_load_overrides: bool = False
    """Allow callers who need no token to load models with a configuration and files of their own, which is to run code
    in the server. With --grpc-token-file the right 'overrides' of a token allows it."""

    sequence_sharing: bool = False
    """Let callers continue each other's sequences, as in Triton. Without it callers with a token or a client
    certificate, and the users of unix sockets, have sequence ids of their own."""

    grpc_reflection: Literal["auto", "on", "off"] = "auto"
    """Server reflection; auto: at addresses that only the same machine can reach."""

    # -- Messages --

    grpc_max_message_size: int = 0
    """Largest message in bytes that is received; 0 for no limit."""

    grpc_max_decompressed_size: int = 64 << 20
    """Largest message in bytes after decompression; 0 for no limit but --grpc-max-message-size."""

    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = "none"
    """How hard inference responses are compressed for clients that accept it (gzip preferred, else deflate)."""

    grpc_header_forward_pattern: str = ""
    """Regular expression, matched anywhere in the names of headers and in any case: these headers become request
    parameters."""

    # -- Admission and response cache --

    max_inflight_requests: int = 16384
    """Inference requests that may be in the server at a time, over all models; 0 for any number."""

    max_queued_requests_per_model: int = 4096
    """Inference requests that may wait for one version of a model; 0 for any number."""

    cache_config: tuple[str, ...] = ()
    """local,KEY=VALUE: the response cache, with size=BYTES and ttl=SECONDS; or redis,KEY=VALUE, with host, port, user,
    password, db, ttl=SECONDS and others: see docs/operations.md. May be given several times."""

    cache_per_caller: bool = False
    """Keep the response cache and coalescing separate for callers with a token or a client certificate, and for users
    of unix sockets: nobody gets a response to another caller's request."""

    # -- Shared memory of clients --

    allow_client_shm: bool = False
    """Let every client register every shared memory object that the server can open, and use every region. Without it
    only clients on unix sockets of the native transport may register objects, each those of its own user."""

    client_shm_access: Literal["auto", "copy", "map", "none"] = "auto"
    """map: models use clients' regions in place; copy: their contents are copied first; auto: in place for clients of
    the server's own user on a unix socket, else copied; none: nobody may register any."""

    client_shm_prefix: tuple[str, ...] = ()
    """How the keys of clients' objects must begin, without slash; may be given several times."""

    client_shm_max_regions: int = 1024
    """Regions of shared memory that clients may have registered."""

    client_shm_max_byte_size: int = 64 << 30
    """Bytes of all regions that clients may have registered."""

    client_shm_max_regions_per_user: int = 0
    """Regions that one user may have registered; 0: half of what all may have, so that no user can take all. Without
    effect with --allow-client-shm, where all users share."""

    client_shm_max_byte_size_per_user: int = 0
    """Bytes of all regions that one user may have registered; 0: half of what all may have. Without effect with
    --allow-client-shm."""

    # -- GPUs --

    cuda_driver: str = "libcuda.so.1"
    """The library of the CUDA driver, by name or path; the server looks for it at start."""

    pinned_memory_pool_byte_size: int = 256 << 20
    """Limit of page-locked memory for copies from and to GPUs, in bytes, for each NUMA node of the host."""

    cuda_memory_pool_byte_size: tuple[str, ...] = _told(
        (),
        f"""GPU:BYTES: limit of the memory of a GPU that is pooled for tensors, {DEVICE_POOL_SIZE} by default; once for
        each GPU.""",
    )

    # -- Connections --

    grpc_keepalive_time: int = 7_200_000
    """Milliseconds of silence after which a client is pinged."""

    grpc_keepalive_timeout: int = 20_000
    """Milliseconds within which a pinged client must answer; otherwise its connection is dropped."""

    grpc_keepalive_permit_without_calls: bool = True
    """Ping clients that have no call in progress, and let them ping."""

    grpc_http2_max_pings_without_data: int = 2
    """Pings in a row, with no response sent between them, after which one is sent each minute; 0 for no limit."""

    grpc_http2_min_recv_ping_interval_without_data: int = 10_000
    """Milliseconds that must lie between two pings of a client if nothing is sent to it between them."""

    grpc_http2_max_ping_strikes: int = 2
    """Pings of a client that may come sooner than --grpc-http2-min-recv-ping-interval-without-data allows, before its
    connection is ended; 0 for no limit."""

    grpc_max_connection_age: int = 0
    """Milliseconds after which a connection is ended, more or less a tenth; 0 for no limit."""

    grpc_max_connection_age_grace: int = 0
    """Milliseconds that calls have to finish on a connection that is too old; 0 for no limit."""

    grpc_handshake_timeout: int = 10_000
    """Milliseconds within which a new connection must begin to speak HTTP/2."""

    grpc_max_connections: int = 0
    """Connections open at a time; further ones are closed at once; 0 for no limit. Not with --transport grpcio."""

    grpc_max_concurrent_streams: int = 1024
    """Calls that one connection may have open at a time; with --transport grpcio at most 256."""

    io_threads: int = _told(
        0,
        f"""Threads that read and write the sockets of clients; 0 for one for each {CORES_PER_IO_THREAD} cores that the
        process may use, and at least one. Not with --transport grpcio.""",
    )

    io_busy_poll_us: int = 0
    """Microseconds for which an I/O thread polls for requests before it sleeps: by default it sleeps at once. Polling
    saves the time of waking, 10 to 50 microseconds a request, for clients that send one request after the other, and
    takes a core for each thread while requests come. Not with --transport grpcio."""

    # -- Limits of the native transport --

    max_held_bytes: int = _told(
        0,
        f"""Bytes of requests that are not answered and of responses that are not read, over all clients. Beyond it the
        server ends calls of the clients that hold most and progress least. 0 for 1/{HELD_DIVISOR} of the memory. Not
        with --transport grpcio.""",
    )

    grpc_receive_timeout: int = 30_000
    """Milliseconds within which a request must arrive, and one second more for each 16 KiB of its first MiB and for
    each 256 KiB of the rest; 0 for no limit. Not with --transport grpcio."""

    grpc_send_timeout: int = 30_000
    """Milliseconds within which a client must read a waiting response, and one second more for each 16 KiB of its first
    MiB and for each 256 KiB of the rest; 0 for no limit. Not with --transport grpcio."""

    grpc_max_connections_per_client: int = 0
    """Connections that one client may have; further ones are closed at once; 0 for any number. Not with
    --transport grpcio."""

    grpc_max_calls_per_client: int = 0
    """Calls that one client may have in flight; 0 for any number. Not with --transport grpcio."""

    grpc_max_streams_per_client: int = 0
    """Streams that one client may have in flight; 0 for any number. Not with --transport grpcio."""

    grpc_max_bytes_per_client: int = 0
    """Bytes of requests and responses that one client may have in flight; 0 for any number. Not with --transport
    grpcio."""

    # -- Balancers and stopping --

    orca_load_metrics: bool = False
    """Send an ORCA load report with every inference response, for balancers that weight servers by it."""

    drain_delay: float = 0.0
    """Seconds for which a stopping server reports that it is not ready and still serves, for balancers to notice."""

    exit_timeout_secs: int = 30
    """Seconds within which running requests must finish when the server stops. Sequences must end within three quarters
    of that time."""

    # -- Metrics --

    allow_metrics: bool = True
    """Serve metrics for Prometheus over HTTP at /metrics."""

    allow_gpu_metrics: bool = True
    """Include metrics of the GPUs, if the extra gpu is installed."""

    allow_cpu_metrics: bool = True
    """Include metrics of the machine's processors and memory."""

    metrics_address: str = "127.0.0.1"
    """Where metrics are served: HOST, HOST:PORT, [IPV6]:PORT or unix:PATH. The address has no authentication."""

    metrics_port: int = 8002
    """Port of --metrics-address if that names none; 0 for any free one."""

    metrics_interval_ms: int = 2000
    """Milliseconds for which sampled values of GPUs and processors are shown before they are sampled again."""

    metrics_config: tuple[str, ...] = ()
    """counter_latencies=false or histogram_latencies=false: omit these metrics of models. May be given several
    times."""

    # -- Traces --

    trace_config: tuple[str, ...] = ()
    """KEY=VALUE: a setting of traces, such as level=TIMESTAMPS, rate=100 or triton,file=PATH; see
    docs/observability.md. May be given several times."""

    # -- Logs --

    log_verbose: int = 0
    """Level of detailed messages; 0 for none."""

    log_info: bool = True
    """Log information."""

    log_warning: bool = True
    """Log warnings."""

    log_error: bool = True
    """Log errors."""

    log_format: Literal["default", "ISO8601", "json"] = "default"
    """Format of log lines."""

    log_file: str = ""
    """Log to this file instead of standard error; it is opened again at SIGHUP."""

    access_log: int = 0
    """N: log one inference request in N, with its times; 0 for none."""

    slow_request_ms: int = 0
    """Log inference requests that take longer than so many milliseconds; 0 for none."""

    def __post_init__(self) -> None:
        """Nothing here; `Settings` checks the values. (A dataclass calls this only if it defines it.)"""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses of the gRPC service."""
        return tuple(bind.address for bind in self.binds)

    @property
    def binds(self) -> tuple[Bind, ...]:
        """`grpc_address`, parsed, with the rules of each address."""
        return tuple(parse_bind(text, self.grpc_port) for text in self.grpc_address)

    @property
    def unix_mode(self) -> int:
        return int(self.grpc_unix_mode, 8)

    @property
    def backend_settings(self) -> Mapping[str, Mapping[str, str]]:
        """`backend_config` by backend; the key "" has the options for all backends."""
        return parse_backend_config(self.backend_config)

    @property
    def cache(self) -> CacheConfig:
        """`cache_config`, parsed."""
        return parse_cache_config(self.cache_config)

    @property
    def cuda_pools(self) -> Mapping[int, int]:
        """`cuda_memory_pool_byte_size`: bytes by GPU."""
        return parse_pools(self.cuda_memory_pool_byte_size)

    @property
    def gpu_load_limits(self) -> Mapping[int, float]:
        """`model_load_gpu_limit`: fractions by GPU."""
        return parse_fractions(self.model_load_gpu_limit)

    @property
    def restricted_protocols(self) -> tuple[tuple[tuple[str, ...], str, str], ...]:
        """`grpc_restricted_protocol` as groups, name and value of the header."""
        return parse_restricted_protocols(self.grpc_restricted_protocol)

    @property
    def metrics_bind(self) -> Address:
        """`metrics_address`, parsed."""
        return parse_address(self.metrics_address, self.metrics_port, "metrics-address")

    @property
    def tracing(self) -> TraceConfig:
        """`trace_config`, parsed."""
        return parse_trace_config(self.trace_config)

    @property
    def metrics_switches(self) -> Mapping[str, bool]:
        """`metrics_config`, parsed."""
        return parse_metrics_config(self.metrics_config)

    @property
    def default_max_batch_size(self) -> int:
        """The max_batch_size that auto-complete gives a batching model: `--backend-config=default-max-batch-size=N`."""
        return int(self.backend_settings.get("", {}).get("default-max-batch-size", DEFAULT_MAX_BATCH_SIZE))


def sections() -> Iterator[tuple[str, list[dataclasses.Field[Any]]]]:
    """The options in their parts, each with its heading."""
    part: list[dataclasses.Field[Any]] = []
    heading = ""
    for field in dataclasses.fields(Options):
        if field.name in SECTIONS:
            if part:
                yield heading, part
            heading, part = SECTIONS[field.name], []
        part.append(field)
    yield heading, part


def written(default: object) -> str:
    """A default as written on the command line; empty without one."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return " ".join(map(written, default))
    return "" if default is None or default is dataclasses.MISSING else str(default)
