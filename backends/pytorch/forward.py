"""The calls of a module's forward() for a configuration: its arguments and the elements of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferd.backends.api import BackendError, ModelSpec, TensorSpec
from inferd.backends.pytorch.naming import input_positions, output_positions

if TYPE_CHECKING:
    import torch

# Kinds of TorchScript types, see c10/core/type_factory and torch._C.Type.kind().
TENSOR, STRINGS, TENSORS_BY_NAME, ANY = "Tensor", "List[str]", "Dict[str, Tensor]", "Any"


class Forward:
    """The calling convention between a configuration and a module's forward().

    Args:
        spec: the configuration.
        module: a loaded module; only its schema is read, so one Forward serves all copies.

    Raises:
        BackendError: names, number or kinds of inputs or outputs do not fit.
    """

    def __init__(self, spec: ModelSpec, module: torch.jit.ScriptModule) -> None:
        schema = module.forward.schema
        arguments = schema.arguments[1:]  # without self
        self.model = spec.name
        self.input_names = tuple(tensor.name for tensor in spec.model_inputs)
        self.takes_dictionary = _takes_dictionary(spec, arguments)
        self._positions: list[int] = []
        self._keyword_names: list[str] = []
        if not self.takes_dictionary:
            self._match_arguments(spec, arguments)
        self.output_positions = output_positions(spec.name, [tensor.name for tensor in spec.model_outputs])
        self._returns_list = text_of(schema.returns[0].type) == STRINGS
        self._check_outputs(spec, schema.returns[0].type)

    def _match_arguments(self, spec: ModelSpec, arguments: list[Any]) -> None:
        names = [argument.name for argument in arguments]
        self._positions = input_positions(spec.name, self.input_names, names)
        for position, argument in enumerate(arguments):
            if position not in self._positions and not argument.has_default_value():
                raise BackendError(
                    f"model '{spec.name}': forward() needs '{argument.name}', its argument {position}, but the "
                    f"configuration has no input for it"
                )
        for tensor, position in zip(spec.model_inputs, self._positions, strict=True):
            _check_argument(spec, tensor, arguments[position])
        if sorted(self._positions) != list(range(len(self._positions))):
            # Arguments in between keep their default values, so the others must be passed by name.
            self._keyword_names = [names[position] for position in self._positions]

    def _check_outputs(self, spec: ModelSpec, returned: Any) -> None:
        kind = returned.kind()
        count = len(returned.elements()) if kind == "TupleType" else 1 if kind == "TensorType" else None
        if self._returns_list:
            count = 1
        if count is not None and len(spec.model_outputs) > count:
            raise BackendError(
                f"model '{spec.name}' is configured with {len(spec.model_outputs)} outputs, "
                f"but forward() returns {count}"
            )
        for tensor in spec.model_outputs:
            _check_strings(spec, "output", tensor)

    def bind(self, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments for the values of the inputs, which are in configured order."""
        if self.takes_dictionary:
            present = zip(self.input_names, values, strict=True)
            return [{name: value for name, value in present if value is not None}], {}
        if self._keyword_names:
            return [], dict(zip(self._keyword_names, values, strict=True))
        arguments: list[Any] = [None] * len(values)
        for position, value in zip(self._positions, values, strict=True):
            arguments[position] = value
        return arguments, {}

    def elements(self, result: Any) -> tuple[Any, ...] | list[Any]:
        """The result as the sequence in which output positions count.

        Raises:
            BackendError: it has fewer elements than there are outputs.
        """
        alone = self._returns_list or not isinstance(result, tuple | list) or _is_list_of_text(result)
        elements = (result,) if alone else result
        if len(elements) < len(self.output_positions):
            raise BackendError(
                f"model '{self.model}' is configured with {len(self.output_positions)} outputs, but forward() "
                f"returned {len(elements)}"
            )
        return elements


def _is_list_of_text(result: Any) -> bool:
    return isinstance(result, list) and bool(result) and all(isinstance(element, str) for element in result)


def text_of(kind: Any) -> str:
    """A type in TorchScript's notation, an optional one without Optional."""
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return str(kind.annotation_str).replace("torch.", "")


def _takes_dictionary(spec: ModelSpec, arguments: list[Any]) -> bool:
    """Whether forward() takes all its inputs as one Dict[str, Tensor].

    Raises:
        BackendError: it takes a dictionary beside other arguments, or one of something else than tensors.
    """
    dictionaries = [argument for argument in arguments if argument.type.kind() == "DictType"]
    if not dictionaries:
        return False
    if len(dictionaries) > 1:
        raise BackendError(
            f"model '{spec.name}': Multiple inputs of kind DictType were detected: "
            f"{', '.join(argument.name for argument in dictionaries)}; a single one is supported"
        )
    if len(arguments) > 1:
        raise BackendError(
            f"model '{spec.name}': forward() takes the dictionary '{dictionaries[0].name}' beside other arguments; "
            "a dictionary must be the only one"
        )
    if text_of(dictionaries[0].type) != TENSORS_BY_NAME:
        raise BackendError(
            f"model '{spec.name}': forward() takes '{dictionaries[0].name}' of type "
            f"{text_of(dictionaries[0].type)}, only {TENSORS_BY_NAME} is supported"
        )
    for tensor in spec.model_inputs:
        if tensor.datatype == "BYTES":
            raise BackendError(f"model '{spec.name}': input '{tensor.name}' is BYTES, but forward() takes Tensors")
    return True


def _check_argument(spec: ModelSpec, tensor: TensorSpec, argument: Any) -> None:
    kind = text_of(argument.type)
    expected = STRINGS if tensor.datatype == "BYTES" else TENSOR
    if kind not in (expected, ANY):
        raise BackendError(
            f"model '{spec.name}': input '{tensor.name}' is {tensor.datatype}, which needs an argument of type "
            f"{expected}, but '{argument.name}' of forward() must be of type {kind}"
        )
    if tensor.optional and argument.type.kind() not in ("OptionalType", "AnyType"):
        raise BackendError(
            f"model '{spec.name}': input '{tensor.name}' is optional, which needs an argument of type "
            f"Optional[{expected}], but '{argument.name}' of forward() is of type {kind}"
        )
    _check_strings(spec, "input", tensor)


def _check_strings(spec: ModelSpec, kind: str, tensor: TensorSpec) -> None:
    """A list has one dimension: the only one, or the batch's with one string in each row."""
    if tensor.datatype != "BYTES":
        return
    if tensor.dims not in ((), (1,)) if spec.max_batch_size else len(tensor.dims) != 1:
        shape = f"[{','.join(map(str, tensor.dims))}]"
        raise BackendError(
            f"model '{spec.name}': Triton only supports 1 dimensional List of String as {kind}: '{tensor.name}' has "
            f"dims {shape}, expected {'[1]' if spec.max_batch_size else 'one dimension'}"
        )
