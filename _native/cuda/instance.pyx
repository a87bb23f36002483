"""Instances on a GPU.

Three streams and three sets of buffers: while a batch is computed, the next one is gathered and uploaded, and the last
one is downloaded. The instance's thread only submits work and never waits for the device; what it may wait for is a
free set, and that the batch before the last one is computed, so that requests stay in the lane, where they can form
larger batches, instead of lining up on the device. A second thread waits for the device without the GIL and answers.

    thread of the instance              streams                        thread of completions
    take a batch, gather it into
    one page-locked block        copy-in   one copy of all inputs
    let the backend submit       compute   waits for it; the model      waits until computed: the next may be taken
    submit the copies back       copy-out  waits for it; the outputs    waits until copied: answers, frees the set

Requests are answered out of the page-locked block that their outputs were copied to.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from _native.atomic cimport store32
from _native.batch cimport (
    batch_begin,
    batch_fail,
    batch_finish,
    batch_free,
    batch_init,
)
from _native.bridge cimport BridgeHandle
from _native.clock cimport now_ns
from _native.cuda.device cimport Graph, Stream, use_device
from _native.cuda.driver cimport (
    CUDA_NOT_READY,
    CUDA_OK,
    EVENT_BLOCKING_SYNC,
    EVENT_DISABLE_TIMING,
    DevicePointer,
    EventHandle,
    Result,
    cuda,
    describe,
    is_sticky,
)
from _native.cuda.driver cimport check as check_call

from _native.cuda.memory cimport DevicePool, PageLocked
from _native.cuda.tensor cimport address_of, tensor_new
from _native.datatype cimport datatype_size
from _native.gather cimport batch_describe, batch_gather_to
from _native.lane cimport LaneHandle
from _native.limiter cimport ClaimHandle, claim_acquire, claim_release
from _native.memory cimport block_give, block_share, block_take, resource_refusal
from _native.rehearsal cimport Outcome, rehearsal_end, rehearsal_requests
from _native.request cimport Request
from _native.scatter cimport batch_set_output, batch_wants
from _native.signature cimport MAX_RANK, Signature, TensorSignature
from _native.text cimport format_text, text_or_no_memory
from _native.threads cimport (
    condition_destroy,
    condition_init,
    lock,
    mutex_destroy,
    mutex_init,
    notify_all,
    prepare_thread,
    thread_name,
    unlock,
    wait,
)

import logging
import threading

logger = logging.getLogger("inferd.instance")

cdef enum:
    ALIGNMENT = 256          # of a tensor on the device, as TensorRT wants it
    AHEAD = 2                # batches taken and not computed: one on the device, one being gathered and uploaded


cdef inline size_t aligned(size_t size) noexcept nogil:
    return (size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)


cdef void destroy(EventHandle event) noexcept nogil:
    if event != NULL:
        cuda.event_destroy(event)


cdef class Captured:
    """A graph of the model's work on one set of buffers, and the outputs that it leaves."""

    cdef Graph graph
    cdef list outputs        # GivenOutput of each output, None where the model gave none
    cdef list blocks         # what holds their memory


cdef class GivenOutput:
    cdef Output output


