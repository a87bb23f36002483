"""The accelerator `openvino` where the installed ONNX Runtime lacks it: OpenVINO itself executes the file."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inferd.backends.api import AcceleratorSpec, BackendError, ModelSource
from inferd.backends.onnxruntime.providers import OPENVINO
from inferd.backends.openvino.backend import OpenVinoModel
from inferd.backends.openvino.options import CACHE, PINNING, PRECISION, STREAMS, THREADS, Options
from inferd.backends.parameters import Parameters, default_intra_op_threads

if TYPE_CHECKING:
    import openvino

log = logging.getLogger("inferd.onnxruntime")

PROPERTIES: Mapping[str, str] = MappingProxyType(
    {"num_of_threads": THREADS, "num_streams": STREAMS, "cache_dir": CACHE}
)
"""Options of ONNX Runtime's provider, and OpenVINO's properties with the same meaning."""
PRECISIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "FP32": {PRECISION: "f32"},
        "FP16": {PRECISION: "f16"},
        "ACCURACY": {"EXECUTION_MODE_HINT": "ACCURACY"},
    }
)
DEVICES = ("CPU", "CPU_FP32")  # older versions wrote the latter
WITHOUT_EFFECT = frozenset(
    {"device_id", "disable_dynamic_shapes", "enable_opencl_throttling", "enable_qdq_optimizer", "model_priority"}
)
"""Options that have no effect here, and would not change responses."""


def is_needed() -> bool:
    """Whether OpenVINO is installed and the installed ONNX Runtime is built without it."""
    import onnxruntime

    if OPENVINO in onnxruntime.get_available_providers():
        return False
    if "openvino" in sys.modules:
        return sys.modules["openvino"] is not None
    try:
        return importlib.util.find_spec("openvino") is not None
    except ImportError:
        return False


def accelerate(source: ModelSource, core: openvino.Core, usual: str) -> OpenVinoModel:
    """The model as OpenVINO executes it.

    Args:
        source: a model with this accelerator.
        core: the runtime.
        usual: name of the model's file.

    Raises:
        BackendError: an option is wrong, or OpenVINO does not take the model.
    """
    (accelerator,) = source.spec.cpu_accelerators[:1]
    model = OpenVinoModel(source, _options(source, accelerator), core, usual)
    log.info(
        "model '%s' is executed by OpenVINO itself, as the installed ONNX Runtime is built without %s",
        source.spec.name,
        OPENVINO,
    )
    return model


def _options(source: ModelSource, accelerator: AcceleratorSpec) -> Options:
    spec = source.spec
    where = f"model '{spec.name}': execution accelerator '{accelerator.name}'"
    given = Parameters(accelerator.parameters, where)
    count = sum(instance.kind != "GPU" for instance in spec.instances) or 1
    threads = Parameters(spec.parameters, f"model '{spec.name}'").integer("intra_op_thread_count")
    found = {
        PINNING: "NO",
        STREAMS: str(count),
        THREADS: str(threads or max(count, default_intra_op_threads())),
        PRECISION: "f32",  # ONNX Runtime's precision; OpenVINO would use a lower one on some CPUs
    }
    for key, value in accelerator.parameters.items():
        if source.from_client and key in ("cache_dir", "load_config"):
            raise given.error(key, "expected nothing: a configuration that a client brings names no files")
        if key in PROPERTIES:
            found[PROPERTIES[key]] = value
        elif key == "precision":
            if value.upper() not in PRECISIONS:
                raise given.error(key, f"expected one of {', '.join(PRECISIONS)}")
            found.pop(PRECISION, None)
            found.update(PRECISIONS[value.upper()])
        elif key == "load_config":
            found.update(_loaded(source, given, value))
        elif key == "device_type":
            if value.upper() not in DEVICES:
                raise given.error(key, "expected CPU: the backend openvino has the parameter TARGET_DEVICE")
        elif key in WITHOUT_EFFECT:
            log.warning("%s: '%s' has no effect where OpenVINO itself executes the model", where, key)
        else:
            raise BackendError(f"{where}: unknown parameter '{key}' is provided for OpenVINO Execution Accelerator")
    return Options(device="CPU", properties=found)


def _loaded(source: ModelSource, given: Parameters, name: str) -> dict[str, str]:
    """The properties of the CPU in a file: a JSON object of devices, each with its properties."""
    path = Path(name) if Path(name).is_absolute() else source.file(name)
    try:
        told: Any = json.loads(path.read_text())
        return {str(key): str(value) for key, value in told.get("CPU", {}).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise given.error("load_config", f"which cannot be read as a JSON object of devices: {error}") from error
