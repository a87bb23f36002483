"""Inputs and outputs of a request, and the answer to it; for all clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from inferd_client._native.messages import (
    Content,
    framed_request,
    input_tensor,
    packed_strings,
    parameter,
    read_response,
    request_head,
    requested_output,
    unpacked_strings,
)
from inferd_client.utils import (
    TRITON_RESERVED_REQUEST_PARAMS,
    TRITON_RESERVED_REQUEST_PARAMS_PREFIX,
    InferenceServerException,
    np_to_triton_dtype,
    raise_error,
    triton_to_np_dtype,
)

if TYPE_CHECKING:
    import numpy as np

IN_REGION = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
IN_SHARED_MEMORY = "output '{}' has no bytes in the answer: it is in shared memory"
ALIGNED_BELOW = 1 << 14
"""Bytes of a tensor that is copied where it does not lie as its datatype wants it."""


def _region(field: int, name: str, byte_size: int, offset: int) -> list[bytes]:
    placed = [parameter(field, IN_REGION[0], "string", name), parameter(field, IN_REGION[1], "int64", byte_size)]
    return [*placed, parameter(field, IN_REGION[2], "int64", offset)] if offset else placed


def host_array(data: Any) -> np.ndarray:
    """An array of the memory of a tensor of any framework that speaks DLPack; of an array, itself.

    Raises:
        InferenceServerException: it has no memory that the host can read.
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
        name: of the input.
        shape: its dimensions.
        datatype: of the protocol, such as "FP32".
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
        """Of the input."""
        return self._name

    def datatype(self) -> str:
        """Of the protocol."""
        return self._datatype

    def shape(self) -> list[int]:
        """Its dimensions."""
        return self._shape

    def set_shape(self, shape: Iterable[int]) -> InferInput:
        """Set the dimensions. Returns itself."""
        self._shape = list(shape)
        self._encoded = None
        return self

    def set_data_from_numpy(self, input_tensor: np.ndarray) -> InferInput:
        """Set the content to a copy of an array's. Returns itself.

        Raises:
            InferenceServerException: the array has another shape or datatype than the input.
        """
        return self._set(self._checked(input_tensor), copy=True)

    def set_data(self, tensor: Any) -> InferInput:
        """Set the content to the memory of an array or a tensor of any framework that speaks DLPack. Returns itself.

        Where it lies contiguously nothing is copied: it must not change until the requests with it are answered.

        Raises:
            InferenceServerException: it has another shape or datatype than the input, or is not the host's memory.
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
            self._content = Content(packed_strings(array.ravel().tolist()))
        elif copy:
            self._content = Content(array.tobytes())
        else:
            lying = np.ascontiguousarray(array)
            self._content = Content(lying.reshape(-1).view(np.uint8) if lying.size else b"")
        return self

    def set_shared_memory(self, region_name: str, byte_size: int, offset: int = 0) -> InferInput:
        """The content is in a registered region. Returns itself."""
        self._content = None
        self._region = _region(4, region_name, byte_size, offset)
        self._encoded = None
        return self

    def _written(self) -> bytes:
        if self._encoded is None:
            self._encoded = input_tensor(self._name, self._datatype, self._shape, self._region)
        return self._encoded


class InferRequestedOutput:
    """An output that is asked for.

    Args:
        name: of the output.
        class_count: how many of the likeliest classes are wanted in its place; 0: itself.
    """

    __slots__ = ("_class_count", "_encoded", "_name", "_region")

    def __init__(self, name: str, class_count: int = 0) -> None:
        self._name = name
        self._class_count = class_count
        self._region: list[bytes] = []
        self._encoded: bytes | None = None

    def name(self) -> str:
        """Of the output."""
        return self._name

    def set_shared_memory(self, region_name: str, byte_size: int, offset: int = 0) -> None:
        """It is to be put into a registered region.

        Raises:
            InferenceServerException: classes are asked for.
        """
        if self._class_count:
            raise_error("shared memory can't be set on classification output")
        self._region = _region(2, region_name, byte_size, offset)
        self._encoded = None

    def unset_shared_memory(self) -> None:
        """It is to be in the answer."""
        self._region = []
        self._encoded = None

    def _written(self) -> bytes:
        if self._encoded is None:
            classes = [parameter(2, "classification", "int64", self._class_count)] if self._class_count else []
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
        InferenceServerException: an argument is not what it should be.
    """
    if type(model_version) is not str:
        raise_error("model version must be a string")
    said: list[bytes] = []
    if sequence_id or priority or timeout is not None or parameters or final_response:
        said = _said(sequence_id, sequence_start, sequence_end, priority, timeout, parameters)
        if final_response:
            said.append(parameter(4, "triton_enable_empty_final_response", "bool", True))
    fields = [request_head(model_name, model_version, request_id, said)]
    contents = []
    for each in inputs:
        fields.append(each._written())
        if each._content is not None:
            contents.append(each._content)
    if outputs is not None:
        fields += [wanted._written() for wanted in outputs]
    try:
        return framed_request(fields, contents)
    except ValueError as error:
        return raise_error(str(error))


