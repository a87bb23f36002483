"""The executor of the identity backend."""

from cpython.pycapsule cimport PyCapsule_New, PyCapsule_SetContext
from libc.stdint cimport int64_t, intptr_t, uint32_t
from libc.string cimport memcpy

from _native.batch cimport GatheredInput, NativeBatch, batch_gather, batch_set_output, batch_wants, execute_fn
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
    cdef OutputData *out = &request.response.outputs[output]
    if not out.wanted or not given.present:
        return
    block_give(out.block)
    out.block = block_share(given.block)
    out.data = given.data
    out.size = given.size
    out.datatype = request.signature.outputs[output].datatype
    out.rank = given.rank
    memcpy(out.shape, given.shape, given.rank * sizeof(int64_t))


cdef void pass_time(NativeBatch *batch, int64_t delay_ns) noexcept nogil:
    """What stands for the computation, between the two times that statistics need."""
    batch.input_end_ns = now_ns()
    if delay_ns > 0:
        sleep_ns(delay_ns)
        batch.output_start_ns = now_ns()
    else:
        batch.output_start_ns = batch.input_end_ns


cdef void execute(NativeBatch *batch, void *context) noexcept nogil:
    # inputs are not gathered: nothing here needs them side by side
    cdef uint32_t i, output
    pass_time(batch, <intptr_t>context)
    for i in range(batch.count):
        for output in range(batch.signature.output_count):
            answer(batch.requests[i], output)


cdef void execute_gathered(NativeBatch *batch, void *context) noexcept nogil:
    # the way of a real model: inputs side by side, one output for the whole batch, split among the requests
    cdef const GatheredInput *given
    cdef uint32_t output
    if not batch_gather(batch):
        return
    pass_time(batch, <intptr_t>context)
    for output in range(batch.signature.output_count):
        given = &batch.inputs[output]
        if not given.present or not batch_wants(batch, output):
            continue
        if not batch_set_output(batch, output, block_share(given.block), given.data, given.size, given.shape,
                                given.rank):
            return


def make_executor(delay_ns: int, gather: bool) -> object:
    """The capsule for NativeInstance.executor; its context is the delay itself, so there is nothing to free."""
    cdef execute_fn function = execute_gathered if gather else execute
    capsule = PyCapsule_New(<void *>function, "inferd.execute_fn", NULL)
    PyCapsule_SetContext(capsule, <void *><intptr_t>delay_ns)
    return capsule
