"""CUDA graphs: the model's work for batches of given shapes, captured on each buffer set and launched as one.

A graph contains addresses. So each buffer set has its own graphs, and a graph has its own memory for inputs and
outputs, which no one else gets while the graph can be launched. This memory is zeroed before the model first computes
with it, and so are the rows that a smaller batch does not use, each time: uninitialised values could be indexes out of
range, which would make the device unusable.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free

from inferd._native.atomic cimport fetch_add64
from inferd._native.cuda.device cimport Graph
from inferd._native.cuda.driver cimport DevicePointer, cuda
from inferd._native.gpu.batch cimport GpuBatch, batch_on_device
from inferd._native.gpu.bufferset cimport SETS, BufferSet, Output, Pipeline, clear_outputs
from inferd._native.gpu.transfer cimport Transfer
from inferd._native.memory.resource cimport Lent
from inferd._native.protobuf.datatype cimport datatype_size
from inferd._native.request.lane cimport LaneHandle
from inferd._native.request.signature cimport TensorSignature


cdef class Captured:
    """A graph of the model's work on one set of buffers, and the outputs that it leaves."""

    cdef Graph graph
    cdef Lent inputs
    cdef list outputs        # GivenOutput of each output, None where the model gave none
    cdef list holds          # owners of their memory, and all else that the work needs


cdef class GivenOutput:
    cdef Output output


cdef inline uint32_t model_rank(const TensorSignature *tensor) noexcept nogil:
    return tensor.model_rank if tensor.reshaped else tensor.rank


cdef inline const int64_t *model_dims(const TensorSignature *tensor) noexcept nogil:
    if tensor.reshaped:
        return tensor.model_dims
    return tensor.dims


