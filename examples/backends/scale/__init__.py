"""scale: multiplies by the number in the file `factor`, in code that Cython compiles; see docs/backends.md."""

import numpy as np

from inferd.backends.api import Backend, BackendError, Instance, Model

from ._scale import scale


class ScaleBackend(Backend):
    """Serves models whose file is a number."""

    name = "scale"
    model_filename = "factor"

    def load(self, source):
        """Read the number."""
        spec = source.spec
        if [tensor.datatype for tensor in (*spec.inputs, *spec.outputs)] != ["FP32", "FP32"]:
            raise BackendError(f"model '{spec.name}': expected one input and one output of TYPE_FP32")
        try:
            return ScaleModel(spec, float(source.model_file(self.model_filename).read_text()))
        except (OSError, ValueError) as error:
            raise BackendError(f"model '{spec.name}': {error}") from error


class ScaleModel(Model):
    """A loaded version."""

    def __init__(self, spec, factor):
        self.spec, self.factor = spec, factor

    def create_instance(self, spec):  # noqa: ARG002 (it is of no device)
        """Instances share the number."""
        return ScaleInstance(self.spec, self.factor)


class ScaleInstance(Instance):
    """Runs batches; never writes to its inputs, which are therefore not copied for it."""

    writes_inputs = False

    def __init__(self, spec, factor):
        self.given, self.answer, self.factor = spec.inputs[0].name, spec.outputs[0].name, factor

    def execute(self, batch):
        """Multiply a batch."""
        given = batch.input(self.given).numpy()
        answer = np.empty_like(given)
        scale(given, self.factor, answer)
        batch.set_output(self.answer, answer)
