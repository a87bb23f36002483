"""The OpenVINO backend: one compiled model for each version, and an infer request for each of its instances.

Tensors go in without a copy. If the model fixes the shape of an output but for the number of rows, OpenVINO writes to
new memory of the server. For other outputs it allocates memory when it knows the shape; the server then owns it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from inferd.backends.api import Backend, BackendError, InstanceSpec, Model, ModelSource, Signature
from inferd.backends.openvino.graph import Graph, Shared
from inferd.backends.openvino.instance import OpenVinoInstance, plan_inputs, plan_outputs
from inferd.backends.openvino.options import MODEL_FILE, STREAMS, Options, alone, failed, read_options, warn_unknown
from inferd.backends.openvino.reading import compile_model, convert_types, make_core, read_model, shape_model
from inferd.backends.openvino.signature import check, describe, ports_of

if TYPE_CHECKING:
    import openvino


class OpenVinoBackend(Backend):
    """Serves `model.xml` with its `model.bin`; by `default_model_filename` also what else OpenVINO reads."""

    name = "openvino"
    model_filename = MODEL_FILE
    _core: openvino.Core | None = None
    _lock = threading.Lock()

    def inspect(self, source: ModelSource) -> Signature:
        """Names, datatypes and shapes, as far as the model's file fixes them."""
        return describe(source.spec.name, *ports_of(read_model(source, self._runtime(), self.model_filename)))

    def load(self, source: ModelSource) -> OpenVinoModel:
        """Read the model, check the configuration against it, and compile it."""
        for instance in source.spec.instances:
            if instance.kind not in ("CPU", "AUTO"):
                raise BackendError(
                    f"unable to load model '{source.spec.name}': instance '{instance.name}' is of "
                    f"KIND_{instance.kind}, but OpenVINO's are of KIND_CPU; the parameter TARGET_DEVICE names a GPU or "
                    "NPU of Intel's"
                )
        core = self._runtime()
        return OpenVinoModel(source, read_options(source, self.config, core), core)

    def _runtime(self) -> openvino.Core:
        with self._lock:
            if self._core is None:
                self._core = make_core()
                warn_unknown(self.config, self._core)
            return self._core


class OpenVinoModel(Model):
    """One compiled version.

    Args:
        source: the model.
        options: how it is compiled and run.
        core: the runtime.
        usual: the name of the model's file where the configuration has none.
    """

    def __init__(self, source: ModelSource, options: Options, core: openvino.Core, usual: str = MODEL_FILE) -> None:
        spec = source.spec
        if options.extension:
            core = make_core()  # an extension holds for all models of a runtime
            try:
                core.add_extension(options.extension)
            except RuntimeError as error:
                raise failed(spec, f"the extension '{options.extension}'", error) from error
        model = read_model(source, core, usual)
        inputs, outputs = ports_of(model)
        check(spec, inputs, outputs, reshape=options.reshape)
        self._rows = shape_model(model, spec, inputs, outputs, options)
        model = convert_types(model, spec, inputs, outputs)
        self._batches = bool(spec.max_batch_size)
        self._padding = options.padding
        self._inputs = plan_inputs(spec, inputs)
        self._outputs = plan_outputs(model, spec, inputs, outputs)
        # A cancelled run of a dynamic model leaves operators that have shapes but no memory for them. The next run with
        # the same shapes would have wrong results.
        self._stoppable = not model.is_dynamic()
        compiled = compile_model(model, spec, core, options)
        streams = _streams_of(compiled)
        self._shared: Shared | None = Shared(
            compiled,
            lambda: core.compile_model(model, options.device, alone(options.properties, streams)),
            streams,
            model.is_dynamic() and streams > 0,
        )
        self._alone = len(spec.instances) == 1 and not spec.sequence and streams == 1

    def create_instance(self, spec: InstanceSpec) -> OpenVinoInstance:  # noqa: ARG002 (all are alike)
        """An instance with an infer request of its own.

        The only instance of a model with a single stream also gets an alternate: the stream executes the runs of both
        one after the other.
        """
        assert self._shared is not None
        graph = Graph(self._shared)
        instance = self._make_instance(graph)
        if self._alone:
            instance.alternate = self._make_instance(graph)
        return instance

    def _make_instance(self, graph: Graph) -> OpenVinoInstance:
        return OpenVinoInstance(
            graph,
            self._inputs,
            self._outputs,
            batches=self._batches,
            rows=self._rows,
            padding=self._padding,
            stoppable=self._stoppable,
        )

    def close(self) -> None:
        """See Model."""
        self._shared = None


def _streams_of(compiled: openvino.CompiledModel) -> int:
    try:
        return int(compiled.get_property(STREAMS))
    except RuntimeError:  # the device has none
        return 0
