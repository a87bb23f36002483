"""The identity backend: answers each request with its own inputs, natively, without a copy.

Output i is input i, paired in the order of the configuration. It serves tests, and measurements of the server's own
cost. A model may take time without using the CPU: parameter `delay_us` (or Triton's `execute_delay_ms`) is the wait of
each batch, `row_delay_us` the additional wait of each row. With parameter `gather` requests pass the same steps as with
a real model: the inputs of a batch are made contiguous, and one output for the whole batch is split among its requests.
A decoupled model answers each request with one response for every entry along the first dimension, the batch dimension
if there is one; at most 64 of them are in flight, then its instance waits until the client has taken some. An instance
on a GPU sends the inputs there and copies them on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferd._native.cuda.device import device
from inferd.backends.api import (
    Backend,
    BackendError,
    GpuInstance,
    Instance,
    InstanceSpec,
    Model,
    ModelSource,
    ModelSpec,
    NativeInstance,
)
from inferd.backends.identity._identity import LONGEST_US, make_executor
from inferd.backends.parameters import Parameters

if TYPE_CHECKING:
    from inferd._native.gpu.batch import GpuBatch

DELAY_US = "delay_us"
DELAY_MS = "execute_delay_ms"
ROW_DELAY_US = "row_delay_us"
GATHER = "gather"


class IdentityBackend(Backend):
    """Needs no model file, only the version directory."""

    name = "identity"

    def load(self, source: ModelSource) -> IdentityModel:
        """Pair inputs and outputs, and read the parameters."""
        check_pairs(source.spec)
        parameters = Parameters(source.spec.parameters, f"model '{source.spec.name}'")
        parameters.warn_unknown((DELAY_US, DELAY_MS, ROW_DELAY_US, GATHER))
        delay_ms = parameters.integer(DELAY_MS, 0, maximum=LONGEST_US // 1_000) or 0
        delay_us = parameters.integer(DELAY_US, 0, maximum=LONGEST_US) or 1_000 * delay_ms
        row_delay_us = parameters.integer(ROW_DELAY_US, 0, maximum=LONGEST_US) or 0
        return IdentityModel(source.spec, (delay_us, row_delay_us), parameters.flag(GATHER, False))


def check_pairs(spec: ModelSpec) -> None:
    """Check that every output has an input, of the same datatype.

    Raises:
        BackendError: one has not, or a decoupled model has BYTES.
    """
    if len(spec.outputs) > len(spec.inputs):
        raise BackendError(
            f"model '{spec.name}': the identity backend returns each input as one output, but the configuration has "
            f"{len(spec.inputs)} inputs and {len(spec.outputs)} outputs"
        )
    for given, returned in zip(spec.inputs, spec.outputs, strict=False):
        if given.datatype != returned.datatype:
            raise BackendError(
                f"model '{spec.name}': output '{returned.name}' is {returned.datatype}, but the identity backend "
                f"returns input '{given.name}' there, which is {given.datatype}"
            )
        if spec.decoupled and given.datatype == "BYTES":
            raise BackendError(
                f"model '{spec.name}': input '{given.name}' is BYTES, which a decoupled identity model cannot split"
            )


class IdentityModel(Model):
    """One loaded version: its parameters."""

    any_thread = True

    def __init__(self, spec: ModelSpec, delays_us: tuple[int, int], gather: bool) -> None:
        self.spec = spec
        self.delays_us = delays_us  # of each batch, and of each of its rows
        self.gather = gather

    def create_instance(self, spec: InstanceSpec) -> Instance:
        """An instance that returns its inputs without a copy; on a GPU, one that copies them there."""
        if spec.kind == "GPU":
            return IdentityGpuInstance(self.spec, spec)
        return IdentityInstance(self.delays_us, self.gather, self.spec.decoupled)


class IdentityInstance(NativeInstance):
    """Runs without touching Python."""

    writes_inputs = False

    def __init__(self, delays_us: tuple[int, int], gather: bool, decoupled: bool) -> None:
        self.executor = make_executor(*delays_us, gather, decoupled)
        self.brief = not decoupled and not any(delays_us)


class IdentityGpuInstance(GpuInstance):
    """Copies inputs to outputs on the device, without a computation, to measure the transfers."""

    writes_inputs = False

    def __init__(self, model: ModelSpec, spec: InstanceSpec) -> None:
        for tensor in model.inputs:
            if tensor.datatype == "BYTES":
                raise BackendError(f"instance {spec.name}: input '{tensor.name}' is BYTES, which no GPU takes")
        if model.decoupled:
            raise BackendError(f"instance {spec.name}: a decoupled identity model has its instances on the CPU")
        self._names = [(each.name, output.name) for each, output in zip(model.inputs, model.outputs, strict=False)]
        gpu = device(spec.device)
        self.stream = gpu.stream(gpu.priority(model.gpu.priority))

    def submit(self, batch: GpuBatch) -> None:
        """One copy for each output."""
        for given, output in self._names:
            source = batch.input(given)
            if source is not None and batch.wants(output):
                target = batch.output(output, source.shape)
                self.stream.copy_on_device(target.pointer, source.pointer, source.size)
