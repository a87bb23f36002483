"""Guards the default of every option: the code, the page, and a server that was started without it have the same."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from inferd._native.cuda import driver
from inferd.backends.triton_api.backend import ALWAYS_SAID
from inferd.server.commands.asking import top
from inferd.server.commands.connecting import Server
from inferd.server.commands.own import own_server
from inferd.server.composition import door, engine, observing
from inferd.server.engine.instances import gpu
from inferd.server.program import program
from inferd.server.settings import DEFAULTS, Settings, written
from inferd.server.tools.reach import Reach
from tests.test_derived_defaults import DERIVED

DOCS = Path(__file__).resolve().parents[1] / "docs"
ROW = re.compile(r"^\| `(?:--)?([\w.-]+)` \| (?:`([^`]*)`)? ?\| ", re.MULTILINE)
ROW_OF_TRACES = r"^\| `([\w,-]+)`[^|]*\| *`?([^|`]*?)`? *\|"

SETTINGS_ONLY = {
    *("id", "exit_on_error", "exit_timeout_secs", "drain_delay", "orca_load_metrics"),
    *("log_verbose", "log_info", "log_warning", "log_error", "log_format", "log_file"),
    *("access_log", "slow_request_ms", "trace_config", "load_model", "grpc_use_ssl_mutual"),
}
"""Options of which the server keeps nothing beside its settings, or nothing that has a value without them."""

CALLABLES = {
    door: ("NativeDoor", "ConnectionPolicy", "ClientLimits", "ListenPolicy", "Access"),
    engine: (
        *("Engine", "SharedMemoryPolicy", "ModelControl", "GpuPolicy", "Options", "Variables"),
        *("BackendLoader", "Hardware", "Resources", "open_sources", "parse_host_policies"),
    ),
    observing: ("Page", "Machine", "GpuMetrics", "ScrapeListener"),
}
"""The parts that the composition makes of the settings."""

OTHERS = {
    ("Options", "variables"): "none, as for configurations that clients send",
    ("ListenPolicy", "encrypted"): "says how credentials are used, of which a server without options has none",
}
"""Defaults of parts that are no option's."""

NEUTRAL = (None, False, 0, math.inf, "", (), {})
"""No limit, off, or nothing."""


FACTORY = inspect.signature(dataclasses.make_dataclass("X", [("x", dict, dataclasses.field(default_factory=dict))]))
FACTORY = FACTORY.parameters["x"].default
"""Stands in signatures for a default that a factory makes: an empty mapping, or an object."""


class Call(NamedTuple):
    """The making of a part: its signature, and what it was made with."""

    signature: inspect.Signature
    given: dict[str, object]


class Composed(NamedTuple):
    """A server that is made, not started: its settings, and by its name each part."""

    settings: Settings
    calls: dict[str, Call]
    listen: object

    def __getattr__(self, name):
        return SimpleNamespace(**self.calls[name].given)


class Infer:
    """Takes the place of the inference service of an engine."""

    def set_callers_apart(self, **apart):
        self.apart = apart


@pytest.fixture
def composed(monkeypatch, tmp_path) -> Composed:
    """What is made for `inferd serve FOLDER`, on a machine with 4 cores; the last parts only note what they get."""
    for variable in [each for each in os.environ if each.startswith("INFERD_")]:
        monkeypatch.delenv(variable)
    calls: dict[str, Call] = {}

    def recorded(name, part, stand_in):
        def make(*arguments, **named):
            bound = inspect.signature(part).bind(*arguments, **named)
            bound.apply_defaults()
            calls[name] = Call(inspect.signature(part), dict(bound.arguments))
            return stand_in() if stand_in else part(*arguments, **named)

        return make

    class Listener:
        async def start(self, address):
            calls["Scrape"] = Call(inspect.Signature(), {"address": address})

    service = Infer()
    stand_ins = {
        "Engine": lambda: SimpleNamespace(infer=service),
        "NativeDoor": lambda: None,
        "Page": lambda: None,
        "Machine": lambda: "machine",
        "GpuMetrics": lambda: "gpus",
        "ScrapeListener": Listener,
    }
    for module, names in CALLABLES.items():
        for name in names:
            monkeypatch.setattr(module, name, recorded(name, getattr(module, name), stand_ins.get(name)))
    monkeypatch.setattr(door, "cores", lambda: 4)
    _, bound, _ = program().parse_args(["serve", f"--model-repository={tmp_path}"], exit_on_error=False)
    settings = bound.arguments["settings"]
    listen = door.listen_policy(settings)
    made = engine.make_engine(settings)
    access = door.make_access(settings, made)
    door.make_door(settings, made, listen, access, native_infer=True)
    calls["Forwarder"] = Call(inspect.Signature(), {"forwarder": door.make_forwarder(settings, made)})
    calls["Apart"] = Call(inspect.Signature(), service.apart)
    asyncio.run(observing.serve_metrics(settings, SimpleNamespace(), None))
    return Composed(settings, calls, listen)


