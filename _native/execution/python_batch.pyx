"""Batches as Python backends see them: inputs as arrays over all requests, and outputs in the same form."""

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

from inferd._native.execution.batch cimport NativeBatch, batch_reschedule
from inferd._native.execution.scatter cimport batch_set_output, batch_wants
from inferd._native.execution.supply cimport GatheredInput
from inferd._native.execution.view cimport block_of_array, view_new
from inferd._native.memory.resource cimport Block, block_take
from inferd._native.protobuf.codec cimport Str
from inferd._native.protobuf.datatype cimport DT_BYTES, datatype_name, datatype_size
from inferd._native.request.request cimport Request
from inferd._native.request.signature cimport MAX_RANK, TensorSignature, input_find, output_find
from inferd._native.tensors.placement cimport place_of_output

from math import prod


cdef bytes encoded_element(object element, str name):
    if isinstance(element, str):
        return element.encode()
    if not isinstance(element, (bytes, bytearray, memoryview)):
        raise ValueError(f"output '{name}' must have elements of bytes or str, got {type(element).__name__}")
    return bytes(element)


cdef bint overlaps_inputs(const Request *request, const uint8_t *data, size_t size) noexcept nogil:
    # a model may write to its output before it has read all of its inputs
    cdef uint32_t i
    for i in range(request.signature.input_count):
        if (request.inputs[i].present and request.inputs[i].data < data + size
                and data < request.inputs[i].data + request.inputs[i].size):
            return True
    return False


