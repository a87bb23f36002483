"""An ONNX session's inputs and outputs, and the check of a configuration against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from inferd.backends.agreement import check_dims, check_names, check_none_missing
from inferd.backends.api import BackendError, ModelSpec, TensorSpec

if TYPE_CHECKING:
    import onnxruntime

DATATYPES: Mapping[str, str] = MappingProxyType(
    {
        "tensor(bool)": "BOOL",
        "tensor(uint8)": "UINT8",
        "tensor(uint16)": "UINT16",
        "tensor(uint32)": "UINT32",
        "tensor(uint64)": "UINT64",
        "tensor(int8)": "INT8",
        "tensor(int16)": "INT16",
        "tensor(int32)": "INT32",
        "tensor(int64)": "INT64",
        "tensor(float16)": "FP16",
        "tensor(float)": "FP32",
        "tensor(double)": "FP64",
        "tensor(bfloat16)": "BF16",
        "tensor(string)": "BYTES",
    }
)
"""v2 datatype names by the runtime's type names; types that are missing here cannot be served."""

ELEMENT_BF16 = 16  # onnx.TensorProto.BFLOAT16


def dims_of(node: onnxruntime.NodeArg) -> tuple[int, ...]:
    """The shape, -1 for a dimension that is named or left open; empty for a scalar and where no rank is recorded."""
    return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)


def is_batching(nodes: Sequence[onnxruntime.NodeArg]) -> bool:
    """Whether every tensor has a variable first dimension."""
    return all(dims_of(node)[:1] == (-1,) for node in nodes)


def check(spec: ModelSpec, session: onnxruntime.InferenceSession) -> None:
    """Compare a configuration with the model.

    Raises:
        BackendError: they differ; the text has the tensor, the model's value and the configuration's.
    """
    inputs = {node.name: node for node in session.get_inputs()}
    defaults = {node.name: node for node in session.get_overridable_initializers()}
    outputs = {node.name: node for node in session.get_outputs()}
    _check_input_names(spec, inputs, defaults)
    check_names(spec, "output", spec.model_outputs, outputs)
    for tensor in spec.model_inputs:
        _check_tensor(spec, "input", tensor, inputs.get(tensor.name) or defaults[tensor.name])
    for tensor in spec.model_outputs:
        _check_tensor(spec, "output", tensor, outputs[tensor.name])


def _check_input_names(
    spec: ModelSpec,
    inputs: Mapping[str, onnxruntime.NodeArg],
    defaults: Mapping[str, onnxruntime.NodeArg],
) -> None:
    check_names(spec, "input", spec.model_inputs, {**inputs, **defaults})
    configured = {tensor.name for tensor in spec.model_inputs}
    check_none_missing(spec, inputs, [name for name in inputs if name not in configured])
    for tensor in spec.model_inputs:
        if tensor.name in defaults and not tensor.optional:
            raise BackendError(
                f"model '{spec.name}': input '{tensor.name}' has a value in the model (an initializer), so it must be "
                "configured with 'optional: true'"
            )
        if tensor.name in inputs and tensor.optional:
            raise BackendError(
                f"model '{spec.name}': input '{tensor.name}' has no value in the model, so it must not be optional"
            )


def _check_tensor(spec: ModelSpec, kind: str, tensor: TensorSpec, node: onnxruntime.NodeArg) -> None:
    datatype = DATATYPES.get(node.type)
    if datatype is None:
        raise BackendError(f"model '{spec.name}': unsupported datatype {node.type} of {kind} '{tensor.name}'")
    if datatype != tensor.datatype:
        raise BackendError(
            f"model '{spec.name}': unexpected datatype {tensor.datatype} for {kind} '{tensor.name}', "
            f"expecting {datatype}"
        )
    check_dims(spec, tensor, dims_of(node))
