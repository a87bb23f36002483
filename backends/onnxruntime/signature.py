"""What an ONNX session says about its inputs and outputs, and whether a configuration agrees with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from backends.api import BackendError, ModelSpec, TensorSpec

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
"""v2 datatype names of the runtime's type names; what is missing here cannot be served."""

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
        BackendError: they differ; the text names the tensor, what the model has and what the configuration says.
    """
    inputs = {node.name: node for node in session.get_inputs()}
    defaults = {node.name: node for node in session.get_overridable_initializers()}
    outputs = {node.name: node for node in session.get_outputs()}
    _check_input_names(spec, inputs, defaults)
    _check_known(spec, "output", spec.model_outputs, outputs)
    for tensor in spec.model_inputs:
        _check_tensor(spec, "input", tensor, inputs.get(tensor.name) or defaults[tensor.name])
    for tensor in spec.model_outputs:
        _check_tensor(spec, "output", tensor, outputs[tensor.name])


def _check_input_names(
    spec: ModelSpec,
    inputs: Mapping[str, onnxruntime.NodeArg],
    defaults: Mapping[str, onnxruntime.NodeArg],
) -> None:
    _check_known(spec, "input", spec.model_inputs, {**inputs, **defaults})
    configured = {tensor.name: tensor for tensor in spec.model_inputs}
    missing = [name for name in inputs if name not in configured]
    if missing:
        raise BackendError(
            f"unable to load model '{spec.name}', configuration expects {len(configured)} inputs, model provides "
            f"{len(inputs)}: add {', '.join(missing)}"
        )
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


def _check_known(
    spec: ModelSpec, kind: str, tensors: Sequence[TensorSpec], nodes: Mapping[str, onnxruntime.NodeArg]
) -> None:
    for tensor in tensors:
        if tensor.name not in nodes:
            raise BackendError(
                f"unexpected inference {kind} '{tensor.name}' for model '{spec.name}', allowed {kind}s are: "
                f"{', '.join(nodes)}"
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
    _check_dims(spec, tensor, dims_of(node))


def _check_dims(spec: ModelSpec, tensor: TensorSpec, model: tuple[int, ...]) -> None:
    """Dimensions that both fix must be equal; the batch dimension must be variable in the model."""
    if not model and not spec.max_batch_size:
        return  # a scalar or of unrecorded rank, which cannot be told apart
    configured = (-1, *tensor.dims) if spec.max_batch_size else tensor.dims
    batched = " with the batch dimension that max_batch_size > 0 means" if spec.max_batch_size else ""
    if len(model) != len(configured):
        raise BackendError(
            f"model '{spec.name}', tensor '{tensor.name}': the model expects {len(model)} dimensions "
            f"(shape {_shape(model)}) but the model configuration specifies {len(configured)} dimensions "
            f"(shape {_shape(configured)}{batched})"
        )
    if spec.max_batch_size and model[0] != -1:
        raise BackendError(
            f"model '{spec.name}', tensor '{tensor.name}': model does not support batching while non-zero "
            f"max_batch_size is specified: its first dimension is {model[0]}, not variable (shape {_shape(model)})"
        )
    if any(-1 not in (have, want) and have != want for have, want in zip(model, configured, strict=True)):
        raise BackendError(
            f"model '{spec.name}', tensor '{tensor.name}': the model expects shape {_shape(model)} but the model "
            f"configuration specifies shape {_shape(configured)}{batched}"
        )


def _shape(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"
