# The loop of an instance's thread: takes batches and has them executed, until no more will come.

from libc.stdint cimport uint32_t

from inferd._native.execution.batch cimport await_fn
from inferd._native.request.lane cimport LaneHandle
from inferd._native.request.request cimport Request
from inferd._native.scheduling.dispatcher cimport Consumer
from inferd._native.scheduling.limiter cimport ClaimHandle


cdef class ExecutionLoop:
    # Kinds of instances override what they do differently.
    cdef LaneHandle lane
    cdef ClaimHandle claim
    cdef Consumer consumer
    cdef object instance
    cdef readonly str name
    cdef bytes encoded_name
    cdef const char *label   # the name as C text
    cdef await_fn gate
    cdef void *gate_context

    # Called before the loop asks for a batch: acquire what an execution needs. May wait.
    cdef void get_ready(self) noexcept nogil
    # Whether get_ready would return at once.
    cdef bint is_ready(self) noexcept nogil
    # Execute and answer this batch, at once or later.
    cdef void serve(self, Request *chain) noexcept nogil
    # Execute this batch of a warm-up; its requests have their responses when this returns.
    cdef void serve_alone(self, Request *chain) noexcept nogil
    # Called when consumer_take returned no batch: continue a batch that the front has begun, and release what get_ready
    # has acquired.
    cdef void go_on(self) noexcept nogil
    # The loop: take batches and serve them until no more will come.
    cdef void work(self) noexcept nogil
