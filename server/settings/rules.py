"""The allowed values of the options, and combinations of them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable

from inferd.server.addresses import Address, Rules, SettingsError, TcpAddress
from inferd.server.caching import CacheConfigError, RedisCache, parse_cache_config
from inferd.server.settings.options import Options
from inferd.server.settings.tracing import parse_trace_config
from inferd.server.settings.values import (
    parse_backend_config,
    parse_fractions,
    parse_metrics_config,
    parse_pools,
    parse_restricted_protocols,
)

MOST_REGIONS = 4096  # the server can guard this many regions against clients that shorten them

LEAST_HELD = 1 << 20
"""The least --max-held-bytes: with fewer bytes, hardly any request could be served."""

MOST_BYTES = 1 << 62
MOST_COUNT = (1 << 31) - 1

BYTES = (
    "grpc_max_message_size",
    "grpc_max_decompressed_size",
    "max_held_bytes",
    "grpc_max_bytes_per_client",
    "model_memory_budget",
    "client_shm_max_byte_size",
    "client_shm_max_byte_size_per_user",
    "pinned_memory_pool_byte_size",
)
"""Options from 0 to MOST_BYTES."""
FROM_0 = (
    "model_load_retry_count",
    "repository_poll_secs",
    "max_inflight_requests",
    "max_queued_requests_per_model",
    "client_shm_max_regions_per_user",
    "drain_delay",
    "metrics_interval_ms",
    "access_log",
    "slow_request_ms",
    "exit_timeout_secs",
    "log_verbose",
    "grpc_http2_max_pings_without_data",
    "grpc_http2_min_recv_ping_interval_without_data",
    "grpc_http2_max_ping_strikes",
    "grpc_max_connection_age",
    "grpc_max_connection_age_grace",
    "grpc_max_connections",
    "io_threads",
    "io_busy_poll_us",
    "grpc_receive_timeout",
    "grpc_send_timeout",
    "grpc_max_connections_per_client",
    "grpc_max_calls_per_client",
    "grpc_max_streams_per_client",
)
"""Options from 0 to MOST_COUNT."""
FROM_1 = (
    "model_load_thread_count",
    "grpc_keepalive_time",
    "grpc_keepalive_timeout",
    "grpc_handshake_timeout",
    "grpc_max_concurrent_streams",
)
"""Options from 1 to MOST_COUNT."""
NATIVE_ONLY = (
    "io_threads",
    "io_busy_poll_us",
    "grpc_max_connections",
    "max_held_bytes",
    "grpc_receive_timeout",
    "grpc_send_timeout",
    "grpc_max_connections_per_client",
    "grpc_max_calls_per_client",
    "grpc_max_streams_per_client",
    "grpc_max_bytes_per_client",
)
"""Options without a counterpart in gRPC's C core."""


def check(options: Options) -> None:
    """Check every value.

    Raises:
        SettingsError: values are out of their ranges or contradict each other; the text has a line for each rule that
            is broken.
    """
    wrong: list[str] = []
    failed: set[Callable[[Options], None]] = set()
    for rule in RULES:
        if rule in OF_ADDRESSES and _check_addresses in failed:
            continue
        try:
            rule(options)
        except SettingsError as error:
            failed.add(rule)
            wrong.append(str(error))
    if wrong:
        raise SettingsError("\n".join(wrong))


def _check_values(options: Options) -> None:
    parse_backend_config(options.backend_config)
    parse_pools(options.cuda_memory_pool_byte_size)
    parse_fractions(options.model_load_gpu_limit)
    parse_restricted_protocols(options.grpc_restricted_protocol)
    _check_metrics(options)
    _check_traces(options)
    try:
        cache = parse_cache_config(options.cache_config)
    except CacheConfigError as error:
        raise SettingsError(f"cache-config: {error}") from error
    if options.cache_per_caller and isinstance(cache, RedisCache):
        raise SettingsError("cache-per-caller: it needs the local cache: other servers do not know the callers")


def _check_repository(options: Options) -> None:
    if not options.model_repository:
        raise SettingsError("model-repository: give at least one folder")
    if not all(map(str.strip, map(str, options.model_repository))):
        raise SettingsError("model-repository: expected a path or a URL, got an empty text: is a variable not set?")
    name = options.model_config_name
    if set(name) & set(" /\\") or name in {".", ".."}:
        raise SettingsError(f"model-config-name: expected a name without folder, got {name!r}")
    if options.load_model and options.model_control_mode not in ("explicit", "lazy"):
        raise SettingsError("load-model: it needs --model-control-mode explicit or lazy; else every model is loaded")
    if options.model_memory_budget and options.model_control_mode != "lazy":
        raise SettingsError("model-memory-budget: it needs --model-control-mode lazy")
    if "*" in options.load_model and len(options.load_model) > 1:
        raise SettingsError("load-model: Wildcard model name '*' must be the ONLY startup model if specified at all.")
    if options.model_control_mode == "poll" and options.repository_poll_secs == 0:
        raise SettingsError("repository-poll-secs: expected 1 or more with --model-control-mode poll, got 0")