@cython.no_gc
cdef class GpuLoop:
    """What the threads of one instance on a GPU do.

    Args:
        lane: where its batches come from.
        instance: a backends.api.GpuInstance.
        spec: the backends.api.GpuSpec of the model.
        name: of the instance, for logs and threads.
        index: its number among the instances of its version, from 0.
        pinned: page-locked memory; what it lacks is taken of ordinary memory.
        pool: memory of the instance's device.
        claim: to the resources that it must hold while it executes, one batch at a time then; None for none.
    """

    def __cinit__(self, LaneHandle lane not None, instance, spec, str name not None, uint32_t index,
                  PageLocked pinned not None, DevicePool pool not None, ClaimHandle claim=None):
        cdef int i
        self.lane = lane
        self.seat.index = index
        self.claim = claim
        if claim is not None:
            self.seat.claim = &claim.claim
        self.instance = instance
        self.name = name
        self.pinned = pinned
        self.pool = pool
        self.device = pool.device
        self.pinned_in = spec.pinned_inputs
        self.pinned_out = spec.pinned_outputs
        self.busy_wait = spec.busy_wait
        self.compute = instance.stream
        self.copy_in = self.device.stream()  # priorities have no effect on copies
        self.copy_out = self.device.stream()
        self.holds = [[] for _ in range(SETS)]
        self.graphs = {}
        self.input_count = lane.lane.signature.input_count + lane.lane.signature.supplied_count
        self.output_count = lane.lane.signature.output_count + lane.lane.signature.kept_count
        mutex_init(&self.guard, NULL)
        condition_init(&self.changed)
        for i in range(SETS):
            self.sets[i].index = i
            self.make(&self.sets[i])
            self.sets[i].next = self.free
            self.free = &self.sets[i]

    cdef int make(self, BufferSet *set) except -1:
        cdef unsigned int flags = EVENT_DISABLE_TIMING
        if not self.busy_wait:
            flags |= EVENT_BLOCKING_SYNC
        batch_init(&set.batch, self.lane.lane)
        set.offsets = <size_t *>calloc(self.input_count + 1, sizeof(size_t))
        set.outputs = <Output *>calloc(self.output_count + 1, sizeof(Output))
        if set.offsets == NULL or set.outputs == NULL:
            raise MemoryError
        check_call(cuda.event_create(&set.uploaded, EVENT_DISABLE_TIMING), "cuEventCreate")
        check_call(cuda.event_create(&set.computed, flags), "cuEventCreate")
        check_call(cuda.event_create(&set.finished, flags), "cuEventCreate")
        return 0

    def __dealloc__(self):
        cdef BufferSet *set
        cdef int i
        use_device(self.device)
        for i in range(SETS):
            set = &self.sets[i]
            batch_free(&set.batch)
            free(set.offsets)
            free(set.outputs)
            block_give(set.device_in)
            destroy(set.uploaded)
            destroy(set.computed)
            destroy(set.finished)
        free(self.lost_details)
        condition_destroy(&self.changed)
        mutex_destroy(&self.guard)

    # -- sets ---------------------------------------------------------------------------------------------------------

    cdef BufferSet *acquire(self) noexcept nogil:
        cdef BufferSet *set
        lock(&self.guard)
        while self.free == NULL or self.ahead >= AHEAD or (self.seat.claim != NULL and self.in_flight):
            wait(&self.changed, &self.guard)
        set = self.free
        self.free = set.next
        self.ahead += 1
        self.in_flight += 1
        unlock(&self.guard)
        set.submitted = False
        return set

    cdef void release(self, BufferSet *set) noexcept nogil:
        lock(&self.guard)
        set.next = self.free
        self.free = set
        self.in_flight -= 1
        notify_all(&self.changed)
        unlock(&self.guard)

    cdef bint failed(self, BufferSet *set, Result result, const char *call) noexcept nogil:
        # whether a call of the driver has failed; the batch then has, and with a sticky error all that follow
        cdef char *details
        if result == CUDA_OK:
            return False
        details = describe(result, call)
        if is_sticky(result):
            lock(&self.guard)
            if not self.lost:
                self.lost = True
                self.lost_details = format_text("CUDA device %d is lost and the server has to be restarted: %s",
                                                self.device.ordinal, text_or_no_memory(details))
            unlock(&self.guard)
        batch_fail(&set.batch, details)
        return True

    # -- the thread that submits --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Set the thread up; first of all, on the instance's thread."""
        prepare_thread(self.name)
        self.device.use()

    def rehearse(self, dict tensors not None, uint32_t count) -> None:
        """Execute a batch of `count` requests past the lane, on the instance's thread, before `run`.

        Args:
            tensors: of each request: name to shape and bytes.

        Raises:
            ValueError: they do not fit the model, or one fails.
        """
        cdef BridgeHandle bridge = BridgeHandle()
        cdef Outcome outcome
        cdef Request *chain
        cdef BufferSet *set
        memset(&outcome, 0, sizeof(Outcome))
        chain = rehearsal_requests(self.lane.lane, tensors, count, &bridge.bridge, &outcome)
        with nogil:
            set = self.acquire()
            if self.seat.claim != NULL:
                claim_acquire(self.seat.claim)
        self.start(set, chain)
        with nogil:
            self.conclude(set)
        rehearsal_end(bridge, &outcome)

    def retire(self) -> None:
        """Have it end after the batches that it has taken; wake it if it waits (`QueueLane.nudge`)."""
        store32(&self.seat.retired, 1)

    def run(self) -> None:
        """Serve batches until the lane is closed and empty, and all are answered. Call it on the instance's thread."""
        completions = threading.Thread(target=self._complete, name=f"{self.name} completions", daemon=True)
        completions.start()
        try:
            while self.run_once():
                pass
        finally:
            with nogil:
                lock(&self.guard)
                self.closing = True
                notify_all(&self.changed)
                unlock(&self.guard)
            completions.join()
            self.holds = [[] for _ in range(SETS)]
            self.graphs.clear()

    cdef bint run_once(self):
        cdef BufferSet *set
        cdef Request *chain
        with nogil:
            set = self.acquire()
            chain = self.lane.lane.scheduler.take(self.lane.lane, &self.seat)
            if chain != NULL and self.seat.claim != NULL:
                claim_acquire(self.seat.claim)
        if chain == NULL:
            self.release(set)
            return False
        self.start(set, chain)
        with nogil:
            self.submit(set)
        return True

    cdef void start(self, BufferSet *set, Request *chain):
        # everything that is submitted for a batch
        cdef bint ready
        with nogil:
            batch_begin(&set.batch, chain)
            ready = set.batch.count > 0 and self.upload(set)
        self.holds[set.index].clear()  # of the batch that had the set before, which is answered
        if ready:
            self.execute(set)
        with nogil:
            if set.submitted:
                self.download(set)

    cdef void lay_out(self, BufferSet *set, uint32_t rows) noexcept nogil:
        # where each input lies, when the batch has `rows` rows
        cdef uint32_t i
        cdef size_t size
        set.rows = rows
        set.staged = 0
        for i in range(self.input_count):
            if set.batch.inputs[i].present:
                size = set.batch.inputs[i].size
                if rows != set.batch.rows:
                    size = size // set.batch.rows * rows
                set.offsets[i] = set.staged
                set.staged += aligned(size)

    cdef bint reserve(self, BufferSet *set, size_t size) noexcept nogil:
        # memory of the device for the inputs; the set is idle, so what it has can go back
        cdef size_t wanted = ALIGNMENT
        cdef Result state
        if set.device_in != NULL and set.device_in.size >= size:
            return True
        while wanted < size:
            wanted *= 2
        block_give(set.device_in)
        set.device_in = self.pool.take_or_allocate(wanted, self.copy_in.stream)
        if set.device_in != NULL:
            return True
        # no memory, or a device that gives nothing any more
        state = cuda.event_query(set.uploaded)
        if state == CUDA_NOT_READY or not self.failed(set, state, "cuEventQuery"):
            batch_fail(&set.batch, resource_refusal(self.pool.resource, size))
        return False

    cdef bint upload(self, BufferSet *set) noexcept nogil:
        if self.lost:
            batch_fail(&set.batch, format_text("%s", text_or_no_memory(self.lost_details)))
            return False
        if not batch_describe(&set.batch):
            return False
        self.lay_out(set, bucket_of(self, set.batch.rows))
        if not self.reserve(set, set.staged):
            return False
        set.staging = self.pinned.take_or_fall_back(set.staged) if self.pinned_in else block_take(set.staged)
        if set.staging == NULL:
            batch_fail(&set.batch, format_text("no memory for %zu bytes of inputs", set.staged))
            return False
        batch_gather_to(&set.batch, set.staging, set.offsets)
        set.submitted = True
        if set.staged and self.failed(set, cuda.copy_to_device(
                <DevicePointer>set.device_in.data, set.staging.data, set.staged, self.copy_in.stream),
                "cuMemcpyHtoDAsync_v2"):
            return False
        return not (
            self.failed(set, cuda.event_record(set.uploaded, self.copy_in.stream), "cuEventRecord")
            or self.failed(set, cuda.stream_wait_event(self.compute.stream, set.uploaded, 0), "cuStreamWaitEvent"))

    cdef void execute(self, BufferSet *set):
        # whatever the backend raises, the batch is answered and the instance goes on
        cdef GpuBatch batch
        cdef bytes text
        captured = self.graphs.get((set.index, set.rows))
        try:
            if captured is not None:
                launch(self, set, captured)
                return
            batch = GpuBatch.__new__(GpuBatch)
            batch.loop = self
            batch.set = set
            try:
                self.instance.submit(batch)
            finally:
                batch.set = NULL
        except BaseException as error:
            text = text_of(error).encode("utf-8", "replace")
            batch_fail(&set.batch, format_text("%s", <const char *>text))
            logger.error("instance %s failed a batch of %d requests: %s", self.name, set.batch.count, text.decode(),
                         exc_info=logger.isEnabledFor(logging.DEBUG))

    cdef void download(self, BufferSet *set) noexcept nogil:
        cdef Output *output
        cdef size_t total = 0
        cdef bint any = False
        cdef uint32_t i
        if self.failed(set, cuda.event_record(set.computed, self.compute.stream), "cuEventRecord") or self.failed(
                set, cuda.stream_wait_event(self.copy_out.stream, set.computed, 0), "cuStreamWaitEvent"):
            return
        for i in range(self.output_count):
            output = &set.outputs[i]
            output.given = output.given and not set.batch.failed and batch_wants(&set.batch, i)
            if output.given:
                any = True
                if set.rows != set.batch.rows:
                    output.size = output.size // set.rows * set.batch.rows
                    output.shape[0] = set.batch.rows
                output.offset = total
                total += aligned(output.size)
        if any:
            set.staging_out = self.pinned.take_or_fall_back(total) if self.pinned_out else block_take(total)
            if set.staging_out == NULL:
                batch_fail(&set.batch, format_text("no memory for %zu bytes of outputs", total))
        for i in range(self.output_count):
            output = &set.outputs[i]
            if output.given and output.size and set.staging_out != NULL and self.failed(
                    set, cuda.copy_to_host(set.staging_out.data + output.offset, output.address, output.size,
                                           self.copy_out.stream), "cuMemcpyDtoHAsync_v2"):
                break
        self.failed(set, cuda.event_record(set.finished, self.copy_out.stream), "cuEventRecord")

    cdef void submit(self, BufferSet *set) noexcept nogil:
        lock(&self.guard)
        set.next = NULL
        if self.first == NULL:
            self.first = set
        else:
            self.last.next = set
        self.last = set
        notify_all(&self.changed)
        unlock(&self.guard)

    # -- the thread that completes ------------------------------------------------------------------------------------

    def _complete(self) -> None:
        thread_name(b"gpu-completions")
        self.device.use()
        with nogil:
            self.complete()

    cdef void complete(self) noexcept nogil:
        cdef BufferSet *set
        while True:
            lock(&self.guard)
            while self.first == NULL and not self.closing:
                wait(&self.changed, &self.guard)
            set = self.first
            if set != NULL:
                self.first = set.next
            unlock(&self.guard)
            if set == NULL:
                return
            self.conclude(set)
            if self.lost and not self.lost_told:
                self.lost_told = True
                with gil:
                    self.tell_lost()

    cdef void conclude(self, BufferSet *set) noexcept nogil:
        # wait for a batch, answer it, and free its set
        use_device(self.device)  # an answer to a region on another device may have changed it
        if set.submitted:
            self.failed(set, cuda.event_synchronize(set.computed), "cuEventSynchronize")
            set.batch.output_start_ns = now_ns()
        lock(&self.guard)
        self.ahead -= 1
        notify_all(&self.changed)
        unlock(&self.guard)
        if set.submitted:
            self.failed(set, cuda.event_synchronize(set.finished), "cuEventSynchronize")
            if set.batch.failed:
                self.settle()
        if self.seat.claim != NULL:
            claim_release(self.seat.claim)
        self.finish(set)
        self.release(set)

    cdef void settle(self) noexcept nogil:
        # A failed batch may lack the events that order its work: wait for all, before its memory is used again.
        cuda.stream_synchronize(self.copy_in.stream)
        cuda.stream_synchronize(self.compute.stream)
        cuda.stream_synchronize(self.copy_out.stream)

    cdef void tell_lost(self) noexcept:
        try:
            logger.error("instance %s: %s", self.name, text_or_no_memory(self.lost_details).decode())
            self.instance.lost()
        except Exception:
            logger.exception("instance %s", self.name)

    cdef void finish(self, BufferSet *set) noexcept nogil:
        cdef Output *output
        cdef uint32_t i
        for i in range(self.output_count):
            output = &set.outputs[i]
            if output.given and not set.batch.failed and set.staging_out != NULL:
                batch_set_output(&set.batch, i, block_share(set.staging_out), set.staging_out.data + output.offset,
                                 output.size, output.shape, output.rank)
            block_give(output.block)
            output.block = NULL
            output.given = False
        block_give(set.staging)
        block_give(set.staging_out)
        set.staging = set.staging_out = NULL
        batch_finish(&set.batch)

    # -- graphs -------------------------------------------------------------------------------------------------------

    def capture(self, sizes: dict[int, int]) -> None:
        """Record the model's work for batches of some sizes, so that it is launched as one.

        The instance is asked to submit each once for real and once to be recorded, on each set of buffers. Call it on
        the instance's thread, before `run`.

        Args:
            sizes: the rows of each graph, and of the smallest batch that is padded to have so many.

        Raises:
            ValueError: the model's shapes vary, or it has optional inputs, or there are too many sizes.
            CudaError: something that it does cannot be recorded.
        """
        cdef int i
        if len(sizes) > BUCKETS:
            raise ValueError(f"graphs are captured for at most {BUCKETS} sizes of batches, got {len(sizes)}")
        check_static(&self.lane.lane.signature)
        self.device.use()
        for i in range(SETS):
            for rows in sorted(sizes, reverse=True):  # the largest first: the buffers then never move
                self.capture_one(&self.sets[i], rows)
        for rows, lowest in sorted(sizes.items()):
            self.buckets[self.bucket_count] = Bucket(rows, lowest)
            self.bucket_count += 1

    cdef int capture_one(self, BufferSet *set, uint32_t rows) except -1:
        cdef GpuBatch batch = GpuBatch.__new__(GpuBatch)
        cdef Captured captured = Captured.__new__(Captured)
        set.batch.rows = rows
        assume_inputs(&self.lane.lane.signature, set)
        self.lay_out(set, rows)
        if not self.reserve(set, set.staged):
            raise MemoryError(f"no memory on {self.device} for the inputs of {rows} rows")
        batch.loop = self
        batch.set = set
        batch.recorded = True
        for recorded in (False, True):
            clear_outputs(self, set)
            if recorded:
                self.compute.begin_capture()
            try:
                self.instance.submit(batch)
            finally:
                if recorded:
                    captured.graph = self.compute.end_capture()
            if not recorded:
                self.compute.synchronize()
        batch.set = NULL
        captured.blocks = [*self.holds[set.index]]
        self.holds[set.index].clear()
        captured.outputs = outputs_of(self, set)
        set.batch.rows = 0
        self.graphs[(set.index, rows)] = captured
        return 0


