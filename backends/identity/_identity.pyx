"""The executor of the identity backend."""

from cpython.pycapsule cimport PyCapsule_New, PyCapsule_SetContext
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from inferd._native.atomic cimport fetch_add32
from inferd._native.clock cimport now_ns
from inferd._native.execution.batch cimport NativeBatch, batch_detach, batch_fail, execute_fn
from inferd._native.execution.gather cimport batch_gather
from inferd._native.execution.scatter cimport batch_set_output, batch_wants
from inferd._native.execution.supply cimport GatheredInput
from inferd._native.memory.resource cimport Block, block_give, block_share, block_take, block_wrap
from inferd._native.protobuf.datatype cimport datatype_size
from inferd._native.request.accounting cimport execution_add
from inferd._native.request.bridge cimport Bridge, bridge_return
from inferd._native.request.request cimport (
    InputData,
    OutputData,
    Request,
    Response,
    request_fail,
    request_follow,
    request_unfollow,
    response_free,
    response_new,
)
from inferd._native.request.signature cimport Signature, TensorSignature
from inferd._native.request.statistics cimport Execution, statistics_executed
from inferd._native.status cimport STATUS_INTERNAL, STATUS_RESOURCE_EXHAUSTED
from inferd._native.tensors.completion cimport response_complete
from inferd._native.text cimport format_text
from inferd._native.threads cimport (
    Condition,
    Mutex,
    condition_destroy,
    condition_init,
    lock,
    mutex_destroy,
    mutex_init,
    notify_all,
    unlock,
    wait,
)

cdef extern from *:
    """
    #include <errno.h>
    #include <stdint.h>
    #include <time.h>
    static inline void inferd_sleep_ns(int64_t ns) {
        struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
        while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) == EINTR) {}
    }
    """
    void sleep_ns "inferd_sleep_ns"(int64_t ns) noexcept nogil


cdef enum:
    BYTES_HEADER = 4         # of an element of BYTES: its length
    LARGEST = 0x7fffffff     # bytes of zeros; larger ones are refused as out of memory


cdef Block *zeros_new(const Signature *signature, uint32_t input, int64_t rows, bint of_model,
                      OutputData *out) noexcept nogil:
    # The output for an optional input that was left out: zeros, or empty strings, in its configured shape, or in that
    # of the model where `reshape` has another one, with 1 for a variable dimension. Sets size and shape of `out`; NULL:
    # no memory.
    cdef const TensorSignature *tensor = &signature.inputs[input]
    cdef const int64_t *dims = <const int64_t *>tensor.dims
    cdef size_t size = datatype_size(tensor.datatype)
    cdef uint32_t batch = signature.max_batch_size > 0
    cdef Block *block
    cdef uint32_t i
    if size == 0:
        size = BYTES_HEADER
    out.rank = tensor.rank + batch
    if of_model and tensor.reshaped:
        dims = <const int64_t *>tensor.model_dims
        out.rank = tensor.model_rank + batch
    if batch:
        out.shape[0] = rows
    for i in range(out.rank - batch):
        out.shape[batch + i] = max(1, dims[i])
    for i in range(out.rank):
        if size > LARGEST // <size_t>out.shape[i]:
            return NULL
        size *= <size_t>out.shape[i]
    block = block_take(size)
    if block != NULL:
        memset(block.data, 0, size)
        out.size = size
    return block


cdef void answer(Request *request, uint32_t output) noexcept nogil:
    # the output shares the memory in which the input arrived
    cdef const InputData *given = &request.inputs[output]
    cdef OutputData *out = &request.response.outputs[output]
    if not out.wanted:
        return
    block_give(out.block)
    out.block = NULL
    if not given.present:
        out.datatype = request.signature.outputs[output].datatype
        out.block = zeros_new(request.signature, output, request.rows, False, out)
        if out.block == NULL:
            request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        else:
            out.data = out.block.data
        return
    out.block = block_share(given.block)
    out.data = given.data
    out.size = given.size
    out.datatype = request.signature.outputs[output].datatype
    out.rank = given.rank
    memcpy(out.shape, given.shape, given.rank * sizeof(int64_t))


LONGEST_US = (1 << 31) - 1   # 35 minutes

cdef enum:
    WINDOW = 64              # responses to one request that have not been taken


cdef void pass_time(NativeBatch *batch, void *context) noexcept nogil:
    """Waits in place of a computation, between the two times that statistics need."""
    cdef uint64_t delays_us = <uint64_t><uintptr_t>context
    cdef int64_t delay_ns = <int64_t>((delays_us >> 32) + batch.rows * <uint64_t><uint32_t>delays_us) * 1000
    batch.input_end_ns = now_ns()
    if delay_ns > 0:
        sleep_ns(delay_ns)
        batch.output_start_ns = now_ns()
    else:
        batch.output_start_ns = batch.input_end_ns


cdef void execute(NativeBatch *batch, void *context) noexcept nogil:
    # inputs are not gathered: nothing here needs them side by side
    cdef uint32_t i, output
    pass_time(batch, context)
    for i in range(batch.count):
        for output in range(batch.signature.output_count):
            answer(batch.requests[i], output)


cdef void execute_gathered(NativeBatch *batch, void *context) noexcept nogil:
    # execute as a real model does: inputs side by side, one output for the whole batch, split among the requests
    cdef const GatheredInput *given
    cdef OutputData zeros
    cdef Block *block
    cdef uint32_t output
    if not batch_gather(batch):
        return
    pass_time(batch, context)
    for output in range(batch.signature.output_count):
        given = &batch.inputs[output]
        if not batch_wants(batch, output):
            continue
        if not given.present:
            block = zeros_new(batch.signature, output, batch.rows, True, &zeros)
            if block == NULL:
                batch_fail(batch, NULL)
                return
            if not batch_set_output(batch, output, block, block.data, zeros.size, zeros.shape, zeros.rank):
                return
            continue
        if not batch_set_output(batch, output, block_share(given.block), given.data, given.size, given.shape,
                                given.rank):
            return


