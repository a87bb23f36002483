"""Parses the values of some options."""

from __future__ import annotations

import re

from inferd.server.addresses import RESTRICTABLE, SettingsError

_POOL = re.compile(r"([0-9]{1,4}):([0-9]{1,18})")
_FRACTION = re.compile(r"([0-9]{1,4}):(.+)")


def parse_pools(entries: tuple[str, ...]) -> dict[int, int]:
    """`("0:67108864",)` as bytes by GPU.

    Raises:
        SettingsError: an entry has another form.
    """
    found: dict[int, int] = {}
    for entry in entries:
        pool = _POOL.fullmatch(entry)
        if pool is None:
            raise SettingsError(f"cuda-memory-pool-byte-size: expected GPU:BYTES, got {entry!r}")
        found[int(pool[1])] = int(pool[2])
    return found


def parse_fractions(entries: tuple[str, ...]) -> dict[int, float]:
    """`("0:0.9",)` as fractions by GPU.

    Raises:
        SettingsError: an entry has another form, or a fraction is not from 0 to 1.
    """
    found: dict[int, float] = {}
    for entry in entries:
        limit = _FRACTION.fullmatch(entry)
        try:
            fraction = float(limit[2]) if limit is not None else -1.0
        except ValueError:
            fraction = -1.0
        if limit is None or not 0.0 <= fraction <= 1.0:
            raise SettingsError(f"model-load-gpu-limit: expected GPU:FRACTION with a fraction of 0 to 1, got {entry!r}")
        found[int(limit[1])] = fraction
    return found


METRICS = {"counter_latencies": True, "histogram_latencies": True}
"""The switches of --metrics-config, with their defaults."""

_NO_SUMMARIES = (
    "metrics-config: summaries are not served, because those of several servers cannot be combined; "
    "histogram_quantile() of the histograms gives any quantile"
)


def parse_metrics_config(entries: tuple[str, ...]) -> dict[str, bool]:
    """`("histogram_latencies=false",)` as switches, with the defaults of the others.

    Raises:
        SettingsError: an entry has another form, or names metrics that are not served.
    """
    found = dict(METRICS)
    for entry in entries:
        key, _, value = entry.partition("=")
        if key == "summary_quantiles" or (key == "summary_latencies" and value != "false"):
            raise SettingsError(_NO_SUMMARIES)
        if key == "summary_latencies":
            continue
        if key not in METRICS or value not in ("true", "false"):
            raise SettingsError(f"metrics-config: expected {' or '.join(METRICS)}, and =true or =false, got {entry!r}")
        found[key] = value == "true"
    return found


def parse_backend_config(entries: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """`("onnxruntime,threads=2", "default-max-batch-size=8")` by backend.

    Raises:
        SettingsError: an entry has no `=`, no key, or a default-max-batch-size that is no number of at most 9 digits.
    """
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        head, equals, value = entry.partition("=")
        backend, comma, key = head.rpartition(",")
        if not equals or not key or (comma and not backend):
            raise SettingsError(f"backend-config: expected BACKEND,KEY=VALUE or KEY=VALUE, got {entry!r}")
        if not backend and key == "default-max-batch-size" and not re.fullmatch("[0-9]{1,9}", value):
            raise SettingsError(f"backend-config: default-max-batch-size must be a number, got {value!r}")
        found.setdefault(backend, {})[key] = value
    return found


_HEADER_KEY = re.compile(r"[0-9a-z_.\-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,254}[\x21-\x7e])?")


def parse_restricted_protocols(entries: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], str, str], ...]:
    """`("inference,health:key=value",)` as groups, name and value of the header.

    Raises:
        SettingsError: an entry has another form, an unknown group, or a group of another entry. The text shows no
            value, because values are secrets.
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
                f"grpc-restricted-protocol: expected GROUP,GROUP:KEY=VALUE: behind {head!r} stands no valid KEY=VALUE"
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