cdef uint32_t bucket_of(GpuLoop loop, uint32_t rows) noexcept nogil:
    # the rows of the smallest graph for this batch, or its own
    cdef int i
    for i in range(loop.bucket_count):
        if loop.buckets[i].lowest <= rows <= loop.buckets[i].rows:
            return loop.buckets[i].rows
    return rows


cdef int launch(GpuLoop loop, BufferSet *set, Captured captured) except -1:
    cdef uint32_t i
    for i in range(loop.output_count):
        if captured.outputs[i] is not None:
            set.outputs[i] = (<GivenOutput>captured.outputs[i]).output
    loop.failed(set, cuda.graph_launch(captured.graph.graph, loop.compute.stream), "cuGraphLaunch")
    return 0


cdef void clear_outputs(GpuLoop loop, BufferSet *set) noexcept:
    cdef uint32_t i
    for i in range(loop.output_count):
        block_give(set.outputs[i].block)
        set.outputs[i].block = NULL
        set.outputs[i].given = False


cdef list outputs_of(GpuLoop loop, BufferSet *set):
    cdef list outputs = []
    cdef GivenOutput given
    cdef uint32_t i
    for i in range(loop.output_count):
        given = None
        if set.outputs[i].given:
            given = GivenOutput.__new__(GivenOutput)
            given.output = set.outputs[i]
            set.outputs[i].given = False
        outputs.append(given)
    return outputs


