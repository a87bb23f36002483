"""Every option of the server once: its name, type, default and meaning.

The names are tritonserver's where it has the option. A field `grpc_port` is the flag `--grpc-port`, the environment
variable `INFERD_GRPC_PORT` and the key `grpc-port` of a `--config` file; `server.cli` derives all three from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from server.addresses import RESTRICTABLE, Address, Bind, Rules, SettingsError, parse_bind
from server.caching import CacheConfig, CacheConfigError, parse_cache_config

REMOTE_SCHEMES = ("s3:", "gs:", "as:", "hf:", "http:", "https:")

DECOMPRESSED_SIZE = 64 << 20
"""Default limit of a message after decompression, in bytes."""


UNSENT_SIZE = 50_331_648
INCOMING_SIZE = 1 << 30
RECEIVE_TIMEOUT = 30_000

MOST_REGIONS = 4096  # that can be guarded against clients that shorten them

_DURATIONS = ("grpc_keepalive_time", "grpc_keepalive_timeout", "grpc_handshake_timeout")
_COUNTS = (
    "grpc_http2_max_pings_without_data",
    "grpc_http2_min_recv_ping_interval_without_data",
    "grpc_http2_max_ping_strikes",
    "grpc_max_connection_age",
    "grpc_max_connection_age_grace",
    "grpc_max_connections",
    "grpc_receive_timeout",
    "grpc_max_connections_per_client",
    "grpc_max_calls_per_client",
    "grpc_max_streams_per_client",
)
_NATIVE_ONLY = {
    "grpc_max_connections": 0,
    "grpc_max_unsent_size": UNSENT_SIZE,
    "grpc_max_incoming_size": INCOMING_SIZE,
    "grpc_receive_timeout": RECEIVE_TIMEOUT,
    "grpc_max_connections_per_client": 0,
    "grpc_max_calls_per_client": 0,
    "grpc_max_streams_per_client": 0,
    "grpc_max_bytes_per_client": 0,
}
"""Options that gRPC's C core has nothing for, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one server runs.

    Raises:
        SettingsError: the value of an option is out of its range.
    """

    # -- what is served --

    model_repository: tuple[Path, ...]
    """Folder of model folders; may be given several times (also --model-store)."""

    id: str = "inferd"
    """Name of the server in its metadata."""

    exit_on_error: bool = True
    """Exit when a model fails to load at start; otherwise serve the others."""

    strict_readiness: bool = True
    """Be ready only while every model is; otherwise as soon as the server runs."""

    disable_auto_complete_config: bool = False
    """Take config.pbtxt as it is: nothing is read from the model file to complete it."""

    model_config_name: str = ""
    """Prefer configs/NAME.pbtxt of a model folder to its config.pbtxt."""

    model_control_mode: Literal["none", "explicit", "poll"] = "none"
    """none: every model is loaded at start; explicit: those of --load-model, and clients load and unload; poll: every
    model, and what changes in the repositories."""

    load_model: tuple[str, ...] = ()
    """A model to be loaded at start with --model-control-mode explicit, or * for all; may be given several times."""

    repository_poll_secs: int = 15
    """Seconds between looks at the repositories with --model-control-mode poll."""

    model_load_thread_count: int = 4
    """How many models are loaded at a time."""

    rate_limit: Literal["off", "execution_count"] = "off"
    """Whether instances execute only while they hold the resources of their rate_limiter."""

    rate_limit_resource: tuple[str, ...] = ()
    """NAME:COUNT or NAME:COUNT:DEVICE: how much there is of a resource; may be given several times."""

    host_policy: tuple[str, ...] = ()
    """NAME,numa-node=N or NAME,cpu-cores=0-3,8-11: where instances run; may be given several times."""

    backend_directory: Path | None = None
    """Folder with further backends: one Python module or package each."""

    backend_config: tuple[str, ...] = ()
    """BACKEND,KEY=VALUE for one backend or KEY=VALUE for all; may be given several times."""

    # -- where --

    transport: Literal["native", "grpcio"] = "native"
    """The gRPC implementation: the native one, or grpcio."""

    grpc_address: tuple[str, ...] = ("127.0.0.1",)
    """Where the gRPC service listens: HOST, HOST:PORT, [IPV6]:PORT or unix:PATH, then what holds there only (see
    operations.md); may be given several times."""

    grpc_port: int = 8001
    """Port of the addresses that name none; 0 for any free one."""

    reuse_grpc_port: bool = False
    """Share the ports with other processes that do the same (SO_REUSEPORT)."""

    grpc_unix_mode: str = "0660"
    """Mode of unix sockets, octal."""

    grpc_unix_owner: str = ""
    """Owner of unix sockets: USER, USER:GROUP or :GROUP, as names or numbers."""

    grpc_use_ssl: bool = False
    """Serve TLS on TCP; unix sockets stay plain."""

    grpc_use_ssl_mutual: bool = False
    """Ask clients for a certificate that --grpc-root-cert has signed; implies --grpc-use-ssl."""

    grpc_server_cert: Path | None = None
    """PEM file with the server's certificate chain; read again when it changes, as are the other two."""

    grpc_server_key: Path | None = None
    """PEM file with the private key of the certificate."""

    grpc_root_cert: Path | None = None
    """PEM file with the certificates that clients' certificates are checked against."""

    grpc_max_message_size: int = 0
    """Largest message in bytes that is received; 0 for no limit."""

    grpc_max_decompressed_size: int = DECOMPRESSED_SIZE
    """Largest message in bytes after decompression; 0 for no limit but --grpc-max-message-size."""

    grpc_infer_response_compression_level: Literal["none", "low", "medium", "high"] = "none"
    """How hard inference responses are compressed for clients that take it (gzip preferred, else deflate)."""

    max_inflight_requests: int = 16384
    """Inference requests that may be in the server at a time, over all models; 0 for any number."""

    max_queued_requests_per_model: int = 4096
    """Inference requests that may wait for one version of a model; 0 for any number."""

    cache_config: tuple[str, ...] = ()
    """local,KEY=VALUE: the response cache, with size=BYTES and ttl=SECONDS; or redis,KEY=VALUE, with host, port, user,
    password, db, ttl=SECONDS and others: see docs/operations.md. May be given several times."""

    grpc_restricted_protocol: tuple[str, ...] = ()
    """GROUP,GROUP:KEY=VALUE: these calls need the header triton-grpc-protocol-KEY; may be given several times."""

    grpc_token_file: Path | None = None
    """File with a token a line, and what its bearer may do; callers then need one. Read again when it changes."""

    triton_auth_codes: bool = False
    """Refuse callers with UNAVAILABLE, as tritonserver does, not UNAUTHENTICATED and PERMISSION_DENIED."""

    allow_client_shm: bool = False
    """Let every client register every shared memory object that the server can open, and use every region; without it
    only clients on unix sockets of the native door, each objects of its own user."""

    client_shm_access: Literal["auto", "copy", "map", "none"] = "auto"
    """map: models use clients' regions in place; copy: what is in them is copied first; auto: in place those of the
    server's own user on a unix socket; none: nobody may register any."""

    client_shm_prefix: tuple[str, ...] = ()
    """How the keys of clients' objects must begin, without slash; may be given several times."""

    client_shm_max_regions: int = 1024
    """Regions of shared memory that clients may have registered."""

    client_shm_max_byte_size: int = 64 << 30
    """Bytes of all these regions together."""

    grpc_header_forward_pattern: str = ""
    """Regular expression, looked for in the names of headers in any case: those become request parameters."""
    # -- GPUs --

    cuda_driver: str = "libcuda.so.1"
    """The library of the CUDA driver, by name or path; it is looked for when the server starts."""

    pinned_memory_pool_byte_size: int = 256 << 20
    """Bytes of page-locked memory at most, for copies from and to GPUs, of each node of the host's memory."""

    cuda_memory_pool_byte_size: tuple[str, ...] = ()
    """GPU:BYTES: memory of a GPU at most that is kept for tensors, 67108864 by default; once for each GPU."""

    orca_load_metrics: bool = False
    """Send an ORCA load report with every inference answer, for balancers that weigh servers by it."""

    grpc_reflection: Literal["auto", "on", "off"] = "auto"
    """Server reflection; auto: where only this machine can ask."""

    # -- how long connections live, times in milliseconds --

    grpc_keepalive_time: int = 7_200_000
    """Milliseconds of silence after which a client is pinged."""

    grpc_keepalive_timeout: int = 20_000
    """Milliseconds in which a pinged client must answer, else its connection is dropped."""

    grpc_keepalive_permit_without_calls: bool = True
    """Ping clients that have no call in progress, and let them ping."""

    grpc_http2_max_pings_without_data: int = 2
    """Pings in a row, without an answer sent between, after which there is one a minute; 0 for no limit."""

    grpc_http2_min_recv_ping_interval_without_data: int = 10_000
    """Milliseconds that must lie between the pings of a client to which nothing is sent meanwhile."""

    grpc_http2_max_ping_strikes: int = 2
    """Pings that may come sooner than that, before the client is sent away; 0 for no limit."""

    grpc_max_connection_age: int = 0
    """Milliseconds after which a connection is ended, more or less a tenth; 0 for no limit."""

    grpc_max_connection_age_grace: int = 0
    """Milliseconds that calls have to finish on a connection that is too old; 0 for no limit."""

    grpc_handshake_timeout: int = 10_000
    """Milliseconds in which a new connection must begin to speak HTTP/2."""

    grpc_max_connections: int = 0
    """Connections open at a time; further ones are closed at once; 0 for no limit. Not with --transport grpcio."""

    grpc_max_unsent_size: int = 50_331_648
    """Bytes of answers that may wait for clients to read them; 0 for no limit. Not with --transport grpcio."""

    grpc_max_incoming_size: int = 1_073_741_824
    """Bytes of requests that may be incomplete or wait for their turn; 0 for no limit. Not with --transport grpcio."""

    grpc_receive_timeout: int = 30_000
    """Milliseconds in which a request must arrive, and one second more for each 16 KiB of it; 0 for any time. Not with
    --transport grpcio."""

    grpc_max_connections_per_client: int = 0
    """Connections that one client may have; further ones are closed at once; 0 for any number. Not with
    --transport grpcio."""

    grpc_max_calls_per_client: int = 0
    """Calls that one client may have in flight; 0 for any number. Not with --transport grpcio."""

    grpc_max_streams_per_client: int = 0
    """Of these, calls that are streams; 0 for any number. Not with --transport grpcio."""

    grpc_max_bytes_per_client: int = 0
    """Bytes of requests and answers that one client may have in flight; 0 for any number. Not with --transport
    grpcio."""

    drain_delay: float = 0.0
    """Seconds of normal service between not being ready any more and the stop, for balancers to notice."""

    exit_timeout_secs: int = 30
    """How long running requests may take to finish when the server is told to stop."""

    # -- what it says --

    log_verbose: int = 0
    """Level of detailed messages; 0 for none."""

    log_info: bool = True
    """Log information."""

    log_warning: bool = True
    """Log warnings."""

    log_error: bool = True
    """Log errors."""

    log_format: Literal["default", "ISO8601"] = "default"
    """Form of the time stamp in log lines."""

    def __post_init__(self) -> None:
        if not self.model_repository:
            raise SettingsError("model-repository: give at least one folder")
        for path in self.model_repository:
            if str(path).startswith(REMOTE_SCHEMES):
                raise SettingsError(f"model-repository: {path} is not local; remote repositories are not served")
        if not 0 <= self.grpc_port <= 65535:
            raise SettingsError(f"grpc-port: expected 0 to 65535, got {self.grpc_port}")
        if not self.grpc_address:
            raise SettingsError("grpc-address: give at least one")
        if len(set(self.addresses)) < len(self.addresses) and self.grpc_port:
            raise SettingsError(f"grpc-address: given twice: {', '.join(map(str, self.addresses))}")
        self._check_unix_mode()
        self._check_tls()
        try:
            re.compile(self.grpc_header_forward_pattern)
        except re.error as error:
            raise SettingsError(f"grpc-header-forward-pattern: not a regular expression: {error}") from None
        if self.transport == "grpcio":
            for bind in self.binds:
                known = replace(bind.rules, tls=None, mode=None, owner=None)
                if known != Rules():
                    raise SettingsError(
                        f"grpc-address: {bind.address}: gRPC's C core has only tls, mode and owner for one address, "
                        f"got {str(known)[1:]}; use --transport native"
                    )
        self._check_control()
        if self.model_load_thread_count < 1:
            raise SettingsError(f"model-load-thread-count: expected 1 or more, got {self.model_load_thread_count}")
        for name in (
            "grpc_max_message_size",
            "grpc_max_decompressed_size",
            "grpc_max_unsent_size",
            "grpc_max_incoming_size",
            "grpc_max_bytes_per_client",
            "max_inflight_requests",
            "max_queued_requests_per_model",
            "client_shm_max_regions",
            "client_shm_max_byte_size",
            "pinned_memory_pool_byte_size",
            "drain_delay",
            "exit_timeout_secs",
            "log_verbose",
        ):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name.replace('_', '-')}: expected 0 or more, got {getattr(self, name)}")
        for name in _COUNTS:
            if not 0 <= getattr(self, name) < 2**31:
                raise SettingsError(f"{name.replace('_', '-')}: expected 0 to 2147483647, got {getattr(self, name)}")
        for name in _DURATIONS:
            if not 1 <= getattr(self, name) < 2**31:
                raise SettingsError(f"{name.replace('_', '-')}: expected 1 to 2147483647, got {getattr(self, name)}")
        if self.transport == "grpcio":
            for name, default in _NATIVE_ONLY.items():
                if getattr(self, name) != default:
                    raise SettingsError(
                        f"{name.replace('_', '-')}: gRPC's C core has no such limit; use --transport native"
                    )
        if self.transport == "grpcio" and self.grpc_max_decompressed_size != DECOMPRESSED_SIZE:
            raise SettingsError(
                "grpc-max-decompressed-size: gRPC's C core has one limit for messages before and after decompression: "
                "with --transport=grpcio set --grpc-max-message-size"
            )
        if self.client_shm_max_regions > MOST_REGIONS:
            raise SettingsError(
                f"client-shm-max-regions: expected at most {MOST_REGIONS}, got {self.client_shm_max_regions}"
            )
        for prefix in self.client_shm_prefix:
            if not prefix or "/" in prefix:
                raise SettingsError(f"client-shm-prefix: expected the beginning of a name, got {prefix!r}")
        if set(self.model_config_name) & set(" /\\") or self.model_config_name in {".", ".."}:
            raise SettingsError(f"model-config-name: expected a name without folder, got {self.model_config_name!r}")
        parse_backend_config(self.backend_config)
        parse_pools(self.cuda_memory_pool_byte_size)
        parse_restricted_protocols(self.grpc_restricted_protocol)
        try:
            parse_cache_config(self.cache_config)
        except CacheConfigError as error:
            raise SettingsError(f"cache-config: {error}") from error

    def _check_control(self) -> None:
        if self.load_model and self.model_control_mode != "explicit":
            raise SettingsError("load-model: it needs --model-control-mode explicit; otherwise every model is loaded")
        if "*" in self.load_model and len(self.load_model) > 1:
            raise SettingsError(
                "load-model: Wildcard model name '*' must be the ONLY startup model if specified at all."
            )
        least = 1 if self.model_control_mode == "poll" else 0
        if self.repository_poll_secs < least:
            raise SettingsError(f"repository-poll-secs: expected {least} or more, got {self.repository_poll_secs}")

    def _check_unix_mode(self) -> None:
        try:
            valid = 0 < self.unix_mode <= 0o777
        except ValueError:
            valid = False
        if not valid:
            raise SettingsError(f"grpc-unix-mode: expected an octal mode such as 0660, got {self.grpc_unix_mode!r}")

    def _check_tls(self) -> None:
        given = {
            "grpc-server-cert": self.grpc_server_cert,
            "grpc-server-key": self.grpc_server_key,
            "grpc-root-cert": self.grpc_root_cert,
        }
        encrypted = self.grpc_use_ssl or any(bind.rules.tls for bind in self.binds)
        needed = list(given)[: 3 if self.grpc_use_ssl_mutual else 2 if encrypted else 0]
        switch = "--grpc-use-ssl-mutual" if self.grpc_use_ssl_mutual else "--grpc-use-ssl"
        if not self.grpc_use_ssl and not self.grpc_use_ssl_mutual:
            switch = "tls=on of --grpc-address"
        for name, path in given.items():
            if name in needed and path is None:
                raise SettingsError(f"{name}: {switch} needs it")
            if name not in needed and path is not None:
                switch = "--grpc-use-ssl-mutual" if name == "grpc-root-cert" else "--grpc-use-ssl"
                raise SettingsError(f"{name}: it is of no use without {switch}")

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Where the gRPC service listens."""
        return tuple(bind.address for bind in self.binds)

    @property
    def binds(self) -> tuple[Bind, ...]:
        """`grpc_address`, understood, with what holds at each of them only."""
        return tuple(parse_bind(text, self.grpc_port) for text in self.grpc_address)

    @property
    def unix_mode(self) -> int:
        return int(self.grpc_unix_mode, 8)

    @property
    def backend_settings(self) -> Mapping[str, Mapping[str, str]]:
        """`backend_config` by backend; the key "" holds what is for all backends."""
        return parse_backend_config(self.backend_config)

    @property
    def cache(self) -> CacheConfig:
        """`cache_config`, understood."""
        return parse_cache_config(self.cache_config)

    @property
    def cuda_pools(self) -> Mapping[int, int]:
        """`cuda_memory_pool_byte_size`: bytes by GPU."""
        return parse_pools(self.cuda_memory_pool_byte_size)

    @property
    def restricted_protocols(self) -> tuple[tuple[tuple[str, ...], str, str], ...]:
        """`grpc_restricted_protocol` as groups, name and value of the header."""
        return parse_restricted_protocols(self.grpc_restricted_protocol)

    @property
    def default_max_batch_size(self) -> int:
        """What auto-complete gives a model that can batch: `--backend-config=default-max-batch-size=N`."""
        return int(self.backend_settings.get("", {}).get("default-max-batch-size", 4))


def parse_pools(entries: tuple[str, ...]) -> dict[int, int]:
    """`("0:67108864",)` as bytes by GPU.

    Raises:
        SettingsError: an entry has another form.
    """
    found: dict[int, int] = {}
    for entry in entries:
        gpu, colon, size = entry.partition(":")
        if not colon or not gpu.isdecimal() or not size.isdecimal():
            raise SettingsError(f"cuda-memory-pool-byte-size: expected GPU:BYTES, got {entry!r}")
        found[int(gpu)] = int(size)
    return found


def parse_backend_config(entries: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """`("onnxruntime,threads=2", "default-max-batch-size=8")` by backend.

    Raises:
        SettingsError: an entry has no `=`, no key, or a default-max-batch-size that is not a number.
    """
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        head, equals, value = entry.partition("=")
        backend, comma, key = head.rpartition(",")
        if not equals or not key or (comma and not backend):
            raise SettingsError(f"backend-config: expected BACKEND,KEY=VALUE or KEY=VALUE, got {entry!r}")
        if not backend and key == "default-max-batch-size" and not value.isdecimal():
            raise SettingsError(f"backend-config: default-max-batch-size must be a number, got {value!r}")
        found.setdefault(backend, {})[key] = value
    return found


_HEADER_KEY = re.compile(r"[0-9a-z_.\-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?")


def parse_restricted_protocols(entries: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], str, str], ...]:
    """`("inference,health:key=value",)` as groups, name and value of the header.

    Raises:
        SettingsError: an entry has another form, an unknown group, or a group of another entry. The text has no value.
    """
    found: list[tuple[tuple[str, ...], str, str]] = []
    taken: set[str] = set()
    for entry in entries:
        head, colon, pair = entry.partition(":")
        key, equals, value = pair.partition("=")
        key = key.lower()
        if key.endswith("-bin"):
            raise SettingsError(f"grpc-restricted-protocol: key {key!r} must not end with -bin")
        if not (colon and equals and _HEADER_KEY.fullmatch(key) and _HEADER_VALUE.fullmatch(value)):
            raise SettingsError(
                f"grpc-restricted-protocol: expected GROUP,GROUP:KEY=VALUE, got {head!r} with another form of KEY=VALUE"
            )
        groups = tuple(head.split(","))
        for group in groups:
            if group not in RESTRICTABLE:
                raise SettingsError(
                    f"grpc-restricted-protocol: unknown group {group!r}, expected some of {', '.join(RESTRICTABLE)}"
                )
            if group in taken:
                raise SettingsError(f"grpc-restricted-protocol: group {group!r} can be restricted only once")
            taken.add(group)
        found.append((groups, f"triton-grpc-protocol-{key}", value))
    return tuple(found)