cdef bint answer_part(Response *response, int64_t part) noexcept nogil:
    # set the outputs to the part-th entries along the first dimension; False: an input has no such entry, or no memory
    cdef Request *request = response.request
    cdef const InputData *given
    cdef OutputData *out
    cdef uint32_t output
    for output in range(request.signature.output_count):
        out = &response.outputs[output]
        given = &request.inputs[output]
        if not out.wanted:
            continue
        if not given.present:
            out.datatype = request.signature.outputs[output].datatype
            out.block = zeros_new(request.signature, output, 1, False, out)
            if out.block == NULL:
                return False
            out.data = out.block.data
            continue
        if given.rank == 0 or part >= given.shape[0]:
            return False
        out.block = block_share(given.block)
        out.size = given.size // <size_t>given.shape[0]
        out.data = given.data + <size_t>part * out.size
        out.datatype = request.signature.outputs[output].datatype
        out.rank = given.rank
        memcpy(out.shape, given.shape, given.rank * sizeof(int64_t))
        out.shape[0] = 1
    return response_complete(response)


# ---------------------------------------------------------------------------------------------------------------------
# Responses in flight are limited: a request of a few bytes must not make the server hold any number of them.

cdef struct Window:
    Mutex guard
    Condition changed
    uint32_t out             # responses that have not been taken
    bint abandoned
    int32_t references       # atomic: the executor's and those of the responses' acknowledgements


cdef void window_give(Window *window) noexcept nogil:
    if fetch_add32(&window.references, -1) == 1:
        condition_destroy(&window.changed)
        mutex_destroy(&window.guard)
        free(window)


cdef Window *window_new() noexcept nogil:
    cdef Window *window = <Window *>calloc(1, sizeof(Window))
    if window != NULL:
        mutex_init(&window.guard, NULL)
        condition_init(&window.changed)
        window.references = 1
    return window


cdef void taken(void *owner) noexcept nogil:
    # an acknowledgement was given back
    cdef Window *window = <Window *>owner
    lock(&window.guard)
    window.out -= 1
    unlock(&window.guard)
    notify_all(&window.changed)
    window_give(window)


cdef void nobody_waits(Request *request, void *owner) noexcept nogil:
    cdef Window *window = <Window *>owner
    lock(&window.guard)
    window.abandoned = True
    unlock(&window.guard)
    notify_all(&window.changed)


cdef bint window_wait(Window *window) noexcept nogil:
    # wait until one more response may be sent; False: no client waits for it
    cdef bint wanted
    lock(&window.guard)
    while window.out >= WINDOW and not window.abandoned:
        wait(&window.changed, &window.guard)
    wanted = not window.abandoned
    window.out += wanted
    unlock(&window.guard)
    return wanted


cdef Block *ack_new(Window *window) noexcept nogil:
    cdef Block *block = block_wrap(NULL, 0, taken, window)
    if block != NULL:
        fetch_add32(&window.references, 1)
    return block


# ---------------------------------------------------------------------------------------------------------------------

cdef void answer_in_parts(Request *request, Window *window) noexcept nogil:
    # one response for each entry of the first input, then the final one without content
    cdef const InputData *first = &request.inputs[0]
    cdef int64_t parts = first.shape[0] if first.present and first.rank else 0
    cdef Response *response
    cdef int64_t part
    request_follow(request, nobody_waits, window)
    for part in range(parts):
        if not window_wait(window):
            break
        response = response_new(request)
        if response != NULL:
            response.ack = ack_new(window)
        if response == NULL or response.ack == NULL:
            request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
            if response != NULL:
                response_free(response)
            break
        if not answer_part(response, part):
            request_fail(request, STATUS_INTERNAL, format_text(
                "the inputs of a decoupled identity model must have the same first dimension"))
            response_free(response)
            break
        bridge_return(<Bridge *>request.bridge, response, response)
    request_unfollow(request)
    request.response.empty = True
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


cdef void execute_decoupled(NativeBatch *batch, void *context) noexcept nogil:
    cdef Execution execution
    cdef Request *request
    cdef Window *window
    cdef uint32_t i
    pass_time(batch, context)
    memset(&execution, 0, sizeof(Execution))
    execution.rows = batch.rows
    for i in range(batch.count):
        request = batch_detach(batch, i)
        execution.end_ns = now_ns()
        if not request.is_warmup:
            execution_add(&execution, request, batch.taken_ns)
        window = window_new()
        if window != NULL:
            answer_in_parts(request, window)
            window_give(window)
        else:
            request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
            bridge_return(<Bridge *>request.bridge, &request.response, &request.response)
    execution.infer_ns = <uint64_t>(batch.output_start_ns - batch.input_end_ns)
    if execution.some:
        statistics_executed(&batch.lane.statistics, &execution)


def make_executor(delay_us: int, row_delay_us: int, gather: bool, decoupled: bool) -> object:
    """The capsule for NativeInstance.executor; its context is the delays themselves, so there is nothing to free.

    Each is LONGEST_US at most.
    """
    cdef execute_fn function = execute_decoupled if decoupled else execute_gathered if gather else execute
    capsule = PyCapsule_New(<void *>function, "inferd.execute_fn", NULL)
    PyCapsule_SetContext(capsule, <void *><uintptr_t>((<uint64_t>delay_us << 32) + <uint64_t>row_delay_us))
    return capsule