cdef int check_static(const Signature *signature) except -1:
    cdef const TensorSignature *tensor
    cdef uint32_t i
    for i in range(signature.input_count + signature.supplied_count):
        tensor = &signature.inputs[i]
        if tensor.variable or tensor.optional:
            raise ValueError(f"CUDA graphs need inputs of one shape, but '{tensor.name.data.decode()}' "
                             f"{'varies' if tensor.variable else 'is optional'}")
    return 0


cdef void assume_inputs(const Signature *signature, BufferSet *set) noexcept:
    # as a batch of set.batch.rows rows would have them
    cdef uint32_t batches = 1 if signature.max_batch_size > 0 else 0
    cdef const TensorSignature *tensor
    cdef int64_t dim
    cdef uint32_t i, k, rank
    for i in range(signature.input_count + signature.supplied_count):
        set.batch.inputs[i].present = True
        set.batch.inputs[i].block = NULL
        tensor = &signature.inputs[i]
        rank = tensor.model_rank if tensor.reshaped else tensor.rank
        set.batch.inputs[i].rank = rank + batches
        set.batch.inputs[i].shape[0] = set.batch.rows
        set.batch.inputs[i].size = datatype_size(tensor.datatype) * (set.batch.rows if batches else 1)
        for k in range(rank):
            dim = tensor.model_dims[k] if tensor.reshaped else tensor.dims[k]
            set.batch.inputs[i].shape[k + batches] = dim
            set.batch.inputs[i].size *= <size_t>dim


