"""Records of EXECUTE read into requests, and responses written into records, as `protocol` lays them out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Any, Callable

from . import protocol as p
from .datatypes import BYTES
from .errors import TritonModelException
from .memory import ANY_MEMORY
from .received import ReceivedRequest
from .regions import Regions
from .request import NO_TRACE, RELEASE_ALL, InferenceTrace
from .response import InferenceResponse
from .sender import make_sender
from .shortage import error_response, without
from .tensor import Tensor, received, received_on_gpu, wire_bytes

if TYPE_CHECKING:
    from .lent import OutputMemory
    from .runtime import Runtime

SHAPES = tuple(Struct(f"<{rank}q") for rank in range(33))

# A response with one output up to its data: head, tensor and shape in one go.
_ONE_OUTPUT = tuple(Struct(p.RESPONSE_HEAD.format + p.TENSOR.format[1:] + f"{rank}q") for rank in range(33))
_PADDING = tuple(bytes(size) for size in range(8))

MOST_DIMENSIONS = 16
"""The largest number of dimensions of a tensor, as in the server."""

MOST_HEADS = 256
"""Heads of small outputs that are kept: a model's outputs have few shapes, or ever new ones."""

SMALL = 4096
"""An output of at most this many bytes goes into the record, a larger one into memory of its own."""

_TENSOR = p.TENSOR
_TENSOR_SIZE = p.TENSOR.size
_REQUEST = p.REQUEST
_REQUEST_SIZE = p.REQUEST.size
_RESPONSE_HEAD = p.RESPONSE_HEAD
_new_request = ReceivedRequest.__new__


_structs: dict[int, Struct] = {}


def _numbers(count: int) -> Struct:
    """So many u32."""
    found = _structs.get(count)
    if found is None:
        found = _structs[count] = Struct(f"<{count}I")
    return found


MOST_WARNINGS = 16


