"""The executor of the identity backend."""

from cpython.pycapsule cimport PyCapsule_New, PyCapsule_SetContext
from libc.stdint cimport int64_t, intptr_t, uint32_t
from libc.string cimport memcpy

from _native.batch cimport NativeBatch, execute_fn
from _native.clock cimport now_ns
from _native.memory cimport block_give, block_share
from _native.request cimport InputData, OutputData, Request

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


cdef void answer(Request *request, uint32_t output) noexcept nogil:
    # the output shares the memory in which the input arrived
    cdef const InputData *given = &request.inputs[output]
    cdef OutputData *out = &request.outputs[output]
    if not out.wanted or not given.present:
        return
    block_give(out.block)
    out.block = block_share(given.block)
    out.data = given.data
    out.size = given.size
    out.datatype = request.signature.outputs[output].datatype
    out.rank = given.rank
    memcpy(out.shape, given.shape, given.rank * sizeof(int64_t))


cdef void execute(NativeBatch *batch, void *context) noexcept nogil:
    # inputs are not gathered: nothing here needs them side by side
    cdef int64_t delay_ns = <intptr_t>context
    cdef uint32_t i, output
    batch.input_end_ns = now_ns()
    if delay_ns > 0:
        sleep_ns(delay_ns)
        batch.output_start_ns = now_ns()
    else:
        batch.output_start_ns = batch.input_end_ns
    for i in range(batch.count):
        for output in range(batch.signature.output_count):
            answer(batch.requests[i], output)


def make_executor(delay_ns: int) -> object:
    """The capsule for NativeInstance.executor; its context is the delay itself, so there is nothing to free."""
    cdef execute_fn function = execute
    capsule = PyCapsule_New(<void *>function, "inferd.execute_fn", NULL)
    PyCapsule_SetContext(capsule, <void *><intptr_t>delay_ns)
    return capsule
