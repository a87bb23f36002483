"""Which values of the options are allowed, and which go together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.addresses import Rules, SettingsError
from server.caching import CacheConfigError, RedisCache, parse_cache_config
from server.settings.tracing import parse_trace_config
from server.settings.values import (
    parse_backend_config,
    parse_fractions,
    parse_metrics_config,
    parse_pools,
    parse_restricted_protocols,
)

if TYPE_CHECKING:
    from server.settings.options import Settings

MOST_REGIONS = 4096  # that can be guarded against clients that shorten them

LEAST_HELD = 1 << 20
"""Bytes for requests and answers, below which hardly any is served."""

AT_LEAST_0 = (
    "grpc_max_message_size",
    "grpc_max_decompressed_size",
    "max_held_bytes",
    "grpc_max_bytes_per_client",
    "model_load_retry_count",
    "model_memory_budget",
    "max_inflight_requests",
    "max_queued_requests_per_model",
    "client_shm_max_regions",
    "client_shm_max_byte_size",
    "client_shm_max_regions_per_user",
    "client_shm_max_byte_size_per_user",
    "pinned_memory_pool_byte_size",
    "drain_delay",
    "metrics_interval_ms",
    "access_log",
    "slow_request_ms",
    "exit_timeout_secs",
    "log_verbose",
)
INT32_FROM_0 = (
    "grpc_http2_max_pings_without_data",
    "grpc_http2_min_recv_ping_interval_without_data",
    "grpc_http2_max_ping_strikes",
    "grpc_max_connection_age",
    "grpc_max_connection_age_grace",
    "grpc_max_connections",
    "grpc_receive_timeout",
    "grpc_send_timeout",
    "grpc_max_connections_per_client",
    "grpc_max_calls_per_client",
    "grpc_max_streams_per_client",
)
INT32_FROM_1 = (
    "grpc_keepalive_time",
    "grpc_keepalive_timeout",
    "grpc_handshake_timeout",
    "grpc_max_concurrent_streams",
)
NATIVE_ONLY = (
    "grpc_max_connections",
    "max_held_bytes",
    "grpc_receive_timeout",
    "grpc_send_timeout",
    "grpc_max_connections_per_client",
    "grpc_max_calls_per_client",
    "grpc_max_streams_per_client",
    "grpc_max_bytes_per_client",
)
"""Options that gRPC's C core has nothing for."""


def check(settings: Settings) -> None:
    """Look at every value.

    Raises:
        SettingsError: some are out of their ranges, or do not go with others; a line for each.
    """
    wrong: list[str] = []
    failed: set[Callable[[Settings], None]] = set()
    for rule in RULES:
        if rule in OF_ADDRESSES and _check_addresses in failed:
            continue
        try:
            rule(settings)
        except SettingsError as error:
            failed.add(rule)
            wrong.append(str(error))
    if wrong:
        raise SettingsError("\n".join(wrong))


def _check_values(settings: Settings) -> None:
    parse_backend_config(settings.backend_config)
    parse_pools(settings.cuda_memory_pool_byte_size)
    parse_fractions(settings.model_load_gpu_limit)
    parse_restricted_protocols(settings.grpc_restricted_protocol)
    _check_metrics(settings)
    _check_traces(settings)
    try:
        cache = parse_cache_config(settings.cache_config)
    except CacheConfigError as error:
        raise SettingsError(f"cache-config: {error}") from error
    if settings.cache_per_caller and isinstance(cache, RedisCache):
        raise SettingsError("cache-per-caller: it needs the local cache: other servers do not know who calls here")


def _check_repository(settings: Settings) -> None:
    if not settings.model_repository:
        raise SettingsError("model-repository: give at least one folder")
    if not all(map(str.strip, map(str, settings.model_repository))):
        raise SettingsError("model-repository: expected a path or a URL, got an empty text: is a variable not set?")
    name = settings.model_config_name
    if set(name) & set(" /\\") or name in {".", ".."}:
        raise SettingsError(f"model-config-name: expected a name without folder, got {name!r}")
    if settings.load_model and settings.model_control_mode not in ("explicit", "lazy"):
        raise SettingsError("load-model: it needs --model-control-mode explicit or lazy; else every model is loaded")
    if settings.model_memory_budget and settings.model_control_mode != "lazy":
        raise SettingsError("model-memory-budget: it needs --model-control-mode lazy")
    if "*" in settings.load_model and len(settings.load_model) > 1:
        raise SettingsError("load-model: Wildcard model name '*' must be the ONLY startup model if specified at all.")
    least = 1 if settings.model_control_mode == "poll" else 0
    if settings.repository_poll_secs < least:
        raise SettingsError(f"repository-poll-secs: expected {least} or more, got {settings.repository_poll_secs}")
    if settings.model_load_thread_count < 1:
        raise SettingsError(f"model-load-thread-count: expected 1 or more, got {settings.model_load_thread_count}")


