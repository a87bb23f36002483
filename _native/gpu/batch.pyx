"""A batch on a device, for backends."""

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

from inferd._native.cuda.device cimport Stream
from inferd._native.cuda.driver cimport DevicePointer
from inferd._native.execution.scatter cimport batch_wants
from inferd._native.execution.supply cimport GatheredInput
from inferd._native.gpu.bufferset cimport BufferSet, Output, Pipeline, drop_output, input_address, padded_size
from inferd._native.gpu.tensor cimport address_of, tensor_new
from inferd._native.gpu.transfer cimport Transfer, place_in_region
from inferd._native.memory.resource cimport Lent
from inferd._native.protobuf.datatype cimport datatype_size
from inferd._native.request.signature cimport MAX_RANK, TensorSignature


cdef uint32_t index_of(const TensorSignature *tensors, uint32_t count, str name, str kind) except? 0xffffffff:
    cdef bytes wanted = name.encode()
    cdef uint32_t i
    for i in range(count):
        if tensors[i].name.data == wanted:
            return i
    raise ValueError(f"the model has no {kind} '{name}'")


cdef class GpuBatch:
    """A batch of requests on the device.

    Everything is submitted to `stream`, on which the inputs arrive in time; no method waits for the device. For a model
    with a batch dimension inputs have the shape (rows, *dims), and so must outputs.
    """

    def __init__(self):
        raise TypeError("GpuBatch cannot be created from Python")

    cdef int check(self) except -1:
        if self.set == NULL:
            raise ValueError("this batch has been submitted")
        return 0

    cdef uint32_t output_index(self, str name) except? 0xffffffff:
        self.check()
        return index_of(self.set.batch.signature.outputs, self.set.output_count, name, "output")

    @property
    def rows(self) -> int:
        """The size of the batch dimension; 1 for a model without one."""
        self.check()
        return self.set.rows

    @property
    def stream(self) -> Stream:
        """The stream for the model's work."""
        return self.transfer.compute

    @property
    def capturing(self) -> bool:
        """Whether this is no batch of requests, but work that is recorded as a graph."""
        return self.kept is not None

    cdef uint32_t input_index(self, str name) except? 0xffffffff:
        self.check()
        return index_of(self.set.batch.signature.inputs, self.set.input_count, name, "input")

    def input(self, name: str):
        """The input over all requests; None for an optional input that the requests leave out."""
        cdef uint32_t i = self.input_index(name)
        cdef const GatheredInput *given = &self.set.batch.inputs[i]
        cdef int64_t shape[MAX_RANK]
        if not given.present:
            return None
        memcpy(shape, given.shape, sizeof(shape))
        if self.set.rows != self.set.batch.rows:
            shape[0] = self.set.rows
        return tensor_new(self.transfer.device.ordinal, input_address(self.set, i), padded_size(self.set, i),
                          self.set.batch.signature.inputs[i].datatype, shape, given.rank)

    def host_input(self, name: str) -> bytes:
        """A copy of an input's bytes, for values that the host must know: a shape tensor.

        Raises:
            ValueError: there is no such input in this batch, or the work is recorded, so no values are known.
        """
        cdef uint32_t i = self.input_index(name)
        cdef const GatheredInput *given = &self.set.batch.inputs[i]
        if self.kept is not None or not given.present:
            raise ValueError(f"the values of input '{name}' are not known")
        return (<const char *>given.data)[:given.size]

    def wants(self, name: str) -> bool:
        """Whether any request asked for this output."""
        cdef uint32_t index = self.output_index(name)
        return self.kept is not None or batch_wants(&self.set.batch, index)

    def output(self, name: str, shape):
        """Memory for an output of this shape, to which the model must write.

        Raises:
            ValueError: there is no such output, or the shape is impossible.
            MemoryError: the device has no memory for it.
        """
        cdef uint32_t index = self.output_index(name)
        cdef Output *output = &self.set.outputs[index]
        self.shape_output(index, name, shape)
        output.address = 0 if self.kept is not None else place_in_region(self.transfer, self.set, index)
        if output.address == 0:
            self.place_output(index, name, output.size)
        output.given = True
        return tensor_new(self.transfer.device.ordinal, output.address, output.size,
                          self.set.batch.signature.outputs[index].datatype, output.shape, output.rank)

    def output_memory(self, name: str, size: int) -> int:
        """Memory for an output whose shape is not known yet; its address. `set_output_shape` must follow.

        Another call gives other memory, and the contents of the first are lost; work that uses the first may still run.

        Raises:
            ValueError: there is no such output, or this is recorded as a graph.
            MemoryError: the device has no memory for it.
        """
        cdef uint32_t index = self.output_index(name)
        if self.kept is not None:
            raise ValueError(f"the shape of output '{name}' depends on data, which no CUDA graph can follow")
        self.place_output(index, name, size)
        return self.set.outputs[index].address

    def set_output_shape(self, name: str, shape) -> None:
        """Set the shape of an output whose memory `output_memory` gave.

        Raises:
            ValueError: there is no such output or memory, it is too small for this shape, or the shape is impossible.
        """
        cdef uint32_t index = self.output_index(name)
        cdef Output *output = &self.set.outputs[index]
        self.shape_output(index, name, shape)
        if output.block == NULL or output.block.size < output.size:
            raise ValueError(f"output '{name}' of shape {list(shape)} has no memory for its {output.size} bytes")
        output.given = True

    cdef int shape_output(self, uint32_t index, str name, object shape) except -1:
        cdef Output *output = &self.set.outputs[index]
        cdef int64_t elements = 1
        if len(shape) > MAX_RANK:
            raise ValueError(f"output '{name}' has {len(shape)} dimensions, at most {MAX_RANK} are served")
        for i, dim in enumerate(shape):
            if dim < 0 or (dim and elements > (<int64_t>1 << 46) // <int64_t>dim):
                raise ValueError(f"output '{name}' has the impossible shape {list(shape)}")
            output.shape[i] = dim
            elements *= dim
        output.rank = <uint32_t>len(shape)
        output.size = <size_t>elements * datatype_size(self.set.batch.signature.outputs[index].datatype)
        return 0

    cdef int place_output(self, uint32_t index, str name, size_t size) except -1:
        # take memory for it: given back when the batch is answered, or with the graph
        cdef Output *output = &self.set.outputs[index]
        drop_output(self.set, output)
        if self.kept is not None:
            output.address = self.kept_output(index, max(size, <size_t>1))
            return 0
        output.block = self.transfer.pool.take_or_allocate(max(size, <size_t>1))
        if output.block == NULL:
            raise MemoryError(f"no memory on device {self.transfer.device.ordinal} for the {size} bytes of "
                              f"output '{name}'")
        output.address = <DevicePointer>output.block.data
        return 0

    cdef DevicePointer kept_output(self, uint32_t index, size_t size) except? 0:
        # the memory that the warm-up run has taken, unless the recorded run asks for more
        cdef Lent lent = self.kept[index]
        if lent is None or lent.block.size < size:
            lent = self.transfer.keep(size)
            self.pipeline.holds[self.set.index].append(self.kept[index])
            self.kept[index] = lent
        return <DevicePointer>lent.block.data

    def set_output(self, name: str, tensor) -> None:
        """Hand over an output that lies elsewhere on the device.

        Args:
            name: of the output.
            tensor: C-contiguous, with `__dlpack__`; made by work on `stream`. It is kept until the batch is answered.

        Raises:
            ValueError: wrong datatype, device or memory layout.
        """
        cdef uint32_t index = self.output_index(name)
        cdef Output *output = &self.set.outputs[index]
        output.address = address_of(tensor, self.transfer.device.ordinal,
                                    self.set.batch.signature.outputs[index].datatype, name, &output.size,
                                    output.shape, &output.rank)
        self.hold(tensor)
        drop_output(self.set, output)
        output.given = True

    def hold(self, owner) -> None:
        """Keep an object, which owns memory that the device reads or writes, until the batch is answered."""
        self.check()
        self.set.holding = True
        self.pipeline.holds[self.set.index].append(owner)


cdef GpuBatch batch_on_device(Transfer transfer, Pipeline pipeline, BufferSet *set, list kept):
    cdef GpuBatch batch = GpuBatch.__new__(GpuBatch)
    batch.transfer = transfer
    batch.pipeline = pipeline
    batch.set = set
    batch.kept = kept
    return batch
