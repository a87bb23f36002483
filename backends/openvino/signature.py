"""A model's inputs and outputs, and the check of a configuration against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from inferd.backends.agreement import check_dims, check_names, check_none_missing
from inferd.backends.api import BackendError, ModelSpec, Signature, TensorSpec

if TYPE_CHECKING:
    import openvino

DATATYPES: Mapping[str, str] = MappingProxyType(
    {
        "boolean": "BOOL",
        "u8": "UINT8",
        "u16": "UINT16",
        "u32": "UINT32",
        "u64": "UINT64",
        "i8": "INT8",
        "i16": "INT16",
        "i32": "INT32",
        "i64": "INT64",
        "f16": "FP16",
        "f32": "FP32",
        "f64": "FP64",
        "bf16": "BF16",
        "string": "BYTES",
    }
)
"""v2 datatype names of the runtime's element types; what is missing here cannot be served."""
ELEMENTS: Mapping[str, str] = MappingProxyType({datatype: element for element, datatype in DATATYPES.items()})


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model's file.

    Attributes:
        index: among the model's inputs, or its outputs.
        names: the names that a configuration may use; the first is the usual one.
        datatype: the v2 name of its datatype; "" if that has none.
        element: OpenVINO's name of its datatype.
        shape: -1 for a dimension that the file leaves open; None if the file does not even fix their number.
        batch_first: whether the file says that the first dimension is the batch dimension.
    """

    index: int
    names: tuple[str, ...]
    datatype: str
    element: str
    shape: tuple[int, ...] | None
    batch_first: bool

    @property
    def batches(self) -> bool:
        """Whether the first dimension is one for batches."""
        return bool(self.shape) and (self.batch_first or (self.shape is not None and self.shape[0] == -1))


def ports_of(model: openvino.Model) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """The inputs and the outputs."""
    return (
        tuple(_port(index, port) for index, port in enumerate(model.inputs)),
        tuple(_port(index, port) for index, port in enumerate(model.outputs)),
    )


def _port(index: int, port: openvino.Output) -> Port:
    from openvino import layout_helpers

    node = port.get_node()
    source = node.input_value(0).get_node() if node.get_type_name() == "Result" else node
    names = sorted(port.get_names()) or [source.get_friendly_name()]
    # an input that is an output as well has the names of both
    usual = source.get_friendly_name() if source.get_friendly_name() in names else names[0]
    element = port.get_element_type().get_type_name()
    partial = port.get_partial_shape()
    shape = None
    if partial.rank.is_static:
        shape = tuple(dim.get_length() if dim.is_static else -1 for dim in partial)
    layout = node.get_layout()
    batch_first = layout_helpers.has_batch(layout) and layout_helpers.batch_idx(layout) == 0
    return Port(index, (usual, *(name for name in names if name != usual)), DATATYPES.get(element, ""), element, shape,
                batch_first)  # fmt: skip


def by_name(ports: Sequence[Port]) -> dict[str, Port]:
    """The ports by each of their names; the usual ones in front."""
    found = {port.names[0]: port for port in ports}
    for port in ports:
        for name in port.names:
            found.setdefault(name, port)
    return found


def describe(name: str, inputs: Sequence[Port], outputs: Sequence[Port]) -> Signature:
    """The signature that completes a configuration. A scalar is described as dims [1].

    Raises:
        BackendError: a tensor has a datatype or a rank that cannot be served.
    """
    batches = all(port.batches for port in (*inputs, *outputs))
    return Signature(
        inputs=tuple(_described(name, port, batches) for port in inputs),
        outputs=tuple(_described(name, port, batches) for port in outputs),
        batches=batches,
    )


def _described(model: str, port: Port, batches: bool) -> TensorSpec:
    name = port.names[0]
    if not port.datatype:
        raise BackendError(f"model '{model}': unsupported datatype {port.element} of '{name}'")
    if port.shape is None:
        raise BackendError(f"model '{model}': the file does not say how many dimensions '{name}' has: configure it")
    return TensorSpec(name, port.datatype, port.shape[1:] if batches else port.shape or (1,))


def check(spec: ModelSpec, inputs: Sequence[Port], outputs: Sequence[Port], *, reshape: bool) -> None:
    """Compare a configuration with the model.

    Datatypes may differ: OpenVINO converts. The first dimension may, where the configuration has batches.

    Raises:
        BackendError: they differ; the text names the tensor, what the model has and what the configuration says.
    """
    known = by_name(inputs)
    check_names(spec, "input", spec.model_inputs, known)
    given = {known[tensor.name].index for tensor in spec.model_inputs}
    missing = [port.names[0] for port in inputs if port.index not in given]
    check_none_missing(spec, [port.names[0] for port in inputs], missing)
    for tensor in spec.model_inputs:
        if tensor.optional:
            raise BackendError(f"model '{spec.name}': input '{tensor.name}' must not be optional: no model has those")
        _check_port(spec, "input", tensor, known[tensor.name], any_dims=reshape)
    known = by_name(outputs)
    check_names(spec, "output", spec.model_outputs, known)
    for tensor in spec.model_outputs:
        _check_port(spec, "output", tensor, known[tensor.name], any_dims=reshape)


def _check_port(spec: ModelSpec, kind: str, tensor: TensorSpec, port: Port, *, any_dims: bool) -> None:
    text = "BYTES" in (tensor.datatype, port.datatype)
    if not port.datatype and port.element != "dynamic":
        raise BackendError(f"model '{spec.name}': unsupported datatype {port.element} of {kind} '{tensor.name}'")
    if text and tensor.datatype != port.datatype:
        raise BackendError(
            f"model '{spec.name}': unexpected datatype {tensor.datatype} for {kind} '{tensor.name}', expecting "
            f"{port.datatype}"
        )
    if port.shape == () and not spec.max_batch_size and tensor.dims != (1,):
        raise BackendError(
            f"model '{spec.name}': {kind} '{tensor.name}' is a scalar, which is configured as dims: [ 1 ]"
        )
    if port.shape is not None:
        check_dims(spec, tensor, port.shape, any_batch=True, any_dims=any_dims)
