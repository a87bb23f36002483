"""The value of --trace-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from inferd.server.addresses import SettingsError

LEVELS: Final = ("OFF", "TIMESTAMPS", "TENSORS")
MODES: Final = ("triton", "opentelemetry")
MOST_RATE: Final = 2**32 - 1
MOST_COUNT: Final = 2**31 - 1

_BATCHING: Final = {
    "bsp_max_queue_size": 2048,
    "bsp_schedule_delay": 5000,
    "bsp_max_export_batch_size": 512,
}


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """The settings of traces.

    Attributes:
        levels: TIMESTAMPS, TENSORS; without any, nothing is traced.
        rate: trace one request in this number; 0: only requests whose clients have sampled their traces.
        count: how many requests are traced; -1: any number.
        slow_ms: if not 0, also trace all requests that fail or take longer than this.
        mode: the kind of output, one of MODES.
        file: path of the output of the mode triton.
        log_frequency: how many traces one file gets; 0: one file gets all.
        url: of the collector, for the mode opentelemetry.
        protocol: between the server and the collector: http or grpc.
        resource: attributes of the server in its traces.
        batching: settings of OpenTelemetry's span processor.
    """

    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    slow_ms: float = 0.0
    mode: str = "triton"
    file: str = ""
    log_frequency: int = 0
    url: str = "http://localhost:4318/v1/traces"
    protocol: str = "http"
    resource: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    batching: Mapping[str, int] = field(default_factory=lambda: MappingProxyType(_BATCHING))

    @property
    def on(self) -> bool:
        return bool(self.levels)


def parse_trace_config(entries: tuple[str, ...]) -> TraceConfig:
    """`("level=TIMESTAMPS", "rate=100", "opentelemetry,url=http://...")`.

    Raises:
        SettingsError: an entry is unknown, or has a value that is not served.
    """
    found = TraceConfig()
    levels: set[str] = set()
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals:
            raise SettingsError(f"trace-config: expected KEY=VALUE or MODE,KEY=VALUE, got {entry!r}")
        mode, comma, name = key.rpartition(",")
        if not comma and name == "level":
            levels.add(value.upper())
            continue
        found = replace(found, **_change(found, mode, name, value))
    return replace(found, levels=checked_levels(levels))


def checked_levels(levels: set[str]) -> tuple[str, ...]:
    """Levels in order, OFF left out.

    Raises:
        SettingsError: one is unknown, or OFF comes with others.
    """
    for level in levels:
        if level not in LEVELS:
            raise SettingsError(f"trace-config: unknown trace level '{level}', expected some of {', '.join(LEVELS)}")
    if "OFF" in levels and len(levels) > 1:
        raise SettingsError("trace-config: Expect only one trace level 'OFF' is specified")
    return tuple(level for level in LEVELS[1:] if level in levels)


def _change(found: TraceConfig, mode: str, name: str, value: str) -> dict[str, Any]:
    match mode, name:
        case "", "rate":
            return {"rate": _number("rate", value, 0, MOST_RATE)}
        case "", "count":
            return {"count": _number("count", value, -1, MOST_COUNT)}
        case "", "mode" if value in MODES:
            return {"mode": value}
        case "", "slow-ms":
            return {"slow_ms": float(_number("slow-ms", value, 0, MOST_COUNT))}
        case "triton", "file":
            return {"file": value}
        case "triton", "log-frequency":
            return {"log_frequency": _number("triton,log-frequency", value, 0, MOST_RATE)}
        case "opentelemetry", "url":
            return {"url": value}
        case "opentelemetry", "protocol" if value in ("http", "grpc"):
            return {"protocol": value}
        case "opentelemetry", "resource":
            attribute, equals, text = value.partition("=")
            if equals and attribute:
                return {"resource": MappingProxyType({**found.resource, attribute: text})}
        case "opentelemetry", _ if name in _BATCHING:
            number = _number(f"opentelemetry,{name}", value, 1, MOST_COUNT)
            return {"batching": MappingProxyType({**found.batching, name: number})}
    shown = f"{mode},{name}" if mode else name
    raise SettingsError(f"trace-config: {shown}={value} is not served; see docs/observability.md for what is")


def _number(name: str, value: str, least: int, most: int) -> int:
    try:
        number = int(value)
    except ValueError:
        raise SettingsError(f"trace-config: {name}: expected a number, got {value!r}") from None
    if not least <= number <= most:
        raise SettingsError(f"trace-config: {name}: expected {least} to {most}, got {number}")
    return number
