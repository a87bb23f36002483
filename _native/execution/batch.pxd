# A batch: the requests that an instance executes together.

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free

from inferd._native.execution.supply cimport GatheredInput
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request
from inferd._native.request.signature cimport Signature

cdef struct NativeBatch:
    Lane *lane
    const Signature *signature
    Request **requests       # oldest first
    uint32_t count
    uint32_t capacity
    uint32_t rows            # over all requests; 1 without a batch dimension
    bint writes_inputs       # the executor may write to gathered inputs, which are then the batch's own, or a copy
    GatheredInput *inputs    # all of the signature, supplied inputs behind those of requests; from batch_gather
    bint failed              # all requests get INTERNAL with `details`
    char *details            # from malloc
    bint stopped             # no client waits any more, so the execution was stopped: `failed` means CANCELLED
    bint blamed              # the requests cannot be executed: `failed` means INVALID_ARGUMENT
    bint recorded            # some of its requests have records
    const char *instance     # its name
    const char *why          # the reason for which it left its queue, static text of the scheduler; NULL: unknown
    int64_t busy_ns          # summed time in which batches were executed; other threads read it
    int64_t busy_before_ns   # busy_ns counts from here at the earliest: before, the instance executed another batch
    int64_t running          # requests that are executed now; other threads read it
    int64_t taken_ns
    int64_t input_end_ns
    int64_t output_start_ns
    int64_t end_ns
    uint32_t handed_back     # requests that are to be executed again, of a batch that has not failed

# A native executor. It gathers inputs (inferd._native.execution.gather) or reads those of the requests, and sets every
# wanted output (inferd._native.execution.scatter) for the batch or request by request, or calls batch_fail. Called
# without the GIL on the instance's thread, one batch at a time.
ctypedef void (*execute_fn)(NativeBatch *batch, void *context) noexcept nogil

# Called without the GIL on the instance's thread before each batch: waits until it is known whether the instance may
# take a batch, and returns whether it may.
ctypedef bint (*await_fn)(void *context) noexcept nogil

# Fail the whole batch; takes over `details`, which is from malloc.
cdef inline void batch_fail(NativeBatch *batch, char *details) noexcept nogil:
    if batch.failed:
        free(details)
        return
    batch.failed = True
    free(batch.details)
    batch.details = details

# Fail the batch for an error whose text may quote one of its requests. If the batch has several requests, its clients
# get a number instead of the text. Returns the text for the log, with that number. Call it once for each error.
cdef str batch_fail_by(NativeBatch *batch, str text)

cdef int batch_init(NativeBatch *batch, Lane *lane) except -1
cdef void batch_free(NativeBatch *batch) noexcept nogil

# Start with a chain of requests from consumer_take. Requests past their deadline are answered and left out. The
# batch may then be empty, and nothing is to be executed.
cdef void batch_begin(NativeBatch *batch, Request *chain) noexcept nogil
# Copy inputs that are on other devices than `device` (-1: on any) to host memory; see inputs_fetch. Requests
# for which this fails are answered and left out, as by batch_begin.
cdef void batch_fetch(NativeBatch *batch, int device, bint in_place) noexcept nogil
# Release the gathered inputs, after batch_gather or batch_describe.
cdef void batch_give_inputs(NativeBatch *batch) noexcept nogil
# Remove a request from the batch: the executor owns it now, answers it by bridge_return at any time, and counts it.
cdef Request *batch_detach(NativeBatch *batch, uint32_t index) noexcept nogil
# Do not answer this request when the batch is finished, but return it to the lane to be executed again with its new
# state. False: the model's sequences are not iterative. For a detached request see
# SequenceHooks.again.
cdef bint batch_reschedule(NativeBatch *batch, uint32_t index) noexcept nogil
# Answer every request that was not detached, and count; the requests leave the batch.
cdef void batch_finish(NativeBatch *batch) noexcept nogil