cdef class Batch:
    """The requests that one execution computes together.

    Inputs are gathered: for a model with a batch dimension they have the shape (rows, *dims). Outputs are handed over
    in the same form, and split among the requests.
    """

    def __init__(self):
        raise TypeError("Batch cannot be created from Python")

    cdef int check(self) except -1:
        if self.batch == NULL:
            raise ValueError("this batch has been answered")
        return 0

    cdef uint32_t output_index(self, str name) except? 0xffffffff:
        cdef bytes wanted = name.encode()
        cdef int found
        self.check()
        found = output_find(self.batch.signature, Str(wanted, <uint32_t>len(wanted)))
        if found < 0:
            raise ValueError(f"the model has no output '{name}'")
        return <uint32_t>found

    @property
    def rows(self) -> int:
        """Rows of all requests: the size of the batch dimension; 1 for a model without one."""
        self.check()
        return self.batch.rows

    @property
    def request_count(self) -> int:
        """Requests in this batch."""
        self.check()
        return self.batch.count

    def input(self, name: str):
        """The data of an input over all requests; a supplied input has the data that the batch makes.

        None for an optional input that the requests leave out.
        """
        cdef GatheredInput *data
        cdef bytes wanted = name.encode()
        cdef int found
        self.check()
        found = input_find(self.batch.signature, Str(wanted, <uint32_t>len(wanted)))
        if found < 0:
            raise ValueError(f"the model has no input '{name}'")
        data = &self.batch.inputs[found]
        if not data.present:
            return None
        return view_new(data.block, data.data, data.size, self.batch.signature.inputs[found].datatype, data.shape,
                        data.rank, self.batch.writes_inputs)

    def wants(self, name: str) -> bool:
        """Whether any request asked for this output."""
        return batch_wants(self.batch, self.output_index(name))

    @property
    def placed(self) -> bool:
        """Whether some outputs may have a `place`."""
        self.check()
        return self.batch.count == 1 and self.batch.requests[0].placements != NULL

    def place(self, name: str, shape=None):
        """A writable view of the client's shared memory, where the model may write this output itself.

        Then hand over an array over the view by `set_output`. None if there is no such place: most of the time.

        Args:
            name: of the output.
            shape: that it will have, with the batch dimension; needed unless the configuration fixes it.
        """
        cdef uint32_t index = self.output_index(name)
        cdef const TensorSignature *tensor = &self.batch.signature.outputs[index]
        cdef int64_t dims[MAX_RANK]
        cdef uint8_t *data
        cdef Block *block = NULL
        if not self.placed or index >= self.batch.signature.output_count or tensor.state:
            return None
        if tensor.reshaped or tensor.like_input or tensor.datatype == DT_BYTES or (tensor.variable and shape is None):
            return None
        if tensor.cut_like:
            return None  # the padding is not for the client
        if shape is None:
            shape = [self.batch.rows] if self.batch.signature.max_batch_size > 0 else []
            shape += [tensor.dims[i] for i in range(tensor.rank)]
        size = prod(shape) * datatype_size(tensor.datatype)
        if size >> 62 or len(shape) > MAX_RANK:
            return None
        for i, dim in enumerate(shape):
            dims[i] = dim
        data = place_of_output(self.batch.requests[0], index, size, &block)
        if data == NULL or overlaps_inputs(self.batch.requests[0], data, size):
            return None
        return view_new(block, data, size, tensor.datatype, dims, len(shape), True)

    def set_output(self, name: str, array) -> None:
        """Hand over an output for all rows.

        Args:
            name: of the output.
            array: a C-contiguous numpy array or anything with `__dlpack__` on the CPU. It is taken over without a copy:
                do not write to it afterwards.

        Raises:
            ValueError: wrong datatype, shape or memory layout.
        """
        cdef uint32_t index = self.output_index(name)
        cdef const uint8_t *data = NULL
        cdef size_t size = 0
        cdef int64_t shape[MAX_RANK]
        cdef uint32_t rank = 0
        cdef Block *block = block_of_array(array, self.batch.signature.outputs[index].datatype, name,
                                           &data, &size, shape, &rank)
        self.hand_over(index, block, data, size, shape, rank)

    def set_bytes_output(self, name: str, elements, shape) -> None:
        """Hand over a BYTES output: `elements` are bytes or str in row-major order, as many as `shape` says."""
        cdef uint32_t index = self.output_index(name)
        cdef int64_t dims[MAX_RANK]
        cdef uint32_t rank = <uint32_t>len(shape)
        cdef list encoded = [encoded_element(e, name) for e in elements]
        cdef size_t size = 4 * len(encoded)
        cdef Block *block
        cdef uint8_t *at
        cdef uint32_t length
        cdef bytes element
        if self.batch.signature.outputs[index].datatype != DT_BYTES:
            raise ValueError(f"output '{name}' is not BYTES but "
                             f"{datatype_name(self.batch.signature.outputs[index].datatype).decode()}")
        if rank > MAX_RANK:
            raise ValueError(f"output '{name}' has {rank} dimensions, at most {MAX_RANK} are served")
        for i in range(rank):
            dims[i] = shape[i]
        for element in encoded:
            size += len(element)
        block = block_take(size)
        if block == NULL:
            raise MemoryError(f"no memory for {size} bytes of output '{name}'")
        at = block.data
        for element in encoded:
            length = <uint32_t>len(element)
            memcpy(at, &length, 4)
            memcpy(at + 4, <const char *>element, length)
            at += 4 + length
        self.hand_over(index, block, block.data, size, dims, rank)

    def reschedule(self, index: int) -> None:
        """Give request `index` back, to be executed again; it is not answered by this batch.

        For models with `iterative_sequence`. Outputs that were handed over for its states become its states.

        Raises:
            ValueError: there is no such request, or the model's sequences are not iterative.
        """
        self.check()
        if not 0 <= index < self.batch.count:
            raise ValueError(f"the batch has {self.batch.count} requests, there is no request {index}")
        if not batch_reschedule(self.batch, index):
            raise ValueError("only requests of a model with 'iterative_sequence' can be rescheduled")

    cdef int hand_over(self, uint32_t index, Block *block, const uint8_t *data, size_t size, const int64_t *shape,
                       uint32_t rank) except -1:
        cdef bint good
        with nogil:
            good = batch_set_output(self.batch, index, block, data, size, shape, rank)
        if not good:
            raise ValueError(self.batch.details.decode() if self.batch.details != NULL else "out of memory")
        return 0


cdef Batch batch_for_python(NativeBatch *batch, str instance_name):
    cdef Batch out = Batch.__new__(Batch)
    out.batch = batch
    out.instance_name = instance_name
    return out
