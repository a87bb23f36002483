"""The identity backend: answers each request with its own inputs, natively, without a copy.

Output i is input i, paired in the order of the configuration. Good for tests and for measuring what the server itself
costs. A model may take time without using the CPU: parameter `delay_us` (or Triton's `execute_delay_ms`) is how long
each batch waits. With parameter `gather` it takes the way of a real model: the inputs of a batch are made contiguous,
and one output for the whole batch is split among its requests. A decoupled model answers each request with one response
for every entry along the first dimension, the batch dimension if there is one.
"""

from __future__ import annotations

from backends.api import Backend, BackendError, InstanceSpec, Model, ModelSource, ModelSpec, NativeInstance
from backends.identity._identity import make_executor
from backends.parameters import Parameters

DELAY_US = "delay_us"
DELAY_MS = "execute_delay_ms"
GATHER = "gather"


class IdentityBackend(Backend):
    """Needs no model file, only the version directory."""

    name = "identity"

    def load(self, source: ModelSource) -> IdentityModel:
        """Pair inputs and outputs, and read the parameters."""
        check_pairs(source.spec)
        parameters = Parameters(source.spec.parameters, f"model '{source.spec.name}'")
        parameters.warn_unknown((DELAY_US, DELAY_MS, GATHER))
        delay_us = parameters.integer(DELAY_US) or 1_000 * (parameters.integer(DELAY_MS) or 0)
        return IdentityModel(1_000 * delay_us, parameters.flag(GATHER, False), source.spec.decoupled)


def check_pairs(spec: ModelSpec) -> None:
    """Every output needs an input of its datatype.

    Raises:
        BackendError: one has none.
    """
    if len(spec.outputs) > len(spec.inputs):
        raise BackendError(
            f"model '{spec.name}': the identity backend answers each input with one output, the configuration has "
            f"{len(spec.inputs)} inputs and {len(spec.outputs)} outputs"
        )
    for given, answer in zip(spec.inputs, spec.outputs, strict=False):
        if given.datatype != answer.datatype:
            raise BackendError(
                f"model '{spec.name}': output '{answer.name}' is {answer.datatype}, but the identity backend answers "
                f"it with input '{given.name}', which is {given.datatype}"
            )
        if spec.decoupled and given.datatype == "BYTES":
            raise BackendError(
                f"model '{spec.name}': input '{given.name}' is BYTES, which a decoupled identity model cannot split"
            )


class IdentityModel(Model):
    """One loaded version: nothing but its parameters."""

    def __init__(self, delay_ns: int, gather: bool, decoupled: bool) -> None:
        self.delay_ns = delay_ns
        self.gather = gather
        self.decoupled = decoupled

    def create_instance(self, spec: InstanceSpec) -> IdentityInstance:  # noqa: ARG002
        """An instance of any kind: no device is used."""
        return IdentityInstance(self.delay_ns, self.gather, self.decoupled)


class IdentityInstance(NativeInstance):
    """Runs without touching Python."""

    def __init__(self, delay_ns: int, gather: bool, decoupled: bool) -> None:
        self.executor = make_executor(delay_ns, gather, decoupled)
