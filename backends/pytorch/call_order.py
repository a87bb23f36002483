"""Matches a configuration with the inputs and outputs of a package of AOTInductor.

A package names the arguments with which the model was exported. Some may be constants, such as numbers: they are in the
code, and the library does not take them as inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from inferd.backends.api import BackendError, ModelSpec, RequestError, TensorSpec
from inferd.backends.pytorch.naming import input_positions, output_positions
from inferd.backends.pytorch.package import Package
from inferd.backends.pytorch.wrapper import Dimension, ExpectedInput, mismatch

log = logging.getLogger("inferd.backends")


class CallOrder:
    """Matches configured tensors with the inputs and outputs of a package.

    Args:
        spec: the configuration.
        package: the model.

    Raises:
        BackendError: names, numbers, datatypes or shapes do not fit.
    """

    def __init__(self, spec: ModelSpec, package: Package) -> None:
        self.model = spec.name
        self.package = package
        for kind, tensors in (("input", spec.model_inputs), ("output", spec.model_outputs)):
            if not tensors:
                raise BackendError(f"model '{spec.name}': the configuration must contain at least one {kind}")
            for tensor in tensors:
                _check_served(spec, kind, tensor)
        self.inputs = self._match_inputs(spec)
        self.outputs = self._match_outputs(spec)
        if package.inputs is None:
            log.warning(
                "model '%s': '%s' does not say what its inputs look like: a request of a wrong shape is not noticed",
                spec.name,
                package.path,
            )
        else:
            for tensor, position in zip(spec.model_inputs, self.inputs, strict=True):
                _check_input(spec, tensor, package.inputs[position])

    def _match_inputs(self, spec: ModelSpec) -> list[int]:
        names = [tensor.name for tensor in spec.model_inputs]
        inputs, arguments = self.package.inputs, self.package.arguments
        if (inputs is not None and len(names) != len(inputs)) or (arguments and len(names) > len(arguments)):
            provided = len(arguments) if inputs is None else len(inputs)
            constants = ", some of which are constants" if len(arguments) > provided else ""
            among = f", among its arguments {', '.join(arguments)}{constants}" if arguments else ""
            raise BackendError(
                f"unable to load model '{spec.name}', configuration expects {len(names)} inputs, model provides "
                f"{provided}{among}"
            )
        if all(name in arguments for name in names):  # the others are constants
            arguments = tuple(sorted(names, key=arguments.index))
            self._check_constants(arguments)
        else:
            arguments = tuple(f"ARGS[{i}]" for i in range(len(names)))
        return input_positions(spec.name, names, arguments)

    def _check_constants(self, named: Sequence[str]) -> None:
        """Check that none of these arguments, in the order of the call, is a constant, as far as the code tells."""
        places = [self.package.arguments.index(name) for name in named]
        numbers = self.package.numbers
        if len(numbers) == len(places) and _steps(places) != _steps(numbers):
            raise BackendError(
                f"unable to load model '{self.model}', its inputs are not all among {', '.join(named)}: one of these "
                f"arguments is a constant. The model has the arguments {', '.join(self.package.arguments)}"
            )

    def _match_outputs(self, spec: ModelSpec) -> list[int]:
        names = [tensor.name for tensor in spec.model_outputs]
        results = self.package.results
        if results and len(names) > len(results):
            raise BackendError(
                f"model '{spec.name}' is configured with {len(names)} outputs, but the model returns {len(results)}: "
                f"{', '.join(results)}"
            )
        if all(name in results for name in names):
            return [results.index(name) for name in names]
        return output_positions(spec.name, names)

    def check_counts(self, inputs: int, outputs: int) -> None:
        """Check that a library has the configured number of inputs, and at least the configured outputs.

        Raises:
            BackendError: the library has another number of inputs, or too few outputs.
        """
        if inputs != len(self.inputs) or outputs <= max(self.outputs):
            raise BackendError(
                f"model '{self.model}' is configured with {len(self.inputs)} inputs and {len(self.outputs)} outputs, "
                f"the compiled model takes {inputs} and returns {outputs}"
            )

    def input_indexes(self) -> list[int]:
        """For each input of the library, its index in the configuration."""
        return [self.inputs.index(position) for position in range(len(self.inputs))]

    def output_indexes(self, count: int) -> list[int]:
        """For each of `count` outputs of the library, its index in the configuration; -1 if it is not configured."""
        places = {position: index for index, position in enumerate(self.outputs)}
        return [places.get(position, -1) for position in range(count)]

    def check_shapes(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Check that the model takes inputs of these shapes, in its order.

        Raises:
            RequestError: the model does not take them.
        """
        wrong = mismatch(self.package.inputs, shapes) if self.package.inputs is not None else ""
        if wrong:
            inputs = ", ".join(f"{index} is '{name}'" for index, name in enumerate(names))
            raise RequestError(f"unexpected shape for model '{self.model}': {wrong} ({inputs})")


def _steps(numbers: Sequence[int]) -> list[int]:
    return [number - numbers[0] for number in numbers]


def _check_served(spec: ModelSpec, kind: str, tensor: TensorSpec) -> None:
    if tensor.datatype == "BYTES":
        raise BackendError(f"model '{spec.name}': {kind} '{tensor.name}' is BYTES, which no compiled model takes")
    if tensor.optional:
        raise BackendError(
            f"model '{spec.name}': {kind} '{tensor.name}' is optional, but a compiled model takes all of its inputs"
        )


def _check_input(spec: ModelSpec, tensor: TensorSpec, expected: ExpectedInput) -> None:
    if tensor.datatype != expected.datatype:
        raise BackendError(
            f"model '{spec.name}': unexpected datatype {tensor.datatype} for input '{tensor.name}', expecting "
            f"{expected.datatype}"
        )
    dims = (-1, *tensor.dims) if spec.max_batch_size else tensor.dims
    where = f"model '{spec.name}', tensor '{tensor.name}'"
    shape = _shape(expected.dims)
    if len(dims) != len(expected.dims):
        raise BackendError(
            f"{where}: the model expects {len(expected.dims)} dimensions (shape {shape}) but the model configuration "
            f"specifies {len(dims)} dimensions (shape [{','.join(map(str, dims))}])"
        )
    if spec.max_batch_size and not expected.dims[0].lowest <= 1 <= spec.max_batch_size <= expected.dims[0].highest:
        raise BackendError(
            f"{where}: max_batch_size is {spec.max_batch_size}, but the model was exported with {shape}: its first "
            f"dimension takes {expected.dims[0].lowest} to {expected.dims[0].highest}, and must take 1 to "
            f"{spec.max_batch_size} (torch.export narrows the range where an operator chooses its algorithm by "
            "the batch size)"
        )
    for given, dim in zip(dims, expected.dims, strict=True):
        if given >= 0 and not dim.lowest <= given <= dim.highest:
            raise BackendError(
                f"{where}: the model expects shape {shape} but the model configuration specifies shape "
                f"[{','.join(map(str, dims))}]"
            )


def _shape(dims: Sequence[Dimension]) -> str:
    return f"[{','.join('-1' if dim.varies else str(dim.lowest) for dim in dims)}]"