def _said(
    sequence_id: int | str,
    sequence_start: bool,
    sequence_end: bool,
    priority: int,
    timeout: int | None,
    parameters: Mapping[str, Any] | None,
) -> list[bytes]:
    """The parameters of a request."""
    said = []
    if sequence_id:
        kind = "string" if isinstance(sequence_id, str) else "int64"
        said.append(parameter(4, "sequence_id", kind, sequence_id))
        said.append(parameter(4, "sequence_start", "bool", sequence_start))
        said.append(parameter(4, "sequence_end", "bool", sequence_end))
    if priority:
        said.append(parameter(4, "priority", "uint64", priority))
    if timeout is not None:
        said.append(parameter(4, "timeout", "int64", timeout))
    for key, value in (parameters or {}).items():
        if key in TRITON_RESERVED_REQUEST_PARAMS or key.startswith(TRITON_RESERVED_REQUEST_PARAMS_PREFIX):
            raise_error(f'Parameter "{key}" is a reserved parameter and cannot be specified.')
        said.append(parameter(4, key, _kind(key, value), value))
    return said


def _kind(key: str, value: Any) -> str:
    for kind, types in (("string", str), ("bool", bool), ("int64", int), ("double", float)):
        if isinstance(value, types):
            return kind
    return raise_error(f'The parameter datatype "{type(value)}" for key "{key}" is not supported.')


