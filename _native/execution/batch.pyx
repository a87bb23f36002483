"""Batches: from the requests that an instance took to their responses.

The C half works without the GIL, for native executors; the classes at the end are for Python backends.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset, strncpy

from _native.atomic cimport add_own, fetch_add32, fetch_add64
from _native.clock cimport now_ns
from _native.execution.gather cimport batch_give_inputs
from _native.execution.scatter cimport batch_set_output, batch_wants
from _native.execution.view cimport block_of_array, view_new
from _native.memory.resource cimport Block, block_take
from _native.protobuf.codec cimport Str
from _native.protobuf.datatype cimport DT_BYTES, datatype_name, datatype_size
from _native.request.accounting cimport account_failed, execution_add
from _native.request.bridge cimport Bridge, bridge_return
from _native.request.lane cimport Lane
from _native.request.record cimport NOTED_TEXT, Record, record_taken
from _native.request.request cimport Request, request_expired, request_fail, request_free
from _native.request.signature cimport MAX_RANK, TensorSignature, input_find, output_find
from _native.request.statistics cimport (
    FAILURE_BACKEND,
    FAILURE_OTHER,
    FAILURE_REJECTED,
    Execution,
    statistics_executed,
)
from _native.status cimport (
    STATUS_CANCELLED,
    STATUS_DEADLINE_EXCEEDED,
    STATUS_INTERNAL,
    STATUS_INVALID_ARGUMENT,
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
)
from _native.tensors.completion cimport response_complete
from _native.tensors.placement cimport inputs_fetch, place_of_output
from _native.text cimport format_text, text_or_no_memory

import os
from math import prod

cdef int64_t batches = 0     # atomic: those with records, in the process


cdef str batch_fail_by(NativeBatch *batch, str text):
    cdef const Request *request
    cdef uint32_t asked = 0
    cdef uint32_t i
    cdef str told = text
    cdef bytes encoded
    for i in range(batch.count):
        request = batch.requests[i]
        asked += request != NULL and not request.sequenced.unasked and not request.is_warmup  # no client hears of those
    if asked > 1 and not batch.failed:
        mark = os.urandom(4).hex()
        told = f"a batch of {asked} requests failed; the server's log says why, as error {mark}"
        text = f"error {mark}: {text}"
    encoded = told.encode("utf-8", "replace")
    batch_fail(batch, format_text("%s", <const char *>encoded))
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef int batch_init(NativeBatch *batch, Lane *lane) except -1:
    memset(batch, 0, sizeof(NativeBatch))
    batch.lane = lane
    batch.signature = &lane.signature
    batch.writes_inputs = True
    batch.inputs = <GatheredInput *>calloc(lane.signature.input_count + lane.signature.supplied_count + 1,
                                           sizeof(GatheredInput))
    batch.capacity = 64
    batch.requests = <Request **>malloc(batch.capacity * sizeof(Request *))
    if batch.inputs == NULL or batch.requests == NULL:
        batch_free(batch)
        raise MemoryError
    return 0


cdef void batch_free(NativeBatch *batch) noexcept nogil:
    free(batch.inputs)
    free(batch.requests)
    free(batch.details)
    memset(batch, 0, sizeof(NativeBatch))


cdef void batch_begin(NativeBatch *batch, Request *chain) noexcept nogil:
    cdef Request *following
    batch.taken_ns = now_ns()
    batch.input_end_ns = 0
    batch.output_start_ns = 0
    batch.failed = False
    batch.stopped = False
    batch.blamed = False
    batch.recorded = False
    batch.count = 0
    batch.rows = 0
    while chain != NULL:
        following = chain.next
        if late(batch, chain):
            let_expire(batch, chain)
        elif reserve(batch):
            chain.taken_ns = batch.taken_ns
            if chain.record != NULL:
                batch.recorded = True
                record_taken(chain)
            batch.requests[batch.count] = chain
            batch.count += 1
            batch.rows += chain.rows
        else:
            request_fail(chain, STATUS_RESOURCE_EXHAUSTED, NULL)
            account_failed(chain, batch.taken_ns, FAILURE_OTHER)
            bridge_return(<Bridge *>chain.bridge, &chain.response, &chain.response)
        chain = following
    add_own(&batch.running, batch.count - batch.running)


cdef inline bint late(const NativeBatch *batch, const Request *request) noexcept nogil:
    # waited too long; a sequence's lane has looked itself, as what becomes of the others depends on it
    if request.sequenced.sequence != NULL:
        return False
    if 0 < request.deadline_ns <= batch.taken_ns:
        return True
    return 0 < request.expires_ns <= batch.taken_ns and not request.yields


cdef bint reserve(NativeBatch *batch) noexcept nogil:
    # room to name one more request
    cdef Request **grown
    if batch.count < batch.capacity:
        return True
    grown = <Request **>realloc(batch.requests, batch.capacity * 2 * sizeof(Request *))
    if grown == NULL:
        return False
    batch.requests = grown
    batch.capacity *= 2
    return True


cdef void let_expire(NativeBatch *batch, Request *request) noexcept nogil:
    # the loop was too busy to take it out of the queue in time
    if 0 < request.deadline_ns <= batch.taken_ns:
        request_fail(request, STATUS_DEADLINE_EXCEEDED, format_text("Deadline Exceeded"))
    else:
        request_expired(request)
    account_failed(request, batch.taken_ns, FAILURE_REJECTED)
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


cdef void batch_fetch(NativeBatch *batch, int device, bint in_place) noexcept nogil:
    cdef Request *request
    cdef uint32_t i
    for i in range(batch.count):
        request = batch.requests[i]
        if request.on_device and not inputs_fetch(request, device, in_place):
            batch.rows -= request.rows
            account_failed(request, now_ns(), FAILURE_OTHER)
            bridge_return(<Bridge *>batch_detach(batch, i).bridge, &request.response, &request.response)
    forget_detached(batch)


# ---------------------------------------------------------------------------------------------------------------------
# Answering

cdef void fail_request(NativeBatch *batch, Request *request) noexcept nogil:
    cdef int status = STATUS_INTERNAL
    if batch.stopped:
        status = STATUS_CANCELLED
    elif batch.blamed:
        status = STATUS_INVALID_ARGUMENT
    request_fail(request, status, format_text("%s", text_or_no_memory(batch.details)))


cdef Request *batch_detach(NativeBatch *batch, uint32_t index) noexcept nogil:
    cdef Request *request = batch.requests[index]
    batch.requests[index] = NULL
    return request


cdef void forget_detached(NativeBatch *batch) noexcept nogil:
    cdef uint32_t kept = 0
    cdef uint32_t i
    for i in range(batch.count):
        if batch.requests[i] != NULL:
            batch.requests[kept] = batch.requests[i]
            kept += 1
    batch.count = kept


cdef bint batch_reschedule(NativeBatch *batch, uint32_t index) noexcept nogil:
    batch.requests[index].sequenced.again = batch.lane.sequences != NULL and batch.lane.sequences.again != NULL
    return batch.requests[index].sequenced.again


cdef void hand_back(NativeBatch *batch) noexcept nogil:
    # what is to run again, unless the batch has failed
    cdef Request *request
    cdef uint32_t i
    for i in range(batch.count):
        request = batch.requests[i]
        if request != NULL and request.sequenced.again:
            request.sequenced.again = False
            if not batch.failed:
                batch.requests[i] = NULL
                batch.lane.sequences.again(batch.lane, request)


cdef void drop_unasked(NativeBatch *batch) noexcept nogil:
    # idle rows, and notices that a sequence has ended
    cdef Request *request
    cdef uint32_t i
    for i in range(batch.count):
        request = batch.requests[i]
        if request == NULL or not request.sequenced.unasked:
            continue
        if request.sequenced.sequence != NULL:
            batch.lane.sequences.request_done(batch.lane, request)
        if request.lane != NULL:
            fetch_add32(&batch.lane.in_flight, -1)
        request_free(request)
        batch.requests[i] = NULL


cdef void batch_finish(NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    cdef Request *request
    batch_give_inputs(batch)
    drop_unasked(batch)
    hand_back(batch)
    forget_detached(batch)
    for i in range(batch.count):
        request = batch.requests[i]
        if batch.failed:
            fail_request(batch, request)
        elif request.response.status == STATUS_OK:
            response_complete(&request.response)
        if request.sequenced.sequence != NULL:
            batch.lane.sequences.request_done(batch.lane, request)
    account(batch)
    return_requests(batch)


cdef void account(NativeBatch *batch) noexcept nogil:
    cdef Execution execution
    cdef int64_t end = now_ns()
    cdef uint32_t i
    memset(&execution, 0, sizeof(Execution))
    execution.end_ns = end
    execution.why = batch.why
    add_own(&batch.busy_ns, end - batch.taken_ns)
    add_own(&batch.running, -batch.running)
    for i in range(batch.count):
        if batch.requests[i].response.status == STATUS_OK:
            execution_add(&execution, batch.requests[i], batch.taken_ns)
        else:
            account_failed(batch.requests[i], end, FAILURE_BACKEND)
    if execution.requests and not batch.requests[0].is_warmup:
        # a native executor that works request by request has no phases of input and output
        if batch.input_end_ns == 0:
            batch.input_end_ns = batch.taken_ns
        if batch.output_start_ns == 0:
            batch.output_start_ns = end
        execution.rows = batch.rows
        execution.input_ns = <uint64_t>(batch.input_end_ns - batch.taken_ns)
        execution.infer_ns = <uint64_t>(batch.output_start_ns - batch.input_end_ns)
        execution.output_ns = <uint64_t>(end - batch.output_start_ns)
        statistics_executed(&batch.lane.statistics, &execution)
        if batch.lane.learn != NULL:
            batch.lane.learn(batch.lane, batch.rows, end - batch.taken_ns)
        tell_phases(batch, &execution)
    if batch.recorded:
        note(batch, end)


cdef void tell_phases(NativeBatch *batch, const Execution *execution) noexcept nogil:
    # to those who made the requests: ensembles add them up
    cdef Request *request
    cdef uint32_t i
    for i in range(batch.count):
        request = batch.requests[i]
        if request.is_step:
            request.phases.queue = <uint64_t>(batch.taken_ns - request.queued_ns)
            request.phases.input = execution.input_ns
            request.phases.infer = execution.infer_ns
            request.phases.output = execution.output_ns


cdef void note(const NativeBatch *batch, int64_t end) noexcept nogil:
    # in the records of those that have one: their times, and with whom they were executed
    cdef uint64_t number = <uint64_t>fetch_add64(&batches, 1) + 1
    cdef Record *record
    cdef uint32_t i
    for i in range(batch.count):
        record = <Record *>batch.requests[i].record
        if record == NULL:
            continue
        record.taken_ns = batch.taken_ns
        record.input_end_ns = batch.input_end_ns
        record.output_start_ns = batch.output_start_ns
        record.computed_ns = end
        record.batch = number
        record.batch_rows = batch.rows
        record.batch_requests = batch.count
        record.why = batch.why
        if batch.instance != NULL:
            strncpy(record.instance, batch.instance, NOTED_TEXT - 1)


cdef void return_requests(NativeBatch *batch) noexcept nogil:
    # one hand-over for each run of requests that go back through the same bridge: usually one in all
    cdef uint32_t first = 0
    cdef uint32_t i
    for i in range(1, batch.count + 1):
        if i < batch.count and batch.requests[i].bridge == batch.requests[first].bridge:
            batch.requests[i - 1].response.next = &batch.requests[i].response
        else:
            bridge_return(<Bridge *>batch.requests[first].bridge, &batch.requests[first].response,
                          &batch.requests[i - 1].response)
            first = i
    batch.count = 0


# ---------------------------------------------------------------------------------------------------------------------
# What Python backends see

cdef bytes encoded_element(object element, str name):
    if isinstance(element, str):
        return element.encode()
    if not isinstance(element, (bytes, bytearray, memoryview)):
        raise ValueError(f"output '{name}' must have elements of bytes or str, got {type(element).__name__}")
    return bytes(element)


cdef class Batch:
    """The requests of one execution, as one.

    Inputs are gathered: for a model with a batch dimension they have the shape (rows, *dims). Outputs are handed over
    in the same form and split again.
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
        """Rows over all requests: the size of the batch dimension; 1 for a model without one."""
        self.check()
        return self.batch.rows

    @property
    def request_count(self) -> int:
        """Requests in this batch."""
        self.check()
        return self.batch.count

    def input(self, name: str):
        """The input's data over all requests, or what the batch provides for it.

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

    def place(self, name: str):
        """Where the model may write this output itself: in the shared memory of the client, as a view to write to.

        Hand over an array over the view by `set_output` then. None when there is no such place, or the shape of the
        output is not fixed by the configuration: most of the time.
        """
        cdef uint32_t index = self.output_index(name)
        cdef const TensorSignature *tensor = &self.batch.signature.outputs[index]
        cdef uint32_t first = 1 if self.batch.signature.max_batch_size > 0 else 0
        cdef int64_t shape[MAX_RANK]
        cdef uint8_t *data
        cdef Block *block = NULL
        if not self.placed or index >= self.batch.signature.output_count or tensor.state:
            return None
        if tensor.variable or tensor.reshaped or tensor.like_input or tensor.datatype == DT_BYTES:
            return None
        shape[0] = self.batch.rows
        for i in range(tensor.rank):
            shape[first + i] = tensor.dims[i]
        size = prod([shape[i] for i in range(first + tensor.rank)]) * datatype_size(tensor.datatype)
        if size >> 62:
            return None
        data = place_of_output(self.batch.requests[0], index, size, &block)
        if data == NULL:
            return None
        return view_new(block, data, size, tensor.datatype, shape, first + tensor.rank, True)

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

        For models with `iterative_sequence`. What was handed over for its states is its state then.

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