def milliseconds(seconds: float) -> int:
    return 0 if math.isinf(seconds) else round(1000 * seconds)


def count(limit: int | None) -> int:
    return limit or 0


def reflection(server: Composed) -> str:
    there = dataclasses.replace(server.settings, grpc_address=("127.0.0.1", "0.0.0.0:1"))
    at = [bind.rules.reflection for bind in door.binds_of(there)]
    return {(True, False): "auto", (True, True): "on", (False, False): "off"}[tuple(at)]


def pools(server: Composed) -> tuple[str, ...]:
    return tuple(f"{ordinal}:{size}" for ordinal, size in server.GpuPolicy.pool_sizes.items())


OBSERVED = {
    "model_name": lambda s: s.open_sources.name,
    "strict_readiness": lambda s: s.Engine.strict_readiness,
    "disable_auto_complete_config": lambda s: not s.Options.auto_complete,
    "model_config_name": lambda s: s.Options.config_name,
    "config_variable": lambda s: s.Variables.allowed,
    "model_control_mode": lambda s: s.ModelControl.mode.value,
    "model_memory_budget": lambda s: count(s.ModelControl.budget),
    "repository_poll_secs": lambda s: s.ModelControl.poll_seconds,
    "model_load_thread_count": lambda s: s.Engine.load_threads,
    "model_load_retry_count": lambda s: s.Engine.load_retries,
    "model_load_gpu_limit": lambda s: tuple(s.GpuPolicy.load_limits),
    "backend_directory": lambda s: s.BackendLoader.directory,
    "backend_config": lambda s: tuple(s.BackendLoader.configs),
    "rate_limit": lambda s: "off" if s.Hardware.resources is None else "execution_count",
    "rate_limit_resource": lambda s: s.settings.rate_limit_resource,
    "host_policy": lambda s: s.parse_host_policies.entries,
    "transport": lambda s: "native" if "NativeDoor" in s.calls else "grpcio",
    "grpc_address": lambda s: tuple(bind.address.host for bind in door.binds_of(s.settings)),
    "grpc_port": lambda s: door.binds_of(s.settings)[0].address.port,
    "reuse_grpc_port": lambda s: s.listen.reuse_port,
    "grpc_unix_mode": lambda s: f"{s.listen.unix_mode:04o}",
    "grpc_unix_owner": lambda s: s.listen.unix_owner,
    "grpc_use_ssl": lambda s: s.listen.encrypted,
    **dict.fromkeys(("grpc_server_cert", "grpc_server_key", "grpc_root_cert"), lambda s: s.listen.credentials),
    "grpc_restricted_protocol": lambda s: s.Access.restrictions,
    "grpc_token_file": lambda s: s.Access.token_file,
    "model_load_overrides": lambda s: s.Access.overrides,
    "sequence_sharing": lambda s: not s.Apart.sequences,
    "cache_per_caller": lambda s: s.Apart.responses,
    "grpc_reflection": reflection,
    "grpc_max_message_size": lambda s: count(s.NativeDoor.max_message_bytes),
    "grpc_max_decompressed_size": lambda s: count(s.NativeDoor.max_decompressed_bytes),
    "grpc_infer_response_compression_level": lambda s: s.NativeDoor.compression_level,
    "grpc_header_forward_pattern": lambda s: s.Forwarder.forwarder,
    "max_inflight_requests": lambda s: count(s.Engine.max_inflight),
    "max_queued_requests_per_model": lambda s: s.Engine.max_queued,
    "cache_config": lambda s: s.Engine.cache,
    "allow_client_shm": lambda s: s.SharedMemoryPolicy.shared,
    "client_shm_access": lambda s: s.SharedMemoryPolicy.access,
    "client_shm_prefix": lambda s: s.SharedMemoryPolicy.prefixes,
    "client_shm_max_regions": lambda s: s.SharedMemoryPolicy.max_regions,
    "client_shm_max_byte_size": lambda s: s.SharedMemoryPolicy.max_byte_size,
    "client_shm_max_regions_per_user": lambda s: count(s.SharedMemoryPolicy.user_regions),
    "client_shm_max_byte_size_per_user": lambda s: count(s.SharedMemoryPolicy.user_byte_size),
    "cuda_driver": lambda s: s.GpuPolicy.library,
    "pinned_memory_pool_byte_size": lambda s: s.GpuPolicy.pinned_size,
    "cuda_memory_pool_byte_size": pools,
    "grpc_keepalive_time": lambda s: milliseconds(s.ConnectionPolicy.keepalive_time),
    "grpc_keepalive_timeout": lambda s: milliseconds(s.ConnectionPolicy.keepalive_timeout),
    "grpc_keepalive_permit_without_calls": lambda s: s.ConnectionPolicy.permit_without_calls,
    "grpc_http2_max_pings_without_data": lambda s: count(s.ConnectionPolicy.max_pings_without_data),
    "grpc_http2_min_recv_ping_interval_without_data": lambda s: milliseconds(s.ConnectionPolicy.min_ping_interval),
    "grpc_http2_max_ping_strikes": lambda s: count(s.ConnectionPolicy.max_ping_strikes),
    "grpc_max_connection_age": lambda s: milliseconds(s.ConnectionPolicy.max_age),
    "grpc_max_connection_age_grace": lambda s: milliseconds(s.ConnectionPolicy.age_grace),
    "grpc_handshake_timeout": lambda s: milliseconds(s.ConnectionPolicy.handshake_timeout),
    "grpc_max_connections": lambda s: count(s.NativeDoor.max_connections),
    "grpc_max_concurrent_streams": lambda s: s.ConnectionPolicy.max_streams,
    "io_busy_poll_us": lambda s: round(1e6 * s.NativeDoor.io_busy_poll),
    "grpc_receive_timeout": lambda s: milliseconds(s.NativeDoor.receive_timeout),
    "grpc_send_timeout": lambda s: milliseconds(s.NativeDoor.send_timeout),
    "grpc_max_connections_per_client": lambda s: count(s.ClientLimits.connections),
    "grpc_max_calls_per_client": lambda s: count(s.ClientLimits.calls),
    "grpc_max_streams_per_client": lambda s: count(s.ClientLimits.streams),
    "grpc_max_bytes_per_client": lambda s: count(s.ClientLimits.bytes_in_flight),
    "allow_metrics": lambda s: "ScrapeListener" in s.calls,
    "allow_gpu_metrics": lambda s: s.Page.gpus == "gpus",
    "allow_cpu_metrics": lambda s: s.Page.machine == "machine",
    "metrics_address": lambda s: s.Scrape.address.host,
    "metrics_port": lambda s: s.Scrape.address.port,
    "metrics_interval_ms": lambda s: milliseconds(s.Machine.interval),
    "metrics_config": lambda s: tuple(each for each in observing.chosen({}) if each not in s.Page.families),
}
"""What a server has of each option, as the option has it."""