class Names:
    """The model's inputs and outputs, from CONFIGURE.

    Args:
        inputs, outputs: by index.
        warn: writes to the log.

    Attributes:
        inputs: names by index.
        outputs: names by index.
        output_index: indices of outputs by name.
        small_heads: records of one small output up to its data, by its name, datatype and shape.
    """

    def __init__(self, inputs: list[str], outputs: list[str], warn: Callable[[str], None]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.output_index = {name: index for index, name in enumerate(outputs)}
        self.small_heads: dict[tuple[str, int, tuple[int, ...]], bytes] = {}
        self._unknown: set[str] = set()
        self._warn = warn

    def tell_unknown(self, output: str) -> None:
        """Warn once of an output that the configuration does not have."""
        if output not in self._unknown and len(self._unknown) < MOST_WARNINGS:
            self._unknown.add(output)
            self._warn(f"output '{output}' is left out: the configuration has only {self.outputs}")


class RequestReader:
    """Makes requests of the records of EXECUTE.

    Args:
        runtime: its channel answers the requests.
        names: of inputs and outputs.
        model_name, model_version: of the model.
        decoupled: each request may have any number of responses.
        regions: maps shared memory of clients.

    Attributes:
        reached_gpu: some request had an input on a GPU.
        unreadable: by key, why requests of the last record cannot be executed.
    """

    def __init__(
        self,
        runtime: Runtime,
        names: Names,
        model_name: str,
        model_version: int,
        decoupled: bool,
        regions: Regions,
    ) -> None:
        self._runtime = runtime
        self._names = names
        self._model = model_name
        self._version = model_version
        self._decoupled = decoupled
        self._regions = regions
        self.reached_gpu = False
        self.unreadable: dict[int, str] = {}

    def read(self, record: bytearray | memoryview, arena: Callable[[], Any]) -> list[ReceivedRequest]:
        """The requests.

        Args:
            record: of EXECUTE; its INLINE tensors lie in it and keep it. One in the arena has none.
            arena: called for the memory that ARENA tensors lie in and keep, if there are any.
        """
        count = p.EXECUTE_HEAD.unpack_from(record)[0]
        return [
            self._request(record, offset, arena) for offset in _numbers(count).unpack_from(record, p.EXECUTE_HEAD.size)
        ]

    def _request(self, record: bytearray | memoryview, at: int, arena: Callable[[], Any]) -> ReceivedRequest:
        number, flags, count, _, extra, _ = _REQUEST.unpack_from(record, at)
        at += _REQUEST_SIZE
        names = self._names.inputs
        inputs = []
        while count:
            index, datatype, rank, place, offset, size = _TENSOR.unpack_from(record, at)
            at += _TENSOR_SIZE
            shape = SHAPES[rank].unpack_from(record, at)
            at += rank << 3
            if place < p.CUDA:
                inputs.append(received(names[index], datatype, shape, arena() if place else record, offset, size))
            elif place == p.CUDA:
                inputs.append(self._on_gpu(record, at, names[index], datatype, shape, offset))
                at += p.CUDA_MEMORY.size
            else:
                region = p.REGION_MEMORY.unpack_from(record, at)
                at += p.REGION_MEMORY.size
                try:
                    memory, offset = self._regions.map(region, offset, size)
                except TritonModelException as error:
                    self.unreadable[number] = f"input '{names[index]}' cannot be read: {error}"
                else:
                    inputs.append(received(names[index], datatype, shape, memory, offset, size))
            count -= 1
        request = _new_request(ReceivedRequest)
        request._runtime = self._runtime
        request._key = number
        request._inputs = inputs
        request._flags = flags
        request._release = RELEASE_ALL
        request._decoupled = self._decoupled
        request._model_name = self._model
        request._model_version = self._version
        request._preferred_memory = ANY_MEMORY
        if extra:
            self._read_extra(request, record, extra)
        else:
            request._request_id = ""
            request._correlation_id = request._timeout = request._priority = 0
            request._wanted = request._parameters = None
            request._trace = NO_TRACE
            request._outputs = self._names.outputs
        # A decoupled model's request outlives `execute`: its sender guarantees a final response.
        request._sender = make_sender(self._runtime, number, True, request._wanted) if self._decoupled else None
        return request

    def _on_gpu(
        self, record: bytearray | memoryview, at: int, name: str, datatype: int, shape: tuple[int, ...], offset: int
    ) -> Tensor:
        from .device import SharedTensor  # imported for the first tensor on a GPU

        self.reached_gpu = True
        handle, device, _ = p.CUDA_MEMORY.unpack_from(record, at)
        return received_on_gpu(name, SharedTensor(handle, device, offset, datatype, shape))

    def _read_extra(self, request: ReceivedRequest, record: bytearray | memoryview, at: int) -> None:
        timeout, priority, correlation, wanted, *sizes, _ = p.EXTRA.unpack_from(record, at)
        at += p.EXTRA.size
        if wanted == p.ALL_OUTPUTS:
            request._wanted = None
            request._outputs = self._names.outputs
        else:
            indices = Struct(f"<{wanted}H").unpack_from(record, at)
            at += 2 * wanted
            request._wanted = frozenset(indices)
            request._outputs = [self._names.outputs[index] for index in indices]
        texts = []
        for size in sizes:
            texts.append(str(record[at : at + size], "utf-8"))
            at += size
        request_id, correlation_id, parameters, trace = texts
        request._request_id = request_id
        request._correlation_id = correlation_id or correlation
        request._timeout = timeout
        request._priority = priority
        request._parameters = json.loads(parameters) if parameters else None
        request._trace = InferenceTrace(request._key, trace) if trace else NO_TRACE


# ---------------------------------------------------------------------------------------------------------------------
# Responses


def _parameter(name: str, value: Any) -> bytes:
    key = name.encode()
    text = b""
    if isinstance(value, bool):
        kind, bits = p.PARAMETER_BOOL, int(value).to_bytes(8, "little")
    elif isinstance(value, int):
        kind = p.PARAMETER_INT64 if value < 1 << 63 else p.PARAMETER_UINT64
        bits = (value & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
    elif isinstance(value, str):
        kind, bits, text = p.PARAMETER_STRING, bytes(8), value.encode()
    else:
        kind, bits = p.PARAMETER_DOUBLE, Struct("<d").pack(value)
    return p.PARAMETER.pack(len(key), kind, 0, len(text)) + bits + key + text


def _one_output(index: int, tensor: Tensor, place: int, offset: int, size: int, data: bytes) -> bytes:
    """The record of a response with one output; `data` is that of an INLINE output, and empty for others."""
    return _padded(_one_head(index, tensor, place, offset, size, len(data)), data)


def _padded(head: bytes, data: bytes) -> bytes:
    return b"".join((head, data, _PADDING[-len(data) & 7]))


def _one_head(index: int, tensor: Tensor, place: int, offset: int, size: int, inline: int) -> bytes:
    """The record of a response with one output, up to its `inline` bytes of data."""
    shape = tensor._shape
    rank = len(shape)
    layout = _ONE_OUTPUT[rank]
    total = (layout.size + inline + 7) & -8
    return layout.pack(p.STATUS_OK, 0, 1, 0, 0, total, index, tensor._dtype, rank, place, offset, size, *shape)


def small_record(names: Names, response: InferenceResponse, wanted: frozenset[int] | None) -> bytes | None:
    """The record of a response with one small output and nothing else, as a stream has thousands of; None for others.

    Args:
        names: of inputs and outputs.
        response: the response.
        wanted: indices of the requested outputs; None for all.
    """
    outputs = response._outputs
    if len(outputs) != 1 or response._error is not None or response._parameters is not None:
        return None
    tensor = outputs[0]
    array = tensor._array
    if array is None or (wanted is not None and names.output_index.get(tensor._name) not in wanted):
        return None
    head = names.small_heads.get((tensor._name, tensor._dtype, tensor._shape)) or _small_head(names, tensor, array)
    if head is None:
        return None
    return _padded(head, array.tobytes())


def _small_head(names: Names, tensor: Tensor, array: Any) -> bytes | None:
    """The record of such a response up to its data, kept for the next response; None: the output is not small."""
    index = names.output_index.get(tensor._name)
    rank = len(tensor._shape)
    if array.nbytes > SMALL or tensor._dtype == BYTES or index is None or rank > MOST_DIMENSIONS:
        return None
    if len(names.small_heads) >= MOST_HEADS:
        names.small_heads.clear()
    head = _one_head(index, tensor, p.INLINE, _ONE_OUTPUT[rank].size, array.nbytes, array.nbytes)
    names.small_heads[tensor._name, tensor._dtype, tensor._shape] = head
    return head


class ResponseWriter:
    """Writes responses into one record.

    An output that is an input of its request, or a part of one, is not copied if the input lies in the arena or, as its
    client has put it there, in a region.

    Args:
        names: of inputs and outputs.
        memory: the arena.
        take: returns the offset of arena memory for an output of that size.
        regions: knows the inputs in regions.
        outputs: memory of the batch; it may have some outputs already.
    """

    __slots__ = ("_borrowed", "_memory", "_names", "_outputs", "_parts", "_regions", "_take", "size")

    def __init__(
        self,
        names: Names,
        memory: memoryview,
        take: Callable[[int], int],
        regions: Regions | None = None,
        outputs: OutputMemory | None = None,
    ) -> None:
        self._names = names
        self._memory = memory
        self._take = take
        self._regions = regions
        self._outputs = outputs
        self._parts: list[bytes] = []
        self._borrowed: list[tuple[int, tuple[int, ...]]] = []  # places of TENSORs among the parts, and their fields
        self.size = 0

    def record(self) -> bytes:
        """The record written so far."""
        return b"".join(self._parts)

    def add_status(self, status: int) -> None:
        """Add the status of a request that this record does not answer."""
        self._parts.append(_RESPONSE_HEAD.pack(status, 0, 0, 0, 0, _RESPONSE_HEAD.size))
        self.size += _RESPONSE_HEAD.size

    def add_reschedule(self, states: Sequence[Tensor]) -> None:
        """Reschedule a request, with these states changed.

        Raises:
            TritonModelException: there is no memory for a state.
        """
        if states:
            indices = [self._names.output_index[state._name] for state in states]
            self._add_tensors(p.STATUS_RESCHEDULE, list(zip(indices, states)), None, ())
        else:
            self.add_status(p.STATUS_RESCHEDULE)

    def add_error(self, code: int, text: str) -> None:
        """An error."""
        encoded = error_response(code, text)
        self._parts.append(encoded)
        self.size += len(encoded)

    def copy_borrowed(self) -> None:
        """Copy the outputs that lie in inputs which the model keeps, since it may write to them.

        A response without memory for its copy becomes an error.
        """
        refused: dict[int, str] = {}  # by places among the parts
        for at, (index, datatype, rank, place, offset, size) in self._borrowed:
            try:
                copy = self._take(size)
            except TritonModelException as error:
                refused[at] = str(error)
                continue
            self._memory[copy : copy + size] = self._memory[offset : offset + size]
            self._parts[at] = _TENSOR.pack(index, datatype, rank, place, copy, size)
        self._borrowed.clear()
        if refused:
            places = [0, *accumulate(map(len, self._parts))]
            self._parts = [without(self.record(), {places[at]: text for at, text in refused.items()})]
            self.size = len(self._parts[0])

    def add(
        self,
        response: InferenceResponse,
        wanted: frozenset[int] | None,
        inputs: Sequence[Tensor] = (),
    ) -> None:
        """Add a response, without the outputs that the request does not want.

        Args:
            response: the response.
            wanted: indices of the requested outputs; None for all.
            inputs: of the request, among which an output may lie.

        Raises:
            TritonModelException: there is no memory for an output, or it has too many dimensions.
        """
        if response._error is not None:
            self.add_error(response._error._code, response._error._message)
            return
        index_of = self._names.output_index
        tensors = []
        for tensor in response._outputs:
            index = index_of.get(tensor._name)
            if index is None:
                self._names.tell_unknown(tensor._name)
            elif wanted is None or index in wanted:
                if len(tensor._shape) > MOST_DIMENSIONS:
                    raise TritonModelException(
                        f"output '{tensor._name}' has {len(tensor._shape)} dimensions, at most {MOST_DIMENSIONS} are "
                        "served"
                    )
                tensors.append((index, tensor))
        if len(tensors) > len(index_of):  # then some come twice, and the server takes the last
            tensors = list(dict(tensors).items())
        if len(tensors) == 1 and response._parameters is None:
            self._add_one(*tensors[0], inputs)
        else:
            self._add_tensors(p.STATUS_OK, tensors, response._parameters, inputs)

    def _add_one(self, index: int, tensor: Tensor, inputs: Sequence[Tensor]) -> None:
        # The common case, without the lists of the general one.
        head = _ONE_OUTPUT[len(tensor._shape)].size
        place, offset, size, data, borrowed = self._place(tensor, self.size + head, inputs)
        if borrowed:
            self._add_tensors(p.STATUS_OK, [(index, tensor)], None, inputs)
            return
        record = _one_output(index, tensor, place, offset, size, data)
        self._parts.append(record)
        self.size += len(record)

    def _add_tensors(
        self,
        status: int,
        tensors: list[tuple[int, Tensor]],
        parameters: dict[str, Any] | None,
        inputs: Sequence[Tensor],
    ) -> None:
        encoded = b"".join(_parameter(*item) for item in parameters.items()) if parameters else b""
        head = sum(_TENSOR_SIZE + (len(tensor._shape) << 3) for _, tensor in tensors)
        at = self.size + p.align(_RESPONSE_HEAD.size + head + len(encoded))
        heads: list[bytes] = []
        datas: list[bytes] = []
        borrowed_before = len(self._borrowed)
        try:
            for index, tensor in tensors:
                shape = tensor._shape
                place, offset, size, data, borrowed = self._place(tensor, at, inputs)
                if borrowed:
                    fields = (index, tensor._dtype, len(shape), place, offset, size)
                    self._borrowed.append((len(self._parts) + 1 + len(heads), fields))
                heads.append(_TENSOR.pack(index, tensor._dtype, len(shape), place, offset, size))
                heads.append(SHAPES[len(shape)].pack(*shape))
                datas.append(data)
                datas.append(_PADDING[-len(data) & 7])
                at += p.align(len(data))
        except BaseException:
            del self._borrowed[borrowed_before:]  # an error replaces this response
            raise
        self._add(status, len(tensors), encoded, heads, datas)

    def _add(self, status: int, tensors: int, parameters: bytes, heads: list[bytes], datas: list[bytes]) -> None:
        body = _RESPONSE_HEAD.size + sum(map(len, heads)) + len(parameters)
        total = p.align(body) + sum(map(len, datas))
        head = _RESPONSE_HEAD.pack(status, 0, tensors, 0, len(parameters), total)
        self._parts += (head, *heads, parameters, _PADDING[-body & 7], *datas)
        self.size += total

    def _place(self, tensor: Tensor, at: int, inputs: Sequence[Tensor]) -> tuple[int, int, int, bytes, bool]:
        """Place, offset and bytes of a tensor, its data for the record at `at`, and whether it lies in an input.

        The data is empty, unless it goes into the record; the input is one in the arena.
        """
        array = tensor._array
        if array is not None and array.nbytes <= SMALL and tensor._dtype != BYTES:
            data = array.tobytes()
            return p.INLINE, at, len(data), data, False
        view = memoryview(wire_bytes(tensor))
        size = view.nbytes
        if size <= SMALL:
            return p.INLINE, at, size, view.tobytes(), False
        if self._outputs is not None and self._outputs.has(tensor._buffer):
            return p.ARENA, tensor._offset, size, b"", False
        found = _among(inputs, tensor, size)
        if found is not None:
            whole, offset = found
            if self._regions is None or not self._regions.have(whole._buffer):
                return p.ARENA, offset, size, b"", True
            if self._regions.is_unwritten(whole._buffer, offset, size):
                place = p.INPUT + self._names.inputs.index(whole._name)
                return place, offset - whole._offset, size, b"", False
        offset = self._take(size)
        self._memory[offset : offset + size] = view.cast("B")
        return p.ARENA, offset, size, b"", False


def address_of(array: Any) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def _among(inputs: Sequence[Tensor], tensor: Tensor, size: int) -> tuple[Tensor, int] | None:
    """The input that contains a tensor's data, and the offset in the input's buffer; None if there is none."""
    array = tensor._array
    for each in inputs:
        whole = each._buffer
        if whole is None or whole.__class__ is bytearray:  # that of a record, or a copy
            continue
        if array is None:
            offset = tensor._offset if tensor._buffer is whole else -1
        elif array.base is whole:
            offset = each._offset if array is each._array else address_of(array) - address_of(whole)
        else:
            continue
        if each._offset <= offset and offset + size <= each._offset + each._size:
            return each, offset
    return None
