"""Settings in configurations: read from them, written into them, and the values that are tried."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import text_format

from inferd.server.tools.tune.search import Axis, Setting, Settings, Wanted
from inferd_client.pb import model_config_pb2 as pb

THREADS = {
    "onnxruntime": "intra_op_thread_count",
    "openvino": "INFERENCE_NUM_THREADS",
    "pytorch": "INTRA_OP_THREAD_COUNT",
    "tensorflow": "TF_NUM_INTRA_THREADS",
}
"""By backend, the parameter with the number of threads that compute."""
OF_PROCESS = {"pytorch"}
"""Backends whose models share threads: the first model that a server loads decides their number."""
ADAPTIVE = "adaptive_queue_delay"
PREFERRED = 4
"""The least preferred batch size that is tried."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DELAYS_US = (0, 100, 300, 1000, 3000, 10000)


def setting_of(config: pb.ModelConfig) -> Setting:
    """The setting of a configuration."""
    delay = config.dynamic_batching.max_queue_delay_microseconds if config.HasField("dynamic_batching") else None
    count = sum(max(group.count, 1) for group in config.instance_group) or 1
    text = threads_of(config)
    threads = int(text) if text.isdecimal() else 0
    sizes = tuple(config.dynamic_batching.preferred_batch_size)
    return Setting(
        batch=config.max_batch_size,
        instances=count,
        delay_us=delay,
        threads=threads,
        adaptive=ADAPTIVE in config.parameters and config.parameters[ADAPTIVE].string_value == "true",
        preferred=() if sizes == (config.max_batch_size,) else sizes,  # the one size is auto-completion's
    )


def threads_of(config: pb.ModelConfig) -> str:
    """The configured threads; empty without the parameter."""
    name = THREADS.get(config.backend, "")
    return config.parameters[name].string_value if name in config.parameters else ""


def applied(config: pb.ModelConfig, setting: Setting) -> pb.ModelConfig:
    """A configuration with a setting."""
    made = pb.ModelConfig()
    made.CopyFrom(config)
    made.max_batch_size = setting.batch
    if setting.delay_us is None:
        made.ClearField("dynamic_batching")
    else:
        made.dynamic_batching.SetInParent()
        made.dynamic_batching.max_queue_delay_microseconds = setting.delay_us
        made.dynamic_batching.preferred_batch_size[:] = setting.preferred
    if setting.adaptive:
        made.parameters[ADAPTIVE].string_value = "true"
    elif ADAPTIVE in made.parameters:
        del made.parameters[ADAPTIVE]
    if made.instance_group:
        del made.instance_group[1:]
    else:
        made.instance_group.add()
    made.instance_group[0].count = setting.instances
    if made.instance_group[0].name == f"{config.name}_0":
        made.instance_group[0].ClearField("name")  # the name, too, is auto-completion's
    name = THREADS.get(made.backend)
    if name and setting.threads:
        made.parameters[name].string_value = str(setting.threads)
    elif name and name in made.parameters:
        del made.parameters[name]
    return made


def lines(config: pb.ModelConfig, setting: Setting) -> str:
    """The lines for a config.pbtxt."""
    whole = applied(config, setting)
    part = pb.ModelConfig(max_batch_size=whole.max_batch_size, instance_group=whole.instance_group)
    if whole.HasField("dynamic_batching"):
        part.dynamic_batching.CopyFrom(whole.dynamic_batching)
    names = (THREADS.get(whole.backend, ""), ADAPTIVE)
    for name in names:
        if name in whole.parameters:
            part.parameters[name].CopyFrom(whole.parameters[name])
    return text_format.MessageToString(part)


def all_axes(
    configs: Mapping[str, pb.ModelConfig], start: Settings, wanted: Wanted
) -> list[tuple[Axis, Sequence[Any]]]:
    """The fields of all models to vary, and their values, in order."""
    found: dict[Axis, Sequence[Any]] = {}
    for name, setting in start.of:
        for field, values in axes_of(configs[name], setting, wanted):
            shares = field == "threads" and configs[name].backend in OF_PROCESS
            names = tuple(each for each, _ in start.of if configs[each].backend == configs[name].backend)
            found[names if shares else (name,), field] = values
    return list(found.items())


def axes_of(config: pb.ModelConfig, start: Setting, wanted: Wanted) -> list[tuple[str, Sequence[Any]]]:
    """The fields of a model to vary, and their values, in order."""
    found: list[tuple[str, Sequence[Any]]] = []
    batches = start.batch > 0 and not config.HasField("sequence_batching")
    if batches:
        found.append(("batch", [size for size in BATCHES if size <= wanted.largest_batch]))
    found.append(("instances", list(range(1, wanted.most_instances + 1))))
    if batches:
        found.append(("delay_us", list(DELAYS_US)))
        found.append(("adaptive", [False, True]))
        sizes = [(size,) for size in BATCHES if PREFERRED <= size < wanted.largest_batch]
        found.append(("preferred", [*dict.fromkeys([start.preferred, ()]), *sizes]))
    if config.backend in THREADS:
        found.append(("threads", [0, *(count for count in (1, 2, 4, 8, 16) if count <= (os.cpu_count() or 1))]))
    return found