def options_of_the_page() -> dict[str, str]:
    """The default of each option, as the page has it."""
    page = (DOCS / "configuration.md").read_text()
    table = page[page.index("<!-- begin options") : page.index("<!-- end options")]
    return {name.replace("-", "_"): default for name, default in ROW.findall(table)}


def test_every_option_has_the_default_of_its_page(composed):
    """The code's default, the page's, and the value that a server has which was started without the option."""
    page = options_of_the_page()
    names = [field.name for field in dataclasses.fields(Settings)]
    assert list(page) == names
    derived = {option.replace("-", "_") for option, _ in DERIVED.findall((DOCS / "configuration.md").read_text())}
    unseen = {*SETTINGS_ONLY, "model_repository", "io_threads", "max_held_bytes"}
    assert sorted(unseen | OBSERVED.keys()) == sorted(names)
    assert {"io_threads", "max_held_bytes"} < derived  # tests/test_derived_defaults.py has these
    for field in dataclasses.fields(Settings):
        assert written(field.default) == page[field.name], field.name
        if field.name != "model_repository":
            assert written(getattr(composed.settings, field.name)) == page[field.name], f"--{field.name} as read"
    for name, look in OBSERVED.items():
        assert written(look(composed)) == page[name], f"--{name.replace('_', '-')} as the server has it"