@cython.no_gc
cdef class Graphs:
    """The graphs of one instance; none until `capture`."""

    def __cinit__(self, LaneHandle lane not None, Transfer transfer not None, Pipeline pipeline not None):
        self.signature = &lane.lane.signature
        self.input_count = self.signature.input_count + self.signature.supplied_count
        self.transfer = transfer
        self.pipeline = pipeline
        self.captured = []

    def __dealloc__(self):
        cdef int i
        for i in range(self.count):
            free(self.fitting[i].shapes)

    def capture(self, instance, specs) -> None:
        """Record the model's work, on the instance's thread, before it serves.

        The instance is asked to submit each batch once for real and once to be recorded, on each set of buffers.

        Args:
            instance: an inferd.backends.api.GpuInstance.
            specs: an inferd.backends.api.GraphSpec for each graph.

        Raises:
            ValueError: an input has no one shape, or there are too many graphs.
            CudaError: something that the model does cannot be recorded.
        """
        cdef Captured captured
        cdef int i, k
        if len(specs) > GRAPHS:
            raise ValueError(f"at most {GRAPHS} CUDA graphs are captured for one model, got {len(specs)}")
        for spec in sorted(specs, key=lambda spec: spec.rows):
            self.add(spec.rows, spec.lowest, spec.shapes)
        self.captured = [[None] * SETS for _ in specs]
        for k in range(SETS):
            for i in range(self.count):
                self.pipeline.sets[k].graph = i
                captured = self.capture_one(instance, &self.pipeline.sets[k])
                self.inputs[i][k] = <DevicePointer>captured.inputs.block.data
                self.captured[i][k] = captured
            self.pipeline.sets[k].batch.rows = 0

    def clear(self) -> None:
        """Give the graphs and their memory back."""
        self.captured = []

    cdef size_t size_of(self, int index, uint32_t input) noexcept nogil:
        cdef const TensorSignature *tensor = &self.signature.inputs[input]
        cdef size_t size = datatype_size(tensor.datatype)
        cdef uint32_t k
        if self.signature.max_batch_size > 0:
            size *= self.fitting[index].rows
        for k in range(model_rank(tensor)):
            size *= <size_t>self.fitting[index].shapes[input].dims[k]
        return size

    cdef int add(self, int rows, int lowest, shapes) except -1:
        cdef Fitting *fitting = &self.fitting[self.count]
        cdef const TensorSignature *tensor
        cdef uint32_t i, k
        fitting.rows = rows
        fitting.lowest = lowest
        fitting.shapes = <Dims *>calloc(self.input_count + 1, sizeof(Dims))
        if fitting.shapes == NULL:
            raise MemoryError
        self.count += 1
        for i in range(self.input_count):
            tensor = &self.signature.inputs[i]
            name = tensor.name.data[:tensor.name.size].decode()
            if tensor.optional or tensor.ragged:
                raise ValueError(f"CUDA graphs need inputs of one shape, but '{name}' is "
                                 f"{'optional' if tensor.optional else 'ragged'}")
            if tensor.values:
                raise ValueError(f"CUDA graphs cannot follow the values of a shape tensor, which '{name}' is")
            shape = shapes.get(name)
            for k in range(model_rank(tensor)):
                fitting.shapes[i].dims[k] = model_dims(tensor)[k] if shape is None else shape[k]
                if fitting.shapes[i].dims[k] < 0:
                    raise ValueError(f"CUDA graphs need inputs of one shape, but '{name}' varies: "
                                     "give its shape in graph_spec.input")
        return 0

    cdef object capture_one(self, instance, BufferSet *set):
        cdef Captured captured = Captured.__new__(Captured)
        cdef list holds = self.pipeline.holds[set.index]
        cdef list kept = [None] * set.output_count
        cdef object lent
        self.assume_inputs(set)
        self.transfer.lay_out(set, set.batch.rows)
        captured.inputs = self.transfer.keep(max(set.uploaded_size, <size_t>1))
        set.base = <DevicePointer>captured.inputs.block.data
        try:
            self.record(instance, set, kept, captured)
        finally:
            with nogil:
                self.transfer.synchronize()  # the warm-up run must have ended before its memory goes
            captured.outputs = outputs_of(set)
            clear_outputs(set)
            captured.holds = [kept, *holds]
            holds.clear()
            set.holding = False
        for lent in (captured.inputs, *kept):
            if lent is not None:
                fetch_add64(&self.transfer.held, <int64_t>(<Lent>lent).block.size)
        return captured

    cdef int record(self, instance, BufferSet *set, list kept, object captured) except -1:
        # run the work once, then record it as a graph
        cdef GpuBatch batch = batch_on_device(self.transfer, self.pipeline, set, kept)
        try:
            instance.submit(batch)
            self.transfer.compute.synchronize()
            clear_outputs(set)
            self.pipeline.holds[set.index].clear()
            self.transfer.compute.begin_capture()
            try:
                instance.submit(batch)
            finally:
                (<Captured>captured).graph = self.transfer.compute.end_capture()
        finally:
            batch.set = NULL
        return 0

    cdef void assume_inputs(self, BufferSet *set) noexcept:
        # set the inputs as a batch for this graph would have them
        cdef const Fitting *fitting = &self.fitting[set.graph]
        cdef uint32_t batches = 1 if self.signature.max_batch_size > 0 else 0
        cdef uint32_t i, k, rank
        set.batch.rows = fitting.rows
        for i in range(self.input_count):
            rank = model_rank(&self.signature.inputs[i])
            set.batch.inputs[i].present = True
            set.batch.inputs[i].block = NULL
            set.batch.inputs[i].rank = rank + batches
            set.batch.inputs[i].shape[0] = fitting.rows
            set.batch.inputs[i].size = self.size_of(set.graph, i)
            for k in range(rank):
                set.batch.inputs[i].shape[k + batches] = fitting.shapes[i].dims[k]

    cdef uint32_t choose(self, BufferSet *set) noexcept nogil:
        cdef int i
        set.graph = -1
        set.base = 0
        for i in range(self.count):
            if self.fitting[i].lowest <= set.batch.rows <= self.fitting[i].rows and self.fits(i, set):
                set.graph = i
                set.base = self.inputs[i][set.index]
                return self.fitting[i].rows
        return set.batch.rows

    cdef bint fits(self, int index, const BufferSet *set) noexcept nogil:
        cdef uint32_t batches = 1 if self.signature.max_batch_size > 0 else 0
        cdef uint32_t i, k
        for i in range(self.input_count):
            if not set.batch.inputs[i].present:
                return False
            for k in range(model_rank(&self.signature.inputs[i])):
                if set.batch.inputs[i].shape[k + batches] != self.fitting[index].shapes[i].dims[k]:
                    return False
        return True

    cdef int launch(self, BufferSet *set) except -1:
        cdef Captured captured = self.captured[set.graph][set.index]
        cdef uint32_t i
        for i in range(set.output_count):
            if captured.outputs[i] is not None:
                set.outputs[i] = (<GivenOutput>captured.outputs[i]).output
        self.transfer.failed(set, cuda.graph_launch(captured.graph.graph, self.transfer.compute.stream),
                             "cuGraphLaunch")
        return 0


cdef list outputs_of(BufferSet *set):
    cdef list outputs = []
    cdef GivenOutput given
    cdef uint32_t i
    for i in range(set.output_count):
        given = None
        if set.outputs[i].given:
            given = GivenOutput.__new__(GivenOutput)
            given.output = set.outputs[i]
            set.outputs[i].given = False
        outputs.append(given)
    return outputs