cdef class GpuBatch:
    """The requests of one execution, as one, on the device.

    Everything is submitted to `stream`, where the inputs are there in time; nothing here waits for the device. For a
    model with a batch dimension inputs have the shape (rows, *dims), and so must outputs.
    """

    def __init__(self):
        raise TypeError("GpuBatch cannot be created from Python")

    cdef int check(self) except -1:
        if self.set == NULL:
            raise ValueError("this batch has been submitted")
        return 0

    cdef uint32_t output_index(self, str name) except? 0xffffffff:
        cdef const Signature *signature = &self.loop.lane.lane.signature
        cdef bytes wanted = name.encode()
        cdef uint32_t i
        self.check()
        for i in range(self.loop.output_count):
            if signature.outputs[i].name.data == wanted:
                return i
        raise ValueError(f"the model has no output '{name}'")

    @property
    def rows(self) -> int:
        """The size of the batch dimension; 1 for a model without one."""
        self.check()
        return self.set.rows

    @property
    def stream(self) -> Stream:
        """Where the model's work belongs."""
        return self.loop.compute

    @property
    def capturing(self) -> bool:
        """Whether this is no batch of requests, but work that is recorded as a graph."""
        return self.recorded

    def input(self, name: str):
        """The input over all requests; None for an optional one that the requests leave out."""
        cdef const Signature *signature = &self.loop.lane.lane.signature
        cdef bytes wanted = name.encode()
        cdef int64_t shape[MAX_RANK]
        cdef size_t size
        cdef uint32_t i
        self.check()
        for i in range(self.loop.input_count):
            if signature.inputs[i].name.data == wanted:
                if not self.set.batch.inputs[i].present:
                    return None
                memcpy(shape, self.set.batch.inputs[i].shape, sizeof(shape))
                size = self.set.batch.inputs[i].size
                if self.set.rows != self.set.batch.rows:
                    size = size // self.set.batch.rows * self.set.rows
                    shape[0] = self.set.rows
                return tensor_new(self.loop.device.ordinal,
                                  <DevicePointer>self.set.device_in.data + self.set.offsets[i], size,
                                  signature.inputs[i].datatype, shape, self.set.batch.inputs[i].rank)
        raise ValueError(f"the model has no input '{name}'")

    def wants(self, name: str) -> bool:
        """Whether any request asked for this output."""
        cdef uint32_t index = self.output_index(name)
        return self.recorded or batch_wants(&self.set.batch, index)

    def output(self, name: str, shape):
        """Memory for an output of this shape, which the model shall write to.

        Raises:
            ValueError: there is no such output, or the shape is impossible.
            MemoryError: the device has no memory for it.
        """
        cdef uint32_t index = self.output_index(name)
        cdef Output *output = &self.set.outputs[index]
        cdef const TensorSignature *tensor = &self.loop.lane.lane.signature.outputs[index]
        cdef int64_t elements = 1
        if len(shape) > MAX_RANK:
            raise ValueError(f"output '{name}' has {len(shape)} dimensions, at most {MAX_RANK} are served")
        for i, dim in enumerate(shape):
            if dim < 0 or (dim and elements > (<int64_t>1 << 46) // <int64_t>dim):
                raise ValueError(f"output '{name}' has the impossible shape {list(shape)}")
            output.shape[i] = dim
            elements *= dim
        output.rank = <uint32_t>len(shape)
        output.size = <size_t>elements * datatype_size(tensor.datatype)
        block_give(output.block)
        output.block = NULL
        if self.recorded:
            kept = self.loop.pool.take(max(output.size, <size_t>1))
            self.loop.holds[self.set.index].append(kept)
            output.address = kept.address
        else:
            output.block = self.loop.pool.take_or_allocate(max(output.size, <size_t>1), self.loop.compute.stream)
            if output.block == NULL:
                raise MemoryError(f"no memory on device {self.loop.device.ordinal} for the {output.size} bytes of "
                                  f"output '{name}'")
            output.address = <DevicePointer>output.block.data
        output.given = True
        return tensor_new(self.loop.device.ordinal, output.address, output.size, tensor.datatype, output.shape,
                          output.rank)

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
        output.address = address_of(tensor, self.loop.device.ordinal,
                                    self.loop.lane.lane.signature.outputs[index].datatype, name, &output.size,
                                    output.shape, &output.rank)
        self.loop.holds[self.set.index].append(tensor)
        block_give(output.block)
        output.block = NULL
        output.given = True

    def hold(self, owner) -> None:
        """Keep an object until the batch is answered: one that owns memory which the device reads or writes."""
        self.check()
        self.loop.holds[self.set.index].append(owner)


cdef str text_of(object error):
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__