def test_no_part_of_the_server_has_a_default_of_its_own(composed):
    """A part that is made without a value has the option's default, or no limit: nothing else is written down twice."""
    made = {name for names in CALLABLES.values() for name in names}
    assert made - composed.calls.keys() == {"Resources"}  # with --rate-limit only
    own = []
    for name, call in composed.calls.items():
        for parameter in call.signature.parameters.values():
            default, given = parameter.default, call.given.get(parameter.name)
            if default in (parameter.empty, FACTORY) or (name, parameter.name) in OTHERS or default == given:
                continue
            if not any(default == each and type(default) is type(each) for each in NEUTRAL):
                own.append(f"{name}.{parameter.name}: {default!r}, and a server has {given!r}")
    assert not own


def test_what_lies_apart_from_the_options_agrees_with_them():
    """Clients do not import the server, native code no Python, and backends no options: their defaults are copies."""
    assert Server().url == Reach().url == own_server({}).url == f"{DEFAULTS.grpc_address[0]}:{DEFAULTS.grpc_port}"
    assert inspect.signature(top).parameters["url"].default == f"http://localhost:{DEFAULTS.metrics_port}/metrics"
    assert DEFAULTS.cuda_driver == driver.DEFAULT_LIBRARY
    assert ALWAYS_SAID["default-max-batch-size"] == f"{DEFAULTS.default_max_batch_size}"


def test_tables_of_other_pages_repeat_the_defaults():
    page = options_of_the_page()
    rows = re.findall(r"^\| `--([\w-]+)` \| ([\w.]+) \| ", (DOCS / "gpu.md").read_text(), re.MULTILINE)
    assert rows
    for option, default in rows:
        assert default == page[option.replace("-", "_")], option


def test_trace_settings_have_the_defaults_of_their_page():
    page = (DOCS / "observability.md").read_text()
    table = page[page.index("| `--trace-config` | default |") :]
    rows = dict(re.findall(ROW_OF_TRACES, table[: table.index("\n\n")], re.MULTILINE)[1:])
    config = DEFAULTS.tracing
    batching = ", ".join(map(str, config.batching.values()))
    assert rows == {
        "level": "OFF" if not config.levels else "on",
        "rate": f"{config.rate}",
        "count": f"{config.count}",
        "slow-ms": f"{config.slow_ms:g}",
        "mode": config.mode,
        "triton,file": config.file,
        "triton,log-frequency": f"{config.log_frequency}",
        "opentelemetry,url": config.url,
        "opentelemetry,protocol": config.protocol,
        "opentelemetry,resource": "",
        "opentelemetry,bsp_max_queue_size": batching,
    }


def test_a_gpu_without_a_pool_of_its_own_has_the_size_that_the_page_names(monkeypatch):
    monkeypatch.setattr(gpu, "DevicePool", lambda device, size: size)
    gpus = gpu.Gpus()
    monkeypatch.setattr(gpus, "device", lambda ordinal: None)
    told = re.search(r"pooled for tensors, (\d+) by default", (DOCS / "configuration.md").read_text())
    row = re.search(
        r"^\| `--cuda-memory-pool-byte-size GPU:BYTES` \| (\d+) \|", (DOCS / "gpu.md").read_text(), re.MULTILINE
    )
    assert gpus.pool(0) == int(told[1]) == int(row[1])
