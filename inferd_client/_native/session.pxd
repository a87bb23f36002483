# An HTTP/2 client without I/O: bytes in, bytes and events out. The client package and the load driver use it.

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from inferd_client._native.linux cimport iovec
from inferd_client._native.nghttp2 cimport nghttp2_nv, nghttp2_session
from inferd_client._native.output cimport Output

cdef enum Ending:
    STREAM_CLOSED            # with a status, or, without gRPC, in the normal way of HTTP/2
    STREAM_RESET             # before a status was received
    CONNECTION_LOST

# One call on the wire, the first member of its owner's structure.
cdef struct Exchange:
    int32_t stream           # -1: not on the wire
    bint began               # a part of it was serialised: the server may have seen it
    # What to send. With `stays`, bytes are not copied: they must not change until the exchange has ended and the output
    # is empty.
    const iovec *parts
    uint32_t part_count
    uint32_t part            # the first part that is not completely sent
    size_t part_sent         # bytes of that part that are sent
    size_t unsent            # bytes in all
    bint stays
    bint goes_on             # further parts may follow
    # the response
    int32_t http_status      # 0: not received
    int32_t grpc_status      # -1: not received
    bint held                # the owner is holding the response: the peer may send at most its window
    size_t unacknowledged    # bytes that have come since `held` was set

# A header or trailer of a response, except :status and grpc-status.
ctypedef void (*header_fn)(Session *session, Exchange *exchange, const uint8_t *name, size_t name_size,
                           const uint8_t *value, size_t value_size) noexcept nogil
# Bytes of a response; False ends the connection.
ctypedef bint (*data_fn)(Session *session, Exchange *exchange, const uint8_t *data, size_t size) noexcept nogil
# An exchange has ended, and belongs to the callee. `error` is an HTTP/2 error code.
ctypedef void (*ended_fn)(Session *session, Exchange *exchange, Ending ending, uint32_t error) noexcept nogil

cdef struct Session:
    # set by the owner
    header_fn header         # NULL: not needed
    data_fn data             # NULL: the bytes of responses are dropped
    ended_fn ended
    nghttp2_session *http2
    bint ready               # the peer's SETTINGS have come
    bint refusing            # the peer takes no further streams: GOAWAY
    uint64_t bytes_received  # of DATA frames
    int32_t frame_stream     # of the DATA frame that is arriving
    size_t frame_left        # bytes of its data that have not come; 0: no such frame is arriving, or it is padded
    size_t frame_size        # bytes of the data of the DATA frame that came last
    uint64_t pongs           # own PINGs that were answered
    bint in_order            # send large bodies one after the other, not concurrently
    int32_t last_large       # the stream of the last large body
    Output output

# Begin the handshake. The hooks are set, everything else is 0. The flow control windows are in bytes, for each stream
# and for the connection. False if there is no memory.
cdef bint session_open(Session *session, int32_t stream_window, int32_t window,
                       uint32_t max_frame_size) noexcept nogil
cdef void session_close(Session *session) noexcept nogil
# Send GOAWAY.
cdef void session_terminate(Session *session) noexcept nogil

# Start an exchange whose parts are set. False: the session takes no more.
cdef bint session_submit(Session *session, Exchange *exchange, const nghttp2_nv *headers, size_t count) noexcept nogil
# Reset the exchange; it ends when the reset is serialised.
cdef void session_reset(Session *session, Exchange *exchange) noexcept nogil
# The exchange has further parts, or will have no more.
cdef void session_resume(Session *session, Exchange *exchange) noexcept nogil
# The response is no longer held: the peer may continue.
cdef void session_release(Session *session, Exchange *exchange) noexcept nogil
cdef void session_ping(Session *session) noexcept nogil

# Process bytes that were read. False: the connection is unusable.
cdef bint session_receive(Session *session, const uint8_t *data, size_t size) noexcept nogil
# Let nghttp2 serialise into `output` as much as one write to the socket takes. False: as above.
cdef bint session_collect(Session *session) noexcept nogil
cdef bint session_wants_write(Session *session) noexcept nogil
# False: no further input can be of use.
cdef bint session_wants_read(Session *session) noexcept nogil
