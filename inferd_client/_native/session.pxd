# HTTP/2 as a client, without I/O: bytes in, bytes and events out. The client package and the load driver use it.

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from inferd_client._native.linux cimport iovec
from inferd_client._native.nghttp2 cimport nghttp2_nv, nghttp2_session
from inferd_client._native.output cimport Output

cdef enum Ending:
    STREAM_CLOSED            # with a status, or, without gRPC, as HTTP/2 wants it
    STREAM_RESET             # before a status was seen
    CONNECTION_LOST

# One call on the wire, the first member of what its owner keeps of it.
cdef struct Exchange:
    int32_t stream           # -1: not on the wire
    bint began               # some of it was serialised: the server may have seen it
    # what is to be sent, by reference if `stays`: until it has ended and the output is empty
    const iovec *parts
    uint32_t part_count
    uint32_t part            # the first that is not all sent
    size_t part_sent         # bytes of that one
    size_t unsent            # bytes in all
    bint stays
    bint goes_on             # further parts may follow
    # the answer
    int32_t http_status      # 0: none seen
    int32_t grpc_status      # -1: none seen
    bint held                # the owner has enough of it for now: the peer may send no more than its window
    size_t unacknowledged    # bytes that came since then

# A header or trailer of an answer, other than :status and grpc-status.
ctypedef void (*header_fn)(Session *session, Exchange *exchange, const uint8_t *name, size_t name_size,
                           const uint8_t *value, size_t value_size) noexcept nogil
# Bytes of an answer; False ends the connection.
ctypedef bint (*data_fn)(Session *session, Exchange *exchange, const uint8_t *data, size_t size) noexcept nogil
# An exchange has ended; it is the callee's. `error` is of HTTP/2.
ctypedef void (*ended_fn)(Session *session, Exchange *exchange, Ending ending, uint32_t error) noexcept nogil

cdef struct Session:
    # of the owner
    header_fn header         # NULL: not wanted
    data_fn data             # NULL: answers' bytes are dropped
    ended_fn ended
    nghttp2_session *http2
    bint ready               # the peer's SETTINGS have arrived
    bint refusing            # no further streams: GOAWAY
    uint64_t bytes_received  # of DATA frames
    uint64_t pongs           # PINGs of ours that were answered
    bint in_order            # large bodies are sent one after the other, not beside each other
    int32_t last_large       # the stream of the latest of them
    Output output

# Begin the handshake; the hooks are set, everything else is 0. The windows of flow control are in bytes: of each stream
# and of the connection. False when there is no memory.
cdef bint session_open(Session *session, int32_t stream_window, int32_t window,
                       uint32_t max_frame_size) noexcept nogil
cdef void session_close(Session *session) noexcept nogil
# Say GOAWAY.
cdef void session_terminate(Session *session) noexcept nogil

# Start an exchange, whose parts are set. False: the session takes no more.
cdef bint session_submit(Session *session, Exchange *exchange, const nghttp2_nv *headers, size_t count) noexcept nogil
# Nothing more of it is wanted; it ends when this is serialised.
cdef void session_reset(Session *session, Exchange *exchange) noexcept nogil
# It has further parts, or goes on no longer.
cdef void session_resume(Session *session, Exchange *exchange) noexcept nogil
# Its answer is held no longer: the peer may go on.
cdef void session_release(Session *session, Exchange *exchange) noexcept nogil
cdef void session_ping(Session *session) noexcept nogil

# What was read. False: the connection is of no use any more.
cdef bint session_receive(Session *session, const uint8_t *data, size_t size) noexcept nogil
# Let nghttp2 serialise as much as one write takes into `output`. False: as above.
cdef bint session_collect(Session *session) noexcept nogil
cdef bint session_wants_write(Session *session) noexcept nogil
