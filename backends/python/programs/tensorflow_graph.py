"""A SavedModel or a GraphDef in a session of TensorFlow's."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import triton_python_backend_utils as pb_utils
from batches import Batches

tf: Any = None
v1: Any = None


def import_tensorflow(xla: bool) -> None:
    """Set TensorFlow's environment variables and import TensorFlow, which reads them then.

    Raises:
        TritonModelException: TensorFlow is not installed.
    """
    global tf, v1
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only: the rest is about the machine
    if xla:
        flags = os.environ.get("TF_XLA_FLAGS", "")
        os.environ["TF_XLA_FLAGS"] = f"{flags} --tf_xla_cpu_global_jit".strip()
    try:
        import tensorflow
    except ImportError as error:
        raise pb_utils.TritonModelException(
            f"{sys.executable} has no TensorFlow ({error}): {sys.executable} -m pip install tensorflow"
        ) from error
    tf, v1 = tensorflow, tensorflow.compat.v1


def check_gpus() -> None:
    """Check that TensorFlow can use a GPU; without one it would silently compute on the CPU.

    Raises:
        TritonModelException: it cannot; the text says why.
    """
    if tf.config.list_physical_devices("GPU"):
        return
    reason = "finds none" if tf.test.is_built_with_gpu_support() else "is built for the CPU"
    raise pb_utils.TritonModelException(
        f"the instance is of KIND_GPU, but TensorFlow {tf.__version__} of {sys.executable} {reason}: "
        f'{sys.executable} -m pip install "tensorflow[and-cuda]" (in place of tensorflow-cpu), or write kind: KIND_CPU'
    )


class TritonPythonModel:
    """Runs a session with a batch at a time."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the graph."""
        config = json.loads(args["model_config"])
        options = json.loads(args["tensorflow"])
        import_tensorflow(options["xla"] != "off")
        self._batches = Batches(config)
        self._batching = self._batches.batching
        kind, number = args["model_instance_kind"], args["model_instance_device_id"]
        if kind == "GPU":
            check_gpus()
        graph = tf.Graph()
        with graph.as_default():
            self._session = v1.Session(graph=graph, config=_settings(options, kind, number))
            if "signature" in options:
                signature = self._load_saved_model(options)
                inputs = {name: each.name for name, each in signature.inputs.items()}
                outputs = {name: each.name for name, each in signature.outputs.items()}
            else:
                self._load_graph_def(options)
                inputs = outputs = {}
            self._feeds = [self._feed(name, inputs.get(name, _port(name)), each) for name, each in _inputs(config)]
            self._fetches = [self._fetch(name, outputs.get(name, _port(name)), each) for name, each in _outputs(config)]
            self._run = self._session.make_callable(
                [tensor for _, tensor, _, _ in self._fetches], [tensor for _, tensor, _, _ in self._feeds]
            )

    def _load_saved_model(self, options: dict[str, Any]) -> Any:
        log = tf.get_logger()
        level = log.level
        log.setLevel("ERROR")  # it warns that this way of loading is deprecated
        try:
            loaded = v1.saved_model.load(self._session, [options["tag"]], options["file"])
        finally:
            log.setLevel(level)
        for name in options["init_ops"]:
            self._session.run(self._session.graph.get_operation_by_name(name))
        return loaded.signature_def[options["signature"]]

    def _load_graph_def(self, options: dict[str, Any]) -> None:
        definition = v1.GraphDef()
        with open(options["file"], "rb") as file:  # noqa: PTH123 (as the rest of what runs in workers)
            definition.ParseFromString(file.read())
        tf.import_graph_def(definition, name="")
        for name in options["init_ops"]:
            self._session.run(self._session.graph.get_operation_by_name(name))

    def _tensor(self, kind: str, name: str, port: str, data_type: str) -> Any:
        try:
            tensor = self._session.graph.get_tensor_by_name(port)
        except (KeyError, ValueError):
            raise pb_utils.TritonModelException(
                f"unexpected inference {kind} '{name}': the graph has no operator of this name"
            ) from None
        expected = "string" if data_type == "TYPE_STRING" else _TYPES[data_type]
        if tensor.dtype.base_dtype.name != expected:
            raise pb_utils.TritonModelException(
                f"configuration expects datatype {data_type} for {kind} '{name}', model provides {tensor.dtype.name}"
            )
        return tensor

    def _feed(self, name: str, port: str, data_type: str) -> tuple[str, Any, bool, str]:
        tensor = self._tensor("input", name, port, data_type)
        return name, tensor, not self._batching and tensor.shape.rank == 0, data_type

    def _fetch(self, name: str, port: str, data_type: str) -> tuple[str, Any, bool, str]:
        tensor = self._tensor("output", name, port, data_type)
        return name, tensor, not self._batching and tensor.shape.rank == 0, data_type

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the session once for the whole batch."""
        responses: list[Any] = self._batches.execute(requests, self._execute_group)
        return responses

    def _execute_group(self, group: list[Any]) -> list[Any]:
        arrays, rows = self._batches.gather(group)
        given = []
        for name, _, scalar, data_type in self._feeds:
            array = arrays[name]
            if data_type == "TYPE_BF16":
                array = array.view(tf.bfloat16.as_numpy_dtype)
            given.append(array.reshape(()) if scalar else array)
        try:
            found = self._run(*given)
        except tf.errors.OpError as error:
            raise pb_utils.TritonModelException(f"tensorflow error: {error.message}") from None
        outputs = {}
        for (name, _, scalar, _), value in zip(self._fetches, found):
            outputs[name] = _array(value).reshape(1) if scalar else _array(value)
        responses: list[Any] = self._batches.scatter(group, rows, outputs)
        return responses

    def finalize(self) -> None:
        """Free the graph."""
        self._session.close()


def _array(value: Any) -> Any:
    import numpy as np

    return value if isinstance(value, np.ndarray) else np.array(value, object if isinstance(value, bytes) else None)


def _port(name: str) -> str:
    return name if ":" in name else f"{name}:0"


_TYPES = {
    "TYPE_BOOL": "bool",
    "TYPE_UINT8": "uint8",
    "TYPE_UINT16": "uint16",
    "TYPE_UINT32": "uint32",
    "TYPE_UINT64": "uint64",
    "TYPE_INT8": "int8",
    "TYPE_INT16": "int16",
    "TYPE_INT32": "int32",
    "TYPE_INT64": "int64",
    "TYPE_FP16": "float16",
    "TYPE_FP32": "float32",
    "TYPE_FP64": "float64",
    "TYPE_BF16": "bfloat16",
}


def _inputs(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and datatypes of all inputs of the graph, also of those that requests do not carry."""
    found = [(each["name"], each["data_type"]) for each in config.get("input", ())]
    for each in config.get("batch_input", ()):
        found += [(name, each["data_type"]) for name in each["target_name"]]
    sequences = config.get("sequence_batching", {})
    for each in sequences.get("control_input", ()):
        found.append((each["name"], _control_type(each["control"][0])))
    found += [(each["input_name"], each["data_type"]) for each in sequences.get("state", ())]
    return found


