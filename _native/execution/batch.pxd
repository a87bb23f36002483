# The requests that an instance took together.

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free

from _native.execution.supply cimport GatheredInput
from _native.memory.resource cimport Block
from _native.request.request cimport Request
from _native.request.signature cimport Signature
from _native.scheduling.lane cimport Lane

cdef struct NativeBatch:
    Lane *lane
    const Signature *signature
    Request **requests       # oldest first
    uint32_t count
    uint32_t capacity
    uint32_t rows            # over all requests; 1 without a batch dimension
    bint writes_inputs       # the executor may write to gathered inputs: they are the batch's own, by a copy if need be
    GatheredInput *inputs    # all of the signature, the supplied ones behind those of requests; from batch_gather
    bint failed              # all requests get INTERNAL with `details`
    char *details            # from malloc
    bint stopped             # nobody waits any more, so it was ended early: `failed` is CANCELLED then
    bint blamed              # the requests cannot be executed as they are: `failed` is INVALID_ARGUMENT then
    bint recorded            # some of its requests have records
    const char *instance     # its name
    const char *why          # it left its queue, static text of the scheduler's; NULL: not told
    int64_t busy_ns          # in which batches were executed, together; read by other threads
    int64_t running          # requests that are executed now; read by other threads
    int64_t taken_ns
    int64_t input_end_ns
    int64_t output_start_ns

# A native executor: gathers inputs (_native.execution.gather) or looks at those of the requests, sets every wanted
# output (_native.execution.scatter) for the batch or request by request, or calls batch_fail. Called without the GIL on
# the instance's thread, one batch at a time.
ctypedef void (*execute_fn)(NativeBatch *batch, void *context) noexcept nogil

# Whether an instance may take a batch now; waits until that is known. Called without the GIL on the instance's thread,
# before each batch.
ctypedef bint (*await_fn)(void *context) noexcept nogil

# Fail the whole batch; `details` is from malloc and taken over.
cdef inline void batch_fail(NativeBatch *batch, char *details) noexcept nogil:
    if batch.failed:
        free(details)
        return
    batch.failed = True
    free(batch.details)
    batch.details = details

# The same for an error whose text may say what is in one of the requests: the clients of several are told a number.
# Returns what is to be logged, which explains it. Call it once for an error.
cdef str batch_fail_by(NativeBatch *batch, str text)

cdef int batch_init(NativeBatch *batch, Lane *lane) except -1
cdef void batch_free(NativeBatch *batch) noexcept nogil

# Start with a chain of requests from consumer_take. Those whose deadline has passed are answered and left out: the
# batch may be empty, then there is nothing to execute.
cdef void batch_begin(NativeBatch *batch, Request *chain) noexcept nogil
# Have the inputs that lie on other devices than this (-1: on any) copied to the host's memory; see inputs_fetch.
# Requests whose device does not do that are answered and left out, as by batch_begin.
cdef void batch_fetch(NativeBatch *batch, int device, bint in_place) noexcept nogil
# Take a request out of the batch: the executor owns it now, answers it when it likes by bridge_return, and counts it.
cdef Request *batch_detach(NativeBatch *batch, uint32_t index) noexcept nogil
# When the batch is finished, give this request back to the lane instead of answering it, to be run again with the state
# that it has brought. False: the model's sequences are not iterative. For a detached one see
# SequenceHooks.again.
cdef bint batch_reschedule(NativeBatch *batch, uint32_t index) noexcept nogil
# Answer every request that was not detached, and count; the requests are no longer the batch's.
cdef void batch_finish(NativeBatch *batch) noexcept nogil


cdef class Batch:
    # what a Python backend sees of a batch
    cdef NativeBatch *batch  # NULL once answered
    cdef readonly str instance_name
    cdef int check(self) except -1
    cdef uint32_t output_index(self, str name) except? 0xffffffff
    cdef int hand_over(self, uint32_t index, Block *block, const uint8_t *data, size_t size, const int64_t *shape,
                       uint32_t rank) except -1

cdef Batch batch_for_python(NativeBatch *batch, str instance_name)
