"""Inputs and requested outputs, and the message of a request, for both clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inferd_client._native.messages import (
    Content,
    infer_request,
    input_tensor,
    packed_strings,
    parameter,
    request_head,
    requested_output,
)
from inferd_client.utils import (
    TRITON_RESERVED_REQUEST_PARAMS,
    TRITON_RESERVED_REQUEST_PARAMS_PREFIX,
    np_to_triton_dtype,
    raise_error,
    triton_to_np_dtype,
)

if TYPE_CHECKING:
    import numpy as np

IN_REGION = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")


def _parameter(field: int, key: str, kind: str, value: Any) -> bytes:
    try:
        return parameter(field, key, kind, value)
    except ValueError as error:
        return raise_error(str(error))


def _region(field: int, name: str, byte_size: int, offset: int) -> list[bytes]:
    placed = [_parameter(field, IN_REGION[0], "string", name), _parameter(field, IN_REGION[1], "int64", byte_size)]
    return [*placed, _parameter(field, IN_REGION[2], "int64", offset)] if offset else placed


def host_array(data: Any) -> np.ndarray:
    """An array over the memory of a tensor that speaks DLPack; an array is returned itself.

    Raises:
        InferenceServerException: the host cannot read the memory of the tensor.
    """
    import numpy as np

    if isinstance(data, np.ndarray):
        return data
    if hasattr(data, "detach"):  # a tensor of torch
        data = data.detach()
        if str(data.dtype) == "torch.bfloat16":
            import torch

            return host_array(data.view(torch.int16)).view(triton_to_np_dtype("BF16"))
    if not hasattr(data, "__dlpack__"):
        return np.asarray(data)
    try:
        return np.from_dlpack(data)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        return raise_error(f"the tensor cannot be read by the host ({error}): copy it there, or use shared memory")


class InferInput:
    """One input of a request.

    Args:
        name: the input's name.
        shape: its dimensions.
        datatype: its datatype in the protocol, such as "FP32".
    """

    __slots__ = ("_content", "_datatype", "_encoded", "_name", "_region", "_shape")

    def __init__(self, name: str, shape: Iterable[int], datatype: str) -> None:
        self._name = name
        self._shape = list(shape)
        self._datatype = datatype
        self._content: Content | None = None
        self._region: list[bytes] = []
        self._encoded: bytes | None = None

    def name(self) -> str:
        """The name of the input."""
        return self._name

    def datatype(self) -> str:
        """The datatype of the protocol."""
        return self._datatype

    def shape(self) -> list[int]:
        """Its dimensions."""
        return self._shape

    def set_shape(self, shape: Iterable[int]) -> InferInput:
        """Set the dimensions. Returns the input itself."""
        self._shape = list(shape)
        self._encoded = None
        return self

    def set_data_from_numpy(self, input_tensor: np.ndarray) -> InferInput:
        """Set the content to a copy of an array. Returns the input itself.

        Raises:
            InferenceServerException: the array has another shape or datatype than the input.
        """
        return self._set(self._checked(input_tensor), copy=True)

    def set_data(self, tensor: Any) -> InferInput:
        """Set the content to an array, or to a tensor of any framework that speaks DLPack. Returns the input itself.

        A contiguous tensor is not copied: it must not change until its requests are answered.

        Raises:
            InferenceServerException: the tensor has another shape or datatype, or the host cannot read it.
        """
        return self._set(self._checked(host_array(tensor)), copy=False)

    def _checked(self, array: Any) -> np.ndarray:
        import numpy as np

        if not isinstance(array, np.ndarray):
            raise_error("input_tensor must be a numpy array")
        datatype = np_to_triton_dtype(array.dtype)
        bits = self._datatype == "BF16" and array.dtype == np.uint16
        if datatype != self._datatype and not bits:
            raise_error(f"got unexpected datatype {datatype} from numpy array, expected {self._datatype}.")
        if list(array.shape) != [int(size) for size in self._shape]:
            raise_error(
                f"got unexpected numpy array shape [{str(array.shape)[1:-1]}], expected [{str(self._shape)[1:-1]}]"
            )
        return array

    def _set(self, array: np.ndarray, *, copy: bool) -> InferInput:
        import numpy as np

        if self._region:
            self._region = []
            self._encoded = None
        if self._datatype == "BYTES":
            try:
                self._content = Content(packed_strings(array.ravel().tolist()))
            except UnicodeEncodeError as error:
                raise_error(f"input {self._name!r}: a string cannot be encoded in UTF-8: {error}")
            return self
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        if copy:
            self._content = Content(array.tobytes())
        else:
            contiguous = np.ascontiguousarray(array)
            self._content = Content(contiguous.reshape(-1).view(np.uint8) if contiguous.size else b"")
        return self

    def set_shared_memory(self, region_name: str, byte_size: int, offset: int = 0) -> InferInput:
        """Take the content from a registered region. Returns the input itself.

        Raises:
            InferenceServerException: a number does not fit 64 bits.
        """
        self._content = None
        self._region = _region(4, region_name, byte_size, offset)
        self._encoded = None
        return self

    def _written(self) -> bytes:
        if self._encoded is None:
            self._encoded = input_tensor(self._name, self._datatype, self._shape, self._region)
        return self._encoded


class InferRequestedOutput:
    """A requested output.

    Args:
        name: of the output.
        class_count: if not 0, the server sends this many of the likeliest classes in place of the output.
    """

    __slots__ = ("_class_count", "_encoded", "_name", "_region")

    def __init__(self, name: str, class_count: int = 0) -> None:
        self._name = name
        self._class_count = class_count
        self._region: list[bytes] = []
        self._encoded: bytes | None = None

    def name(self) -> str:
        """The name of the output."""
        return self._name

    def set_shared_memory(self, region_name: str, byte_size: int, offset: int = 0) -> None:
        """Have the server write the output to a registered region.

        Raises:
            InferenceServerException: `class_count` is set, or a number does not fit 64 bits.
        """
        if self._class_count:
            raise_error("shared memory can't be set on classification output")
        self._region = _region(2, region_name, byte_size, offset)
        self._encoded = None

    def unset_shared_memory(self) -> None:
        """Have the server put the output into the response."""
        self._region = []
        self._encoded = None

    def _written(self) -> bytes:
        if self._encoded is None:
            classes = [_parameter(2, "classification", "int64", self._class_count)] if self._class_count else []
            self._encoded = requested_output(self._name, classes + self._region)
        return self._encoded


def request_pieces(
    model_name: str,
    inputs: Sequence[InferInput],
    model_version: str,
    outputs: Sequence[InferRequestedOutput] | None,
    request_id: str,
    sequence_id: int | str,
    sequence_start: bool,
    sequence_end: bool,
    priority: int,
    timeout: int | None,
    parameters: Mapping[str, Any] | None,
    final_response: bool = False,
) -> list[bytes | Content]:
    """A framed ModelInferRequest.

    Raises:
        InferenceServerException: an argument is wrong.
    """
    if type(model_version) is not str:
        raise_error("model version must be a string")
    encoded: list[bytes] = []
    if sequence_id or priority or timeout is not None or parameters or final_response:
        encoded = _parameters(sequence_id, sequence_start, sequence_end, priority, timeout, parameters)
        if final_response:
            encoded.append(_parameter(4, "triton_enable_empty_final_response", "bool", True))
    try:
        return infer_request(request_head(model_name, model_version, request_id, encoded), inputs, outputs)
    except ValueError as error:
        return raise_error(str(error))


def _parameters(
    sequence_id: int | str,
    sequence_start: bool,
    sequence_end: bool,
    priority: int,
    timeout: int | None,
    parameters: Mapping[str, Any] | None,
) -> list[bytes]:
    """The encoded parameters of a request."""
    encoded = []
    if sequence_id:
        kind = "string" if isinstance(sequence_id, str) else "int64"
        encoded.append(_parameter(4, "sequence_id", kind, sequence_id))
        encoded.append(_parameter(4, "sequence_start", "bool", sequence_start))
        encoded.append(_parameter(4, "sequence_end", "bool", sequence_end))
    if priority:
        encoded.append(_parameter(4, "priority", "uint64", priority))
    if timeout is not None:
        encoded.append(_parameter(4, "timeout", "int64", timeout))
    for key, value in (parameters or {}).items():
        if key in TRITON_RESERVED_REQUEST_PARAMS or key.startswith(TRITON_RESERVED_REQUEST_PARAMS_PREFIX):
            raise_error(f'Parameter "{key}" is a reserved parameter and cannot be specified.')
        encoded.append(_parameter(4, key, _kind(key, value), value))
    return encoded


def _kind(key: str, value: Any) -> str:
    for kind, types in (("string", str), ("bool", bool), ("int64", int), ("double", float)):
        if isinstance(value, types):
            return kind
    return raise_error(f'The parameter datatype "{type(value)}" for key "{key}" is not supported.')
