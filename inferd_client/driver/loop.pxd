# The loop that drives all connections of a Driver.

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from inferd_client._native.nghttp2 cimport nghttp2_nv
from inferd_client.driver.connection cimport MOST_HEADERS, Connection
from inferd_client.driver.schedule cimport Schedule
from inferd_client.driver.tally cimport Journal, Tally
from inferd_client.driver.workload cimport prepare_fn, unfinished_fn, verify_fn

cdef enum:
    TICK_MS = 200            # interval in which an idle run reads the clock, and any run checks for signals

cdef struct Loop:
    int epoll
    int timer                # for the open loop
    uint8_t *buffer          # into which all connections read, one at a time
    Connection *connections
    uint32_t connection_count
    uint32_t turn            # open loop: index of the next connection
    bint busy_poll           # it does not sleep
    # of one run
    Schedule schedule
    uint64_t next_due_ns     # open loop
    uint64_t stall_ns        # give up when no call has ended for this long
    nghttp2_nv headers[MOST_HEADERS]  # the last is grpc-timeout, for calls that have one
    uint32_t header_count
    prepare_fn prepare
    verify_fn verify
    unfinished_fn unfinished
    void *context
    Tally tally
    Journal journal
    Tally counted            # of an open loop, before the requests that end its sequences
    uint64_t started_ns
    uint64_t counted_ns      # its end
    bint no_memory           # for a request
    uint64_t looked_ns       # when signals were last checked
    PyObject *raised         # the exception of a signal's handler; owned; NULL: none

# Open a number of connections to a server, each with the descriptor and the Tls or None that `dial` returns. Raises
# what `dial` raises, or MemoryError; call loop_close in any case.
cdef int loop_open(Loop *loop, object dial, uint32_t connections, int32_t window, uint32_t max_frame_size) except -1
cdef void loop_close(Loop *loop) noexcept nogil
# Wait for events once, up to a limit of time, and process them.
cdef void loop_step(Loop *loop, int timeout_ms) noexcept nogil
# Run until all started calls have ended and none may start, or until the run stalls.
cdef void loop_run(Loop *loop) noexcept nogil
