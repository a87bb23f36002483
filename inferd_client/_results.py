"""The response to a request, for both clients."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from inferd_client._native.messages import Message, array_of, read_response, unpacked_strings
from inferd_client.utils import NUMBERS, InferenceServerException, raise_error, triton_to_np_dtype

if TYPE_CHECKING:
    import numpy as np

IN_SHARED_MEMORY = "output '{}' has no bytes in the response: it is in shared memory"
ALIGNED_BELOW = 1 << 14
"""A tensor of fewer bytes is copied if its memory is not aligned for its datatype."""


class InferResult:
    """A response. Its tensors are views of the received message, whose memory lives as long as one of them.

    Args:
        result: a serialised ModelInferResponse, in any buffer, or a ModelInferResponse of protobuf.
        start, end: where in the buffer the message begins and ends; 0 and 0: it is the whole buffer.
    """

    __slots__ = ("_end", "_message", "_proto", "_read", "_start")

    def __init__(self, result: Any, start: int = 0, end: int = 0) -> None:
        self._proto = None
        if type(result) is not Message and hasattr(result, "SerializeToString"):
            self._proto = result
            result = result.SerializeToString()
        self._message = result
        self._start = start
        self._end = end
        self._read: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: only the message is copied, to memory that can be written to."""
        return type(self), (bytearray(self.as_bytes()),)

    def _found(self) -> Any:
        if self._read is None:
            try:
                self._read = read_response(self._message, self._start, self._end)
            except ValueError as error:
                raise unreadable(error) from None
        return self._read

    @property
    def model_name(self) -> str:
        """The name of the model that answered."""
        return str(self._found()[0])

    @property
    def model_version(self) -> str:
        """The version of the model that answered."""
        return str(self._found()[1])

    @property
    def id(self) -> str:
        """The id of the request."""
        return str(self._found()[2])

    @property
    def names(self) -> list[str]:
        """The names of the outputs."""
        return list(self._found()[3])

    def as_numpy(self, name: str) -> np.ndarray | None:
        """The tensor of an output; None: there is no such output.

        Raises:
            InferenceServerException: the output is in shared memory, or its size contradicts its datatype and shape.
        """
        try:
            array: np.ndarray | None = array_of(self._message, self._start, self._end, name, *_arrays())
            return self._any_output(name) if array is None else array
        except (OverflowError, ValueError) as error:  # numpy has no array of this shape, or no such element
            raise unreadable(error) from None

    def _any_output(self, name: str) -> np.ndarray | None:
        import numpy as np

        found = self._found()[3].get(name)
        if found is None:
            return None
        datatype, shape, offset, size = found
        known = triton_to_np_dtype(datatype)
        if known is None or any(each < 0 for each in shape):
            raise unreadable(f"output '{name}': there is no tensor of datatype {datatype!r} and shape {list(shape)}")
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
            raise unreadable(f"output '{name}' has {size} bytes, but its datatype and shape need {expected}")
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
            raise unreadable(f"output '{name}' has {len(strings)} strings, but its shape needs {expected}")
        elements = np.empty(len(strings), dtype=np.object_)
        elements[:] = strings
        return elements.reshape(shape)

    def _from_contents(self, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor of a response with typed contents in place of raw bytes."""
        import numpy as np

        contents = self.get_output(name).contents
        fields = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "FP32": "fp32_contents", "FP64": "fp64_contents"}
        width = "64" if datatype.endswith("64") else ""
        unsigned = "u" if datatype.startswith("U") else ""
        field = fields.get(datatype, f"{unsigned}int{width}_contents")
        values = list(getattr(contents, field))
        if len(values) != prod(shape):
            raise unreadable(f"output '{name}' has {len(values)} elements, but its shape needs {prod(shape)}")
        array = np.empty(len(values), triton_to_np_dtype(datatype))
        array[:] = values
        return array.reshape(shape)

    def as_torch(self, name: str) -> Any:
        """The output as a torch tensor, which shares the memory of `as_numpy`; None: there is no such output."""
        import torch

        array = self.as_numpy(name)
        if array is None:
            return None
        found = self._found()[3][name]
        if found[0] == "BF16":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def as_bytes(self) -> bytes:
        """The serialised ModelInferResponse."""
        return bytes(memoryview(self._message)[self._start : self._end or len(self._message)])

    def get_output(self, name: str, as_json: bool = False) -> Any:
        """The InferOutputTensor of an output, or its JSON; None: there is no such output."""
        for output in self.get_response().outputs:
            if output.name == name:
                return message_as_json(output) if as_json else output
        return None

    def get_response(self, as_json: bool = False) -> Any:
        """The ModelInferResponse, or its JSON."""
        if self._proto is None:
            from inferd_client.pb import grpc_service_pb2 as pb

            self._proto = parsed(pb.ModelInferResponse, self.as_bytes())
        return message_as_json(self._proto) if as_json else self._proto


@cache
def _arrays() -> tuple[Any, dict[str, tuple[Any, int]]]:
    """numpy's array type; and for each datatype of raw elements numpy's type and the bytes of an element."""
    import numpy as np

    types = [(datatype, np.dtype(triton_to_np_dtype(datatype))) for datatype in (*NUMBERS, "BF16")]
    return np.ndarray, {datatype: (kind, kind.itemsize) for datatype, kind in types}


def unreadable(what: object) -> InferenceServerException:
    """The exception for a malformed response; `what` is the mistake in it."""
    return InferenceServerException(f"the response cannot be read: {what}", "StatusCode.INTERNAL")


def parsed(kind: Any, content: Any) -> Any:
    """A message of protobuf.

    Raises:
        InferenceServerException: the content is not such a message.
    """
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(bytes(content))
    except DecodeError as error:
        raise unreadable(error) from None


def message_as_json(message: Any) -> Any:
    """A message as JSON, with its field names unchanged."""
    import json

    from google.protobuf.json_format import MessageToJson

    return json.loads(MessageToJson(message, preserving_proto_field_name=True))
