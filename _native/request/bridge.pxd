# The bridge: the way to the front from every other thread.

from libc.stdint cimport int32_t, int64_t, uint32_t

from inferd._native.front cimport PythonEvent
from inferd._native.request.callback cimport PostedCallback
from inferd._native.request.request cimport Request, Response
from inferd._native.threads cimport Mutex
from inferd._native.timers cimport Timers, TimersHandle
from inferd._native.transport.io cimport Source
from inferd._native.transport.io_thread cimport IoThreads

cdef struct WatchedDescriptor:
    # a descriptor that the front reads for another part of the server
    int fd
    bint once                # `read` always reads everything, so it need be called only when new bytes come
    void *owner
    # In the front: the descriptor is readable, or its other end is closed. False: stop watching it.
    bint (*read)(WatchedDescriptor *descriptor) noexcept nogil

cdef enum:
    NOTED_REFUSALS = 32      # texts kept between two calls of take_refusals

cdef struct RefusalNote:
    int status
    char *details            # from malloc; NULL: no memory for it

cdef struct Bridge:
    Mutex guard              # protects the two lists
    Response *head
    Response *tail
    PostedCallback *first_callback
    PostedCallback *last_callback
    int32_t signalled        # atomic: the front has been signalled and has not looked yet
    int event_fd             # written when a list gets its first entry
    int poll_fd              # readable when event_fd or a watched descriptor is readable
    Mutex reading            # held while watched descriptors are read
    # Used in the front only:
    Timers *timers           # of the front
    uint32_t admitted_count  # requests that are admitted and not freed
    void (*after)(void *context) noexcept nogil     # called after a round of deliveries
    void *after_context
    RefusalNote notes[NOTED_REFUSALS]   # requests that no instance has taken
    uint32_t noted           # how many of these there are
    int64_t more_refused     # requests for which there was no room in `notes`
    bint promised            # the I/O thread delivers before it sleeps
    bint watched             # Python waits for a condition that a delivery may fulfil
    PythonEvent news         # there are notes, or Python is to look at its conditions

# From any thread: hand over a chain of responses. The front delivers them, and frees each request after its final one.
cdef void bridge_return(Bridge *bridge, Response *first, Response *last) noexcept nogil
# The two steps of bridge_return. The front is woken once for all responses that are put before a signal.
cdef void bridge_put(Bridge *bridge, Response *first, Response *last) noexcept nogil
cdef void bridge_signal(Bridge *bridge) noexcept nogil
# In the front, only within another delivery: deliver one response at once. A sink that takes a single response gets
# one, whatever the model sends: a response that is not final is held until the end of the request is known.
cdef void bridge_deliver(Bridge *bridge, Response *response) noexcept nogil
# In the front, before the caller returns responses. If the caller is an I/O thread, which delivers at the end of its
# round anyway, these responses need no signal.
cdef void bridge_promise(Bridge *bridge) noexcept nogil
# From any thread: have the front run the callback soon, once. The callback must not move until then.
cdef void bridge_post(Bridge *bridge, PostedCallback *callback) noexcept nogil
# From any thread: have the front read the descriptor. False: the system refuses.
cdef bint bridge_attach(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil
# In the front: arm a watched descriptor again, so that `read` is called for bytes that are still there.
cdef void bridge_look_again(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil
# From any thread but the front, without the GIL: stop reading the descriptor. `read` does not run after the return.
cdef void bridge_detach(Bridge *bridge, WatchedDescriptor *descriptor) noexcept nogil
# In the front: set the timer of a request with a deadline or a limit in the queue. At the deadline of a request that is
# not inner the sink gets DEADLINE_EXCEEDED. At request.expires_ns the lane's scheduler decides, or the object that the
# request waits for. False: no memory, which is impossible after timers_have_room.
cdef bint bridge_watch(Bridge *bridge, Request *request) noexcept nogil
# In the front: the sink no longer wants a response. A queued request leaves the queue. If an instance executes the
# request, the bridge tells that instance.
cdef void bridge_abandon(Request *request) noexcept nogil


cdef class BridgeHandle:
    # a Bridge for Python
    cdef Bridge bridge
    cdef readonly TimersHandle timers    # of the front
    cdef IoThreads io         # delivers; None: the front does
    cdef Source source       # of the I/O thread
    cdef public object on_news       # called on the event loop when requests were refused, or a delivery was watched
    cdef public object on_hand_over  # the same when an I/O thread begins (True) or ends (False) to deliver