class InferResult:
    """An answer. Its tensors are views of the message that came, whose memory lives as long as one of them.

    Args:
        result: a serialised ModelInferResponse, in any buffer, or such a message of protobuf.
        start, end: where in the buffer it lies; 0 and 0: it is all of it.
    """

    __slots__ = ("_end", "_message", "_proto", "_read", "_start")

    def __init__(self, result: Any, start: int = 0, end: int = 0) -> None:
        self._proto = None
        if hasattr(result, "SerializeToString"):
            self._proto = result
            result = result.SerializeToString()
        self._message = result
        self._start = start
        self._end = end
        self._read: Any = None

    def _found(self) -> Any:
        if self._read is None:
            try:
                self._read = read_response(self._message, self._start, self._end)
            except ValueError as error:
                raise unreadable(error) from None
        return self._read

    @property
    def model_name(self) -> str:
        """Of the model that answered."""
        return str(self._found()[0])

    @property
    def model_version(self) -> str:
        """Of the model that answered."""
        return str(self._found()[1])

    @property
    def id(self) -> str:
        """Of the request."""
        return str(self._found()[2])

    @property
    def names(self) -> list[str]:
        """Of the outputs."""
        return list(self._found()[3])

    def as_numpy(self, name: str) -> np.ndarray | None:
        """The tensor of an output; None: there is no such output.

        Raises:
            InferenceServerException: it is in shared memory, or the server says of it what does not fit together.
        """
        import numpy as np

        found = self._found()[3].get(name)
        if found is None:
            return None
        datatype, shape, offset, size = found
        known = triton_to_np_dtype(datatype)
        if known is None or any(each < 0 for each in shape):
            raise unreadable(f"output '{name}' is of {datatype!r} and {list(shape)}, which no tensor is")
        if offset < 0:
            return self._from_contents(name, datatype, shape)
        if datatype == "BYTES":
            return self._strings(name, shape, offset, size)
        kind = np.dtype(known)
        expected = prod(shape) * kind.itemsize
        if size == 0:
            if expected:
                raise_error(IN_SHARED_MEMORY.format(name))
            return np.empty(shape, kind)
        if size != expected:
            raise unreadable(f"output '{name}' has {size} bytes, its datatype and shape say {expected}")
        array = np.frombuffer(self._message, kind, size // kind.itemsize, offset)
        if size < ALIGNED_BELOW and not array.flags.aligned:
            array = array.copy()
        return array.reshape(shape)

    def _strings(self, name: str, shape: tuple[int, ...], offset: int, size: int) -> np.ndarray:
        import numpy as np

        try:
            strings = unpacked_strings(memoryview(self._message)[offset : offset + size]) if size else []
        except ValueError as error:
            raise unreadable(f"output '{name}': {error}") from None
        expected = prod(shape)
        if expected and not strings:
            raise_error(IN_SHARED_MEMORY.format(name))
        if len(strings) != expected:
            raise unreadable(f"output '{name}' has {len(strings)} strings, its shape says {expected}")
        elements = np.empty(len(strings), dtype=np.object_)
        elements[:] = strings
        return elements.reshape(shape)

    def _from_contents(self, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Of a server that has tensors in fields of their own."""
        import numpy as np

        contents = self.get_output(name).contents
        fields = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "FP32": "fp32_contents", "FP64": "fp64_contents"}
        width = "64" if datatype.endswith("64") else ""
        unsigned = "u" if datatype.startswith("U") else ""
        field = fields.get(datatype, f"{unsigned}int{width}_contents")
        values = list(getattr(contents, field))
        if len(values) != prod(shape):
            raise unreadable(f"output '{name}' has {len(values)} elements, its shape says {prod(shape)}")
        array = np.empty(len(values), triton_to_np_dtype(datatype))
        array[:] = values
        return array.reshape(shape)

    def as_torch(self, name: str) -> Any:
        """The tensor of an output for torch, of the same memory as `as_numpy`; None: there is no such output."""
        import torch

        array = self.as_numpy(name)
        if array is None:
            return None
        found = self._found()[3][name]
        if found[0] == "BF16":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def get_output(self, name: str, as_json: bool = False) -> Any:
        """The InferOutputTensor of an output, or what it is in JSON; None: there is no such output."""
        for output in self.get_response().outputs:
            if output.name == name:
                return message_as_json(output) if as_json else output
        return None

    def get_response(self, as_json: bool = False) -> Any:
        """The ModelInferResponse, or what it is in JSON."""
        if self._proto is None:
            from inferd_client.pb import grpc_service_pb2 as pb

            end = self._end or len(self._message)
            self._proto = parsed(pb.ModelInferResponse, memoryview(self._message)[self._start : end])
        return message_as_json(self._proto) if as_json else self._proto


def unreadable(what: object) -> InferenceServerException:
    """What an answer is for the caller that a server should not have sent."""
    return InferenceServerException(f"the answer cannot be read: {what}", "StatusCode.INTERNAL")


def parsed(kind: Any, content: Any) -> Any:
    """A message of protobuf.

    Raises:
        InferenceServerException: it is none.
    """
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(bytes(content))
    except DecodeError as error:
        raise unreadable(error) from None


def message_as_json(message: Any) -> Any:
    """What a message is in JSON, with the names of its fields as they are."""
    import json

    from google.protobuf.json_format import MessageToJson

    return json.loads(MessageToJson(message, preserving_proto_field_name=True))
