# What the thread of every instance does: take batches and have them executed, until nothing more will come.

from libc.stdint cimport uint32_t

from _native.execution.batch cimport await_fn
from _native.request.request cimport Request
from _native.scheduling.dispatcher cimport Consumer
from _native.scheduling.lane cimport LaneHandle
from _native.scheduling.limiter cimport ClaimHandle


cdef class ExecutionLoop:
    # A kind of instance overrides what it does otherwise.
    cdef LaneHandle lane
    cdef ClaimHandle claim
    cdef Consumer consumer
    cdef object instance
    cdef readonly str name
    cdef bytes encoded_name
    cdef const char *label   # the name, as C has it
    cdef await_fn gate
    cdef void *gate_context

    # Before it asks for a batch, and then for what it needs itself to execute one; may wait.
    cdef void get_ready(self) noexcept nogil
    # Whether that would wait.
    cdef bint is_ready(self) noexcept nogil
    # Execute and answer this batch, at once or some time later.
    cdef void serve(self, Request *chain) noexcept nogil
    # The same for a warm-up: it is answered on return.
    cdef void serve_alone(self, Request *chain) noexcept nogil
    # There was no batch: what get_ready has got is not needed, and what the loop has begun is to be gone on with.
    cdef void go_on(self) noexcept nogil
    cdef void work(self) noexcept nogil