def _check_numbers(options: Options) -> None:
    ranges: tuple[tuple[tuple[str, ...], int, int], ...] = (
        (BYTES, 0, MOST_BYTES),
        (FROM_0, 0, MOST_COUNT),
        (FROM_1, 1, MOST_COUNT),
        (("client_shm_max_regions",), 0, MOST_REGIONS),
    )
    for names, least, most in ranges:
        for name in names:
            if not least <= (value := getattr(options, name)) <= most:
                raise SettingsError(f"{_option(name)}: expected {least} to {most}, got {value}")
    if 0 < options.max_held_bytes < LEAST_HELD:
        raise SettingsError(
            f"max-held-bytes: expected {LEAST_HELD} or more, or 0 for a share of the memory, got "
            f"{options.max_held_bytes}: larger requests and responses could not be served"
        )


def _check_addresses(options: Options) -> None:
    if not 0 <= options.grpc_port <= 65535:
        raise SettingsError(f"grpc-port: expected 0 to 65535, got {options.grpc_port}")
    if not options.grpc_address:
        raise SettingsError("grpc-address: give at least one")
    repeated = [address for address, count in Counter(options.addresses).items() if count > 1 and not _is_any(address)]
    if repeated:
        raise SettingsError(f"grpc-address: given twice: {', '.join(map(str, repeated))}")


def _is_any(address: Address) -> bool:
    """Whether the system chooses the port: two such addresses differ."""
    return isinstance(address, TcpAddress) and address.port == 0


def _check_metrics(options: Options) -> None:
    parse_metrics_config(options.metrics_config)
    if not 0 <= options.metrics_port <= 65535:
        raise SettingsError(f"metrics-port: expected 0 to 65535, got {options.metrics_port}")


def _check_apart(options: Options) -> None:
    """Check that metrics have an address of their own."""
    address = options.metrics_bind
    if options.allow_metrics and address in options.addresses and not _is_any(address):
        raise SettingsError(f"metrics-address: gRPC is served at {address}: choose another address or port")


def _check_traces(options: Options) -> None:
    config = parse_trace_config(options.trace_config)
    if config.on and config.mode == "triton" and not config.file:
        raise SettingsError("trace-config: write triton,file=PATH, where traces go, or mode=opentelemetry")


def _check_unix_mode(options: Options) -> None:
    try:
        valid = 0 < options.unix_mode <= 0o777
    except ValueError:
        valid = False
    if not valid:
        raise SettingsError(f"grpc-unix-mode: expected an octal mode such as 0660, got {options.grpc_unix_mode!r}")


def _check_tls(options: Options) -> None:
    given = {
        "grpc-server-cert": options.grpc_server_cert,
        "grpc-server-key": options.grpc_server_key,
        "grpc-root-cert": options.grpc_root_cert,
    }
    encrypted = options.grpc_use_ssl or any(bind.rules.tls for bind in options.binds)
    needed = list(given)[: 3 if options.grpc_use_ssl_mutual else 2 if encrypted else 0]
    switch = "--grpc-use-ssl-mutual" if options.grpc_use_ssl_mutual else "--grpc-use-ssl"
    if not options.grpc_use_ssl and not options.grpc_use_ssl_mutual:
        switch = "tls=on of --grpc-address"
    for name, path in given.items():
        if name in needed and path is None:
            raise SettingsError(f"{name}: {switch} needs it")
        if name not in needed and path is not None:
            switch = "--grpc-use-ssl-mutual" if name == "grpc-root-cert" else "--grpc-use-ssl"
            raise SettingsError(f"{name}: it has no effect without {switch}")


def _check_grpcio(options: Options) -> None:
    """Check that no option of the native door is set for grpcio."""
    if options.transport != "grpcio":
        return
    for bind in options.binds:
        native = dataclasses.replace(bind.rules, tls=None, mode=None, owner=None)
        if native != Rules():
            raise SettingsError(
                f"grpc-address: {bind.address}: gRPC's C core has only tls, mode and owner for one address, "
                f"got {str(native)[1:]}; use --transport native"
            )
    if options.grpc_max_message_size > MOST_COUNT:
        raise SettingsError(
            f"grpc-max-message-size: gRPC's C core has limits up to {MOST_COUNT}, or 0 for none, got "
            f"{options.grpc_max_message_size}"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in NATIVE_ONLY:
        if getattr(options, name) != defaults[name]:
            raise SettingsError(f"{_option(name)}: gRPC's C core has no such option; use --transport native")
    if options.grpc_max_decompressed_size != defaults["grpc_max_decompressed_size"]:
        raise SettingsError(
            "grpc-max-decompressed-size: gRPC's C core has one limit for messages before and after decompression: "
            "with --transport=grpcio set --grpc-max-message-size"
        )


def _check_shared_memory(options: Options) -> None:
    for prefix in options.client_shm_prefix:
        if not prefix or "/" in prefix:
            raise SettingsError(f"client-shm-prefix: expected the beginning of a name, got {prefix!r}")


def _check_header_pattern(options: Options) -> None:
    try:
        re.compile(options.grpc_header_forward_pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingsError(f"grpc-header-forward-pattern: not a regular expression: {error}") from None


RULES: tuple[Callable[[Options], None], ...] = (
    _check_repository,
    _check_numbers,
    _check_addresses,
    _check_apart,
    _check_unix_mode,
    _check_tls,
    _check_grpcio,
    _check_shared_memory,
    _check_header_pattern,
    _check_values,
)


OF_ADDRESSES = (_check_apart, _check_tls, _check_grpcio)
"""Rules that need valid addresses."""


def _option(name: str) -> str:
    return name.replace("_", "-")
