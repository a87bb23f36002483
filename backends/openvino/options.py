"""The parameters of a model, under Triton's names and those of OpenVINO's properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inferd.backends.api import BackendError, ModelSource, ModelSpec
from inferd.backends.parameters import Parameters, default_intra_op_threads

if TYPE_CHECKING:
    import openvino

MODEL_FILE = "model.xml"

TARGET_DEVICE = "TARGET_DEVICE"
EXTENSION = "CPU_EXTENSION_PATH"
FIXED_BATCH = "SKIP_OV_DYNAMIC_BATCHSIZE"
PADDING = "ENABLE_BATCH_PADDING"
RESHAPE = "RESHAPE_IO_LAYERS"
HINT_BF16 = "HINT_BF16"
OWN = frozenset({TARGET_DEVICE, EXTENSION, FIXED_BATCH, PADDING, RESHAPE, HINT_BF16})

PRECISION = "INFERENCE_PRECISION_HINT"
THREADS = "INFERENCE_NUM_THREADS"
COMPILING = "COMPILATION_NUM_THREADS"
STREAMS = "NUM_STREAMS"
HINT = "PERFORMANCE_HINT"
PINNING = "ENABLE_CPU_PINNING"
CACHE = "CACHE_DIR"
NUMBERS = (THREADS, COMPILING)
HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
OF_THE_RUNTIME = frozenset({CACHE, "CACHE_MODE"})
"""Properties of the runtime itself, which every device takes."""

OF_FILES = ("DIR", "PATH", "FILE", "TABLE")
"""Parts of the names of properties whose values are paths."""

GLOBAL = frozenset({"backend-directory", "default-max-batch-size", "min-compute-capability", "auto-complete-config"})
"""Options that every backend takes; OpenVINO has no such properties."""

CPU = "CPU"


@dataclass(frozen=True, slots=True)
class Options:
    """How one model is read, compiled and run.

    Attributes:
        device: in OpenVINO's words: "CPU", "GPU.0", "AUTO:GPU,CPU", ...
        properties: of the compiled model.
        extension: a library with operators; "" for none.
        fixed_batch: whether the model gets only batches of max_batch_size rows.
        padding: whether smaller batches are filled up.
        reshape: whether inputs get the shapes of the configuration.
    """

    device: str
    properties: Mapping[str, str]
    extension: str = ""
    fixed_batch: bool = False
    padding: bool = False
    reshape: bool = False


def read_options(source: ModelSource, config: Mapping[str, str], core: openvino.Core) -> Options:
    """Read a model's parameters, and the defaults of properties in `--backend-config openvino,...`.

    Raises:
        BackendError: a value is not what its key takes, or there is no such device.
    """
    spec = source.spec
    parameters = Parameters(spec.parameters, f"model '{spec.name}'")
    device = _device(parameters, core)
    known = OF_THE_RUNTIME | _properties_of(core, device)
    parameters.warn_unknown(OWN | known | {COMPILING})
    for key in sorted(known & spec.parameters.keys()):
        if source.from_client and any(word in key for word in OF_FILES):
            raise parameters.error(key, "expected nothing: a configuration that a client brings names no files")
    padding = parameters.flag(PADDING, False)
    told = {
        **_told(Parameters(config, "--backend-config of backend 'openvino'"), config, known),
        **_told(parameters, spec.parameters, known),
    }
    return Options(
        device=device,
        properties={**_defaults(spec, device, told), **told},
        extension=_extension(source, parameters),
        fixed_batch=padding or parameters.flag(FIXED_BATCH, False),
        padding=padding,
        reshape=parameters.flag(RESHAPE, False),
    )


def warn_unknown(config: Mapping[str, str], core: openvino.Core) -> None:
    """Log options of `--backend-config openvino,...` that no model can use."""
    known = OF_THE_RUNTIME | GLOBAL | _properties_of(core, CPU) | {HINT_BF16, COMPILING}
    Parameters(config, "--backend-config of backend 'openvino'").warn_unknown(known)


def _device(parameters: Parameters, core: openvino.Core) -> str:
    device = parameters.text(TARGET_DEVICE).strip().upper() or CPU
    whole = device.partition(":")[0].partition(".")[0]
    try:
        core.get_property(whole, "SUPPORTED_PROPERTIES")
    except RuntimeError as error:
        there = ", ".join(core.available_devices)
        raise parameters.error(TARGET_DEVICE, f"which cannot be used ({reason(error)}); there is {there}") from error
    return device


def _properties_of(core: openvino.Core, device: str) -> frozenset[str]:
    whole = device.partition(":")[0].partition(".")[0]
    told = core.get_property(whole, "SUPPORTED_PROPERTIES")
    return frozenset(name for name, access in told.items() if access != "RO")


def _defaults(spec: ModelSpec, device: str, told: Mapping[str, str]) -> dict[str, str]:
    """On the CPU: a stream for each instance, threads as other backends have, and no thread bound to a core.

    Otherwise OpenVINO would bind the threads of every model to the same first cores.
    """
    if device != CPU:
        return {"ALLOW_AUTO_BATCHING": "NO"} if device.startswith("GPU") else {}  # the server batches already
    found = {PINNING: "NO"}
    if not {STREAMS, HINT} & told.keys():
        instances = max(1, sum(instance.kind != "GPU" for instance in spec.instances))
        found[STREAMS] = str(instances)
        found[THREADS] = str(max(instances, default_intra_op_threads()))
    return found


def alone(properties: Mapping[str, str], streams: int) -> dict[str, str]:
    """The properties for compiling the model with one stream, which gets the threads of one of `streams` streams."""
    found = {**properties, STREAMS: "1"}
    if THREADS in found:
        found[THREADS] = str(max(1, int(found[THREADS]) // streams))
    return found


def _told(parameters: Parameters, values: Mapping[str, str], known: frozenset[str]) -> dict[str, str]:
    """The configured properties, checked where Triton checks them; OpenVINO refuses other wrong values."""
    found = {key: value.strip() for key, value in values.items() if key in known}
    for key in NUMBERS:
        parameters.integer(key)
    if STREAMS in found:
        found[STREAMS] = found[STREAMS].upper()
        if found[STREAMS] not in ("AUTO", "NUMA") and not found[STREAMS].isdigit():
            raise parameters.error(STREAMS, "expected AUTO, NUMA or a number")
    if HINT in found:
        found[HINT] = found[HINT].upper()
        if found[HINT] not in HINTS:
            raise parameters.error(HINT, f"expected {', '.join(HINTS[:-1])} or {HINTS[-1]}")
    if parameters.text(HINT_BF16):
        if parameters.text(HINT_BF16).strip().upper() != "YES":
            raise parameters.error(HINT_BF16, "expected YES")
        found.setdefault(PRECISION, "bf16")
    return found


def _extension(source: ModelSource, parameters: Parameters) -> str:
    name = parameters.text(EXTENSION).strip()
    if not name or (Path(name).is_absolute() and not source.from_client):
        return name
    return str(source.file(name))


def reason(error: Exception) -> str:
    """The text of an error of OpenVINO's on one line, without the places in its sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Exception from ", "While validating node"))]
    return " ".join(said) or str(error) or type(error).__name__


def failed(spec: ModelSpec, what: str, error: Exception) -> BackendError:
    """The error for a step of a load that OpenVINO refused."""
    return BackendError(f"failed to load '{spec.name}': OpenVINO: {what}: {reason(error)}")