def _check_numbers(settings: Settings) -> None:
    for name in AT_LEAST_0:
        if getattr(settings, name) < 0:
            raise SettingsError(f"{_option(name)}: expected 0 or more, got {getattr(settings, name)}")
    if 0 < settings.max_held_bytes < LEAST_HELD:
        raise SettingsError(
            f"max-held-bytes: expected {LEAST_HELD} or more, or 0 for a share of the memory, got "
            f"{settings.max_held_bytes}: larger requests and answers could not be served"
        )
    for least, names in enumerate((INT32_FROM_0, INT32_FROM_1)):
        for name in names:
            if not least <= getattr(settings, name) < 2**31:
                raise SettingsError(f"{_option(name)}: expected {least} to 2147483647, got {getattr(settings, name)}")


def _check_addresses(settings: Settings) -> None:
    if not 0 <= settings.grpc_port <= 65535:
        raise SettingsError(f"grpc-port: expected 0 to 65535, got {settings.grpc_port}")
    if not settings.grpc_address:
        raise SettingsError("grpc-address: give at least one")
    if len(set(settings.addresses)) < len(settings.addresses) and settings.grpc_port:
        raise SettingsError(f"grpc-address: given twice: {', '.join(map(str, settings.addresses))}")


def _check_metrics(settings: Settings) -> None:
    parse_metrics_config(settings.metrics_config)
    if not 0 <= settings.metrics_port <= 65535:
        raise SettingsError(f"metrics-port: expected 0 to 65535, got {settings.metrics_port}")
    if settings.allow_metrics and settings.metrics_port and settings.metrics_bind in settings.addresses:
        raise SettingsError(f"metrics-port: gRPC is served at {settings.metrics_bind}")


def _check_traces(settings: Settings) -> None:
    config = parse_trace_config(settings.trace_config)
    if config.on and config.mode == "triton" and not config.file:
        raise SettingsError("trace-config: write triton,file=PATH, where traces go, or mode=opentelemetry")


def _check_unix_mode(settings: Settings) -> None:
    try:
        valid = 0 < settings.unix_mode <= 0o777
    except ValueError:
        valid = False
    if not valid:
        raise SettingsError(f"grpc-unix-mode: expected an octal mode such as 0660, got {settings.grpc_unix_mode!r}")


def _check_tls(settings: Settings) -> None:
    given = {
        "grpc-server-cert": settings.grpc_server_cert,
        "grpc-server-key": settings.grpc_server_key,
        "grpc-root-cert": settings.grpc_root_cert,
    }
    encrypted = settings.grpc_use_ssl or any(bind.rules.tls for bind in settings.binds)
    needed = list(given)[: 3 if settings.grpc_use_ssl_mutual else 2 if encrypted else 0]
    switch = "--grpc-use-ssl-mutual" if settings.grpc_use_ssl_mutual else "--grpc-use-ssl"
    if not settings.grpc_use_ssl and not settings.grpc_use_ssl_mutual:
        switch = "tls=on of --grpc-address"
    for name, path in given.items():
        if name in needed and path is None:
            raise SettingsError(f"{name}: {switch} needs it")
        if name not in needed and path is not None:
            switch = "--grpc-use-ssl-mutual" if name == "grpc-root-cert" else "--grpc-use-ssl"
            raise SettingsError(f"{name}: it is of no use without {switch}")


def _check_grpcio(settings: Settings) -> None:
    """What only the native door has must not be asked of the other."""
    if settings.transport != "grpcio":
        return
    for bind in settings.binds:
        known = dataclasses.replace(bind.rules, tls=None, mode=None, owner=None)
        if known != Rules():
            raise SettingsError(
                f"grpc-address: {bind.address}: gRPC's C core has only tls, mode and owner for one address, "
                f"got {str(known)[1:]}; use --transport native"
            )
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in NATIVE_ONLY:
        if getattr(settings, name) != defaults[name]:
            raise SettingsError(f"{_option(name)}: gRPC's C core has no such limit; use --transport native")
    if settings.grpc_max_decompressed_size != defaults["grpc_max_decompressed_size"]:
        raise SettingsError(
            "grpc-max-decompressed-size: gRPC's C core has one limit for messages before and after decompression: "
            "with --transport=grpcio set --grpc-max-message-size"
        )


def _check_shared_memory(settings: Settings) -> None:
    if settings.client_shm_max_regions > MOST_REGIONS:
        raise SettingsError(
            f"client-shm-max-regions: expected at most {MOST_REGIONS}, got {settings.client_shm_max_regions}"
        )
    for prefix in settings.client_shm_prefix:
        if not prefix or "/" in prefix:
            raise SettingsError(f"client-shm-prefix: expected the beginning of a name, got {prefix!r}")


def _check_header_pattern(settings: Settings) -> None:
    try:
        re.compile(settings.grpc_header_forward_pattern)
    except re.error as error:
        raise SettingsError(f"grpc-header-forward-pattern: not a regular expression: {error}") from None


RULES: tuple[Callable[[Settings], None], ...] = (
    _check_repository,
    _check_numbers,
    _check_addresses,
    _check_unix_mode,
    _check_tls,
    _check_grpcio,
    _check_shared_memory,
    _check_header_pattern,
    _check_values,
)


OF_ADDRESSES = (_check_tls, _check_grpcio)
"""Rules that need addresses which can be understood."""


def _option(name: str) -> str:
    return name.replace("_", "-")
