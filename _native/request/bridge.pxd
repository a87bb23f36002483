# The way to the event loop from every other thread.

from libc.stdint cimport int32_t, int64_t, uint32_t

from _native.request.callback cimport PostedCallback
from _native.request.request cimport Request, Response
from _native.threads cimport Mutex
from _native.timers cimport Timers, TimersHandle

cdef struct WatchedDescriptor:
    # a descriptor that the loop reads for somebody
    int fd
    bint once                # it is told of what comes, not of what is still there: `read` leaves nothing behind
    void *owner
    # On the loop: it is readable, or its other end is closed. False: no more of it.
    bint (*read)(WatchedDescriptor *descriptor) noexcept nogil

cdef struct Bridge:
    Mutex guard              # guards the two lists
    Response *head
    Response *tail
    PostedCallback *first_callback
    PostedCallback *last_callback
    int32_t signalled        # atomic: the loop has been told and has not looked yet
    int event_fd             # is told when there is something in a list
    int poll_fd              # readable when that has been told or a watched descriptor is readable
    Mutex reading            # held while watched descriptors are read
    # Used on the loop thread only:
    Timers *timers           # of the loop
    uint32_t in_house        # requests admitted and not yet freed
    void (*after)(void *context) noexcept nogil     # called when a round of deliveries is done
    void *after_context
    void *owner              # the BridgeHandle; not a reference

# From any thread: hand over a chain of responses. The loop delivers them, and frees each request after its final one.
cdef void bridge_return(Bridge *bridge, Response *first, Response *last) noexcept nogil
# On the loop, from inside of another delivery only: the same for one response, at once. A sink for one response gets
# one, whatever the model sends: a response that is not the final one is held until the end is known.
cdef void bridge_deliver(Bridge *bridge, Response *response) noexcept nogil
# From any thread: have the callback run on the loop, once, soon. It must stay where it is until then.
cdef void bridge_post(Bridge *bridge, PostedCallback *callback) noexcept nogil
# From any thread: have the loop read the descriptor. False: the system refuses.
cdef bint bridge_attach(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil
# On the loop: arm a watched descriptor anew, so that its `read` is called again for bytes that are still there.
cdef void bridge_look_again(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil
# From any thread but the loop, without the GIL: the opposite. `read` is not called any more when it returns.
cdef void bridge_detach(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil
# On the loop: watch request.deadline_ns, at which the sink gets DEADLINE_EXCEEDED, and request.expires_ns, at which the
# lane's scheduler says what happens. False: no memory, which cannot be when timers_have_room.
cdef bint bridge_watch(Bridge *bridge, Request *request) noexcept nogil
# On the loop: the sink no longer wants the answer. Queued work leaves the queue; running work is told.
cdef void bridge_abandon(Request *request) noexcept nogil


cdef class BridgeHandle:
    # owns a Bridge for Python
    cdef Bridge bridge
    cdef readonly TimersHandle timers    # of the loop
    cdef list refused        # (status, details) of requests that no instance has seen
    cdef int64_t more_refused
    cdef readonly dict refusal_counts    # of requests that no instance has seen, by reason of the error or status
    cdef void note_refusal(self, Response *response) noexcept
