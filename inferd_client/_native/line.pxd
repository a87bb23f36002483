# One connection of the client, without Python: its session, its calls in flight, and its reading thread.
#
# Any thread may start calls and wait for them. One of the waiting threads reads for all, and releases the lock while it
# is in poll(); so a call of a single thread needs no switch between threads. Calls for which no thread waits announce
# themselves in the line's news, which an attendant thread or an event loop takes.

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from inferd_client._native.linux cimport iovec, pthread_cond_t, pthread_mutex_t
from inferd_client._native.nghttp2 cimport nghttp2_nv
from inferd_client._native.session cimport Ending, Exchange, Session

cdef enum:
    READ_SIZE = 1 << 18

# One whole message. The taker frees it.
cdef struct Arrived:
    Arrived *next
    uint8_t *data            # of the pool
    size_t size
    size_t capacity
    bint compressed

cdef enum GivenUp:
    NOT_GIVEN_UP
    EXPIRED                  # its deadline has passed
    CANCELLED                # the caller wants no response
    TOO_LARGE                # its response exceeds the limit
    NO_MEMORY                # for its response

cdef enum:
    LOOK = 1                 # news of a call
    ENDED = 2                # its end: other threads do not touch it any more, or the thread must take the lock first

# One call, the first member of a Call.
cdef struct Wire:
    Exchange exchange
    void *call               # the Call
    Wire *next               # the next of those in flight
    Wire *previous
    Wire *next_news
    bint in_flight
    bint has_news
    bint announces           # no thread waits for it: its end and its messages are news
    bint done
    bint orphaned            # it has ended here, but the session still has it
    bint waiting             # a thread waits for `word`
    uint32_t word            # to that thread: 0, LOOK or ENDED
    bint locks               # that thread must take the lock even after ENDED
    bint many                # the response is a stream of messages
    uint64_t deadline_ns     # 0: none
    Ending ending
    uint32_t error           # an HTTP/2 error code
    GivenUp given_up
    # the message that is being received
    uint8_t prefix[5]
    uint8_t prefix_size
    uint8_t *message
    size_t message_size
    size_t capacity
    size_t filled
    Arrived *first
    Arrived *last
    # zero-terminated texts of the response; NULL: none
    char *text               # grpc-message
    char *details            # grpc-status-details-bin
    char encoding[16]        # grpc-encoding

cdef struct Line:
    Session session
    pthread_mutex_t lock
    pthread_cond_t attendant
    int fd
    int wake                 # eventfd: makes the reading thread look again
    bint dead
    bint closing             # its owner no longer uses it: the attendant ends
    bint reading             # a thread is the reader
    bint polling             # the reader is in poll(), and has not been woken
    bint blocked             # the socket accepts no more for now
    int32_t coming           # threads that are about to take the lock and flush
    uint64_t emptied         # the number of times that all serialised output was written
    bint evented             # an event loop polls; no thread does
    uint64_t wakes_ns        # when the reader's poll ends
    uint64_t busy_ns         # how long the reader polls before it sleeps; 0: it sleeps at once
    Wire *flight             # the calls in flight
    uint32_t count           # of calls in flight
    uint32_t announcing      # of these, the calls that announce
    uint32_t timed           # of these, the calls with a deadline
    Wire *news
    Wire *last_news
    uint8_t *buffer          # READ_SIZE bytes
    size_t limit             # bytes of a message
    void *tls                # a Tls, or NULL
    # keepalive; 0: none
    uint64_t ping_every_ns
    uint64_t ping_timeout_ns
    bint ping_idle           # also with no call in flight
    uint64_t heard_ns        # when bytes were last read
    uint64_t pinged_ns       # when an unanswered PING was sent; 0: there is none

cdef bint line_open(Line *line) noexcept nogil
cdef void line_free(Line *line) noexcept nogil

cdef void wire_open(Wire *wire) noexcept nogil
cdef void wire_free(Wire *wire) noexcept nogil

# All of these are called with the lock.
cdef bint line_submit(Line *line, Wire *wire, const nghttp2_nv *headers, size_t count) noexcept nogil
cdef void line_give_up(Line *line, Wire *wire, GivenUp why) noexcept nogil
# Read the available bytes, and process them.
cdef void line_receive(Line *line) noexcept nogil
cdef void line_flush(Line *line) noexcept nogil
# End calls whose deadline has passed, and send pings that are due. Returns when to call again; 0: never.
cdef uint64_t line_tick(Line *line) noexcept nogil
cdef void line_kill(Line *line) noexcept nogil
# As the reader: poll until something happens or `until_ns` (0: no limit), and process it. False: a signal came.
cdef bint line_turn(Line *line, uint64_t until_ns) noexcept nogil
# Make another thread the reader, if one waits.
cdef void line_hand_over(Line *line) noexcept nogil
cdef void line_wake_reader(Line *line) noexcept nogil
# As the attendant: wait for work, at most until `until_ns`.
cdef void line_attend(Line *line, uint64_t until_ns) noexcept nogil
# While another thread reads: wait for the end of the call or for a message, at most until `until_ns`. True: the call
# has ended, and the lock is released. False: look again; the lock is held.
cdef bint line_wait(Line *line, Wire *wire, uint64_t until_ns) noexcept nogil
