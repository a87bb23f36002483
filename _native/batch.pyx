"""Batches: gathering inputs, handing them to a backend, scattering outputs, answering.

The C half works without the GIL for native executors; the classes at the end are what Python backends see.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from _native.bridge cimport Bridge, bridge_return
from _native.clock cimport now_ns
from _native.datatype cimport DT_BYTES, datatype_name, datatype_size
from _native.lane cimport Lane
from _native.memory cimport SHARED_WITH_STRANGER, Block, block_give, block_own, block_share, block_take
from _native.request cimport (
    STATUS_DEADLINE_EXCEEDED,
    STATUS_INTERNAL,
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
    InputData,
    OutputData,
    Request,
    request_expired,
    request_fail,
    request_free,
)
from _native.response cimport response_complete
from _native.signature cimport MAX_RANK, SUPPLY_STATE, Signature, TensorSignature
from _native.statistics cimport Execution, statistics_executed, statistics_failed
from _native.supply cimport supply
from _native.text cimport format_text, shape_text, text_or_no_memory
from _native.view cimport block_of_array, view_new

cdef extern from *:
    bint mul_overflow "__builtin_mul_overflow"(int64_t a, int64_t b, int64_t *out) nogil

cdef enum:
    ALIGNMENT = 64           # of a gathered input, as vector code and frameworks like it


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef int batch_init(NativeBatch *batch, Lane *lane) except -1:
    memset(batch, 0, sizeof(NativeBatch))
    batch.lane = lane
    batch.signature = &lane.signature
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
    batch.count = 0
    batch.rows = 0
    while chain != NULL:
        following = chain.next
        if late(batch, chain):
            let_expire(batch, chain)
        elif reserve(batch):
            batch.requests[batch.count] = chain
            batch.count += 1
            batch.rows += chain.rows
        else:
            request_fail(chain, STATUS_RESOURCE_EXHAUSTED, NULL)
            bridge_return(<Bridge *>chain.bridge, &chain.response, &chain.response)
        chain = following


cdef inline bint late(const NativeBatch *batch, const Request *request) noexcept nogil:
    # waited too long; a sequence's lane has looked itself, as what becomes of the others depends on it
    if request.sequence != NULL:
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
    statistics_failed(&batch.lane.statistics, 1, <uint64_t>(batch.taken_ns - request.arrived_ns))
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


cdef void batch_fail(NativeBatch *batch, char *details) noexcept nogil:
    if batch.failed:
        free(details)
        return
    batch.failed = True
    free(batch.details)
    batch.details = details


# ---------------------------------------------------------------------------------------------------------------------
# Inputs

cdef inline const InputData *data_of(const NativeBatch *batch, uint32_t i, uint32_t input) noexcept nogil:
    # of request i: what it carries, or the state of its sequence
    cdef const Signature *signature = batch.signature
    if input < signature.input_count:
        return &batch.requests[i].inputs[input]
    return &batch.requests[i].states[signature.supplied[input - signature.input_count].source]


cdef bint lies_right(const NativeBatch *batch, uint32_t input) noexcept nogil:
    # the data of all requests is one aligned run already, which stays as it is
    cdef const InputData *data = data_of(batch, 0, input)
    cdef const InputData *following
    cdef uint32_t i
    if <uintptr_t>data.data % ALIGNMENT or data.block.sharing == SHARED_WITH_STRANGER:
        return False
    for i in range(1, batch.count):
        following = data_of(batch, i, input)
        if following.block != data.block or following.data != data.data + data.size:
            return False
        data = following
    return True


cdef bint gather_one(NativeBatch *batch, uint32_t input) noexcept nogil:
    cdef GatheredInput *out = &batch.inputs[input]
    cdef const InputData *first = data_of(batch, 0, input)
    cdef const InputData *data
    cdef uint8_t *at
    cdef uint32_t i
    out.present = first.present
    out.block = NULL
    if not first.present:
        return True
    out.rank = first.rank
    memcpy(out.shape, first.shape, first.rank * sizeof(int64_t))
    if batch.signature.max_batch_size > 0:
        out.shape[0] = batch.rows
    out.size = 0
    for i in range(batch.count):
        out.size += data_of(batch, i, input).size
    if lies_right(batch, input):
        out.block = block_share(first.block)
        out.data = first.data
        return True
    out.block = block_take(out.size)
    if out.block == NULL:
        batch_fail(batch, format_text("no memory for %zu bytes of input '%s'", out.size,
                                      batch.signature.inputs[input].name.data))
        return False
    out.data = out.block.data
    at = out.block.data
    for i in range(batch.count):
        data = data_of(batch, i, input)
        memcpy(at, data.data, data.size)
        at += data.size
    return True


cdef bint supply_one(NativeBatch *batch, uint32_t index) noexcept nogil:
    cdef uint32_t input = batch.signature.input_count + index
    if batch.signature.supplied[index].kind == SUPPLY_STATE:
        return gather_one(batch, input)
    if not supply(batch.signature, index, batch.requests, batch.count, batch.rows, &batch.inputs[input]):
        batch_fail(batch, format_text("no memory for input '%s'", batch.signature.inputs[input].name.data))
        return False
    return True


cdef bint batch_gather(NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    for i in range(batch.signature.input_count + batch.signature.supplied_count):
        batch.inputs[i].block = NULL
    for i in range(batch.signature.input_count):
        if not gather_one(batch, i):
            return False
    for i in range(batch.signature.supplied_count):
        if not supply_one(batch, i):
            return False
    batch.input_end_ns = now_ns()
    return True


cdef void give_inputs(NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    for i in range(batch.signature.input_count + batch.signature.supplied_count):
        block_give(batch.inputs[i].block)
        batch.inputs[i].block = NULL


# ---------------------------------------------------------------------------------------------------------------------
# Outputs

cdef bint batch_wants(const NativeBatch *batch, uint32_t output) noexcept nogil:
    cdef uint32_t i
    if batch.signature.outputs[output].state:
        return True
    for i in range(batch.count):
        if batch.requests[i].response.outputs[output].wanted:
            return True
    return False


cdef size_t bytes_of_elements(const uint8_t *data, size_t size, int64_t elements) noexcept nogil:
    # the length of the first `elements` elements of a BYTES tensor; SIZE_MAX when it ends before
    cdef size_t at = 0
    cdef uint32_t length
    cdef int64_t _
    for _ in range(elements):
        if size - at < 4:
            return <size_t>-1
        memcpy(&length, data + at, 4)
        if size - at - 4 < length:
            return <size_t>-1
        at += 4 + <size_t>length
    return at


cdef char *wrong_output(const NativeBatch *batch, const TensorSignature *tensor, const int64_t *shape, uint32_t rank,
                        size_t size, int64_t *elements) noexcept nogil:
    # why this output cannot be split among the requests; NULL when it can, then with its number of elements
    cdef bint batches = batch.signature.max_batch_size > 0
    cdef int64_t expected
    cdef uint32_t i
    if rank > MAX_RANK:
        return format_text("output '%s' has %u dimensions, at most %d are served", tensor.name.data, rank,
                           <int>MAX_RANK)
    if batches and (rank == 0 or shape[0] != batch.rows):
        return format_text("output '%s' must have the batch dimension %u first, got %lld", tensor.name.data,
                           batch.rows, <long long>(shape[0] if rank else -1))
    elements[0] = 1
    for i in range(rank):
        if shape[i] < 0 or mul_overflow(elements[0], shape[i], elements):
            return format_text("output '%s' has an impossible shape", tensor.name.data)
    if tensor.datatype != DT_BYTES and (
            mul_overflow(elements[0], datatype_size(tensor.datatype), &expected) or <uint64_t>expected != size):
        return format_text("output '%s' must have %lld bytes of %s for its shape, got %zu", tensor.name.data,
                           <long long>expected, datatype_name(tensor.datatype), size)
    return NULL


cdef inline void share_output(Request *request, uint32_t output, Block *block, const uint8_t *data, size_t size,
                              const int64_t *shape, uint32_t rank) noexcept nogil:
    # the request's part, unless it did not ask
    cdef OutputData *out = &request.response.outputs[output]
    if not out.wanted:
        return
    block_give(out.block)  # of a backend that sets an output twice
    out.block = block_share(block)
    out.data = data
    out.size = size
    out.datatype = request.signature.outputs[output].datatype
    out.rank = rank
    memcpy(out.shape, shape, rank * sizeof(int64_t))
    if request.signature.max_batch_size > 0:
        out.shape[0] = request.rows


cdef bint batch_set_output(NativeBatch *batch, uint32_t output, Block *block, const uint8_t *data, size_t size,
                           const int64_t *shape, uint32_t rank) noexcept nogil:
    cdef const TensorSignature *tensor = &batch.signature.outputs[output]
    cdef bint batches = batch.signature.max_batch_size > 0
    cdef int64_t elements = 0
    cdef size_t row_size = size // batch.rows
    cdef size_t part
    cdef uint32_t i
    cdef Request *request
    cdef char *wrong
    if batch.output_start_ns == 0:
        batch.output_start_ns = now_ns()
    wrong = wrong_output(batch, tensor, shape, rank, size, &elements)
    if wrong == NULL and tensor.datatype == DT_BYTES and bytes_of_elements(data, size, elements) != size:
        wrong = format_text("output '%s' does not hold %lld elements", tensor.name.data, <long long>elements)
    if wrong != NULL:
        block_give(block)
        batch_fail(batch, wrong)
        return False
    for i in range(batch.count):
        request = batch.requests[i]
        if tensor.datatype == DT_BYTES:
            part = bytes_of_elements(data, size, elements // batch.rows * request.rows if batches else elements)
        else:
            part = row_size * request.rows if batches else size
        if output < batch.signature.output_count:
            share_output(request, output, block, data, part, shape, rank)
        if tensor.state:
            batch_set_state(batch, i, tensor.state - 1, block_share(block), data, part, shape, rank)
        data += part
        size -= part
        if not batches:
            break
    block_give(block)
    return not batch.failed


cdef bint batch_set_state(NativeBatch *batch, uint32_t index, uint32_t state, Block *block, const uint8_t *data,
                          size_t size, const int64_t *shape, uint32_t rank) noexcept nogil:
    cdef Request *request = batch.requests[index]
    cdef InputData *goes_to
    if request.null or request.states == NULL:
        block_give(block)
        return True
    goes_to = &request.states[batch.signature.state_count + state]
    if not block_own(&block, &data, size):
        block_give(block)
        batch_fail(batch, NULL)
        return False
    block_give(goes_to.block)
    goes_to.present = True
    goes_to.block = block
    goes_to.data = data
    goes_to.size = size
    goes_to.rank = rank
    memcpy(goes_to.shape, shape, rank * sizeof(int64_t))
    if batch.signature.max_batch_size > 0:
        goes_to.shape[0] = request.rows
    return check_state(batch, state, goes_to)


cdef bint check_state(NativeBatch *batch, uint32_t state, const InputData *goes_to) noexcept nogil:
    # it fits the input that it comes back as
    cdef const Signature *signature = batch.signature
    cdef const TensorSignature *tensor
    cdef bint batches = signature.max_batch_size > 0
    cdef bint good
    cdef uint32_t i, k
    cdef char want[512]
    cdef char got[512]
    for i in range(signature.supplied_count):
        if signature.supplied[i].kind != SUPPLY_STATE or signature.supplied[i].source != state:
            continue
        tensor = &signature.inputs[signature.input_count + i]
        good = goes_to.rank == tensor.rank + batches
        for k in range(tensor.rank if good else 0):
            if tensor.dims[k] != -1 and tensor.dims[k] != goes_to.shape[k + batches]:
                good = False
        if not good:
            batch_fail(batch, format_text(
                "the output for state '%s' must have shape %s, got %s", tensor.name.data,
                shape_text(want, sizeof(want), batches, <const long *>tensor.dims, tensor.rank),
                shape_text(got, sizeof(got), False, <const long *>goes_to.shape, goes_to.rank)))
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Answering

cdef void fail_request(NativeBatch *batch, Request *request) noexcept nogil:
    request_fail(request, STATUS_INTERNAL, format_text("%s", text_or_no_memory(batch.details)))


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


cdef void drop_null(NativeBatch *batch) noexcept nogil:
    # the rows that stood for nobody
    cdef uint32_t i
    for i in range(batch.count):
        if batch.requests[i] != NULL and batch.requests[i].null:
            request_free(batch.requests[i])
            batch.requests[i] = NULL


cdef void batch_finish(NativeBatch *batch) noexcept nogil:
    cdef uint32_t i
    cdef Request *request
    give_inputs(batch)
    drop_null(batch)
    forget_detached(batch)
    for i in range(batch.count):
        request = batch.requests[i]
        if batch.failed:
            fail_request(batch, request)
        elif request.response.status == STATUS_OK:
            response_complete(&request.response)
        if request.sequence != NULL:
            batch.lane.settle(batch.lane, request)
    account(batch)
    return_requests(batch)


cdef void account(NativeBatch *batch) noexcept nogil:
    cdef Execution execution
    cdef int64_t end = now_ns()
    cdef uint64_t fail_ns = 0
    cdef uint32_t i
    cdef const Request *request
    memset(&execution, 0, sizeof(Execution))
    for i in range(batch.count):
        request = batch.requests[i]
        if request.response.status == STATUS_OK:
            execution.requests += 1
            execution.served_rows += request.rows
            execution.success_ns += <uint64_t>(end - request.arrived_ns)
            execution.queue_ns += <uint64_t>(batch.taken_ns - request.queued_ns)
        else:
            fail_ns += <uint64_t>(end - request.arrived_ns)
    if execution.requests < batch.count:
        statistics_failed(&batch.lane.statistics, batch.count - execution.requests, fail_ns)
    if execution.requests:
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
        tell_phases(batch, &execution)


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
        cdef uint32_t i
        cdef bytes wanted = name.encode()
        self.check()
        for i in range(self.batch.signature.output_count + self.batch.signature.kept_count):
            if self.batch.signature.outputs[i].name.data == wanted:
                return i
        raise ValueError(f"the model has no output '{name}'")

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
        cdef uint32_t i
        cdef GatheredInput *data
        cdef bytes wanted = name.encode()
        self.check()
        for i in range(self.batch.signature.input_count + self.batch.signature.supplied_count):
            if self.batch.signature.inputs[i].name.data == wanted:
                data = &self.batch.inputs[i]
                if not data.present:
                    return None
                return view_new(data.block, data.data, data.size, self.batch.signature.inputs[i].datatype,
                                data.shape, data.rank)
        raise ValueError(f"the model has no input '{name}'")

    def wants(self, name: str) -> bool:
        """Whether any request asked for this output."""
        return batch_wants(self.batch, self.output_index(name))

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

    cdef int hand_over(self, uint32_t index, Block *block, const uint8_t *data, size_t size, const int64_t *shape,
                       uint32_t rank) except -1:
        cdef bint good
        with nogil:
            good = batch_set_output(self.batch, index, block, data, size, shape, rank)
        if not good:
            raise ValueError(self.batch.details.decode() if self.batch.details != NULL else "out of memory")
        return 0

    cdef void fail(self, str text):
        cdef bytes encoded = text.encode("utf-8", "replace")
        batch_fail(self.batch, format_text("%s", <const char *>encoded))


cdef Batch batch_for_python(NativeBatch *batch, str instance_name):
    cdef Batch out = Batch.__new__(Batch)
    out.batch = batch
    out.instance_name = instance_name
    return out