def _control_type(control: dict[str, Any]) -> str:
    for key, data_type in (("int32_false_true", "TYPE_INT32"), ("fp32_false_true", "TYPE_FP32")):
        if control.get(key):
            return data_type
    return "TYPE_BOOL" if control.get("bool_false_true") else str(control.get("data_type", "TYPE_UINT64"))


def _outputs(config: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(each["name"], each["data_type"]) for each in config.get("output", ())]
    states = config.get("sequence_batching", {}).get("state", ())
    return found + [(each["output_name"], each["data_type"]) for each in states]


def _settings(options: dict[str, Any], kind: str, number: str) -> Any:
    settings = v1.ConfigProto(
        intra_op_parallelism_threads=options["intra_threads"],
        inter_op_parallelism_threads=options["inter_threads"],
        allow_soft_placement=options["soft_placement"],
    )
    if kind == "GPU":
        settings.gpu_options.visible_device_list = number
        settings.gpu_options.allow_growth = options["memory_fraction"] == 0
        settings.gpu_options.per_process_gpu_memory_fraction = options["memory_fraction"]
    else:
        settings.device_count["GPU"] = 0
    levels = v1.OptimizerOptions
    settings.graph_options.optimizer_options.global_jit_level = {
        "off": levels.OFF,
        "on_1": levels.ON_1,
        "on_2": levels.ON_2,
    }[options["xla"]]
    if options["mixed_precision"]:
        from tensorflow.core.protobuf import rewriter_config_pb2

        settings.graph_options.rewrite_options.auto_mixed_precision = rewriter_config_pb2.RewriterConfig.ON
    return settings
