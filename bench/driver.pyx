"""A gRPC load driver: N connections, M calls in flight on each, one thread, no Python in the loop.

Each `Driver` keeps its connections from run to run. A run is a closed loop (a call that ends is replaced at once) or,
with `rate`, an open loop: calls are due at fixed intervals, or at random, whether or not earlier ones have ended, and
their latency counts from when they were due, so that a stalled server cannot hide its stall.

Requests come from a `Workload`, which may also judge the answers. `Fixed`, here, sends given messages in turn;
`bench.nonce.NonceWorkload` makes random ones whose answers are checked to every byte.

How a run goes, for the reader of the code: `drive` waits in epoll; `receive` feeds nghttp2, which calls `on_close` for
each call that ended; `on_close` judges it and starts the next on the same slot; `flush` lets nghttp2 serialise and
writes. Everything that varies between calls derives from (seed, index), so a run can be repeated.
"""

import socket
import time

from libc.errno cimport EAGAIN, EINTR, errno
from libc.math cimport log1p
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close, read

from bench.nghttp2 cimport *

from bench.report import Latency, Progress, Report
from bench.report import frame as frame_message

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void *ptr
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    enum:
        EPOLLIN
        EPOLLOUT
        EPOLL_CTL_ADD
        EPOLL_CTL_MOD
        EPOLL_CLOEXEC
    int epoll_create1(int)
    int epoll_ctl(int, int, int, epoll_event *)
    int epoll_wait(int, epoll_event *, int, int)

cdef extern from "<sys/timerfd.h>" nogil:
    struct itimerspec:
        timespec it_interval
        timespec it_value
    enum:
        TFD_NONBLOCK
        TFD_CLOEXEC
        TFD_TIMER_ABSTIME
    int timerfd_create(int, int)
    int timerfd_settime(int, int, const itimerspec *, itimerspec *)

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t writev(int, const iovec *, int)

cdef extern from *:
    int clz "__builtin_clzll"(unsigned long long) noexcept nogil

INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
NGHTTP2 = NGHTTP2_VERSION.decode()

VERDICTS = ("correct", "status", "early deadline", "malformed", "model", "id", "outputs", "shape", "bytes")

cdef enum:
    ARENA = 1 << 17           # copied bytes of one write
    PIECES = 64               # pieces of one write
    REFERENCE_FROM = 4096     # a body slice of this size is written from where it lies
    COPIED_SLICE = 1 << 14    # the largest DATA frames of the two kinds
    REFERENCED_SLICE = 1 << 20
    READ_SIZE = 1 << 18
    EVENTS = 64
    HEADERS = 7
    STATUSES = 18             # grpc-status 0..16, then all others
    NO_STATUS = 17
    SAMPLES = 8
    SUB_BITS = 7
    SUB_BUCKETS = 1 << SUB_BITS     # per power of two
    BUCKETS = (64 - SUB_BITS + 1) * SUB_BUCKETS
    TICK_MS = 200             # how often a run that nothing moves looks at the clock

cdef struct Connection:
    Loop *loop
    int fd
    nghttp2_session *session
    bint ready                # the peer's SETTINGS have arrived
    bint dead
    bint refusing             # no further streams: GOAWAY
    bint polls_write          # registered for EPOLLOUT
    Call *calls
    uint32_t capacity
    Call *free_calls
    uint64_t closed           # calls that ended here
    Call **doomed             # calls that will be reset
    uint32_t doomed_count
    uint8_t *arena            # what waits to be written: pieces of the arena and of bodies
    size_t arena_used
    iovec pieces[PIECES]
    uint32_t first_piece
    uint32_t piece_count

cdef struct Sample:
    uint64_t index
    Verdict verdict
    int32_t grpc_status
    uint32_t timeout_us
    uint64_t elapsed_ns
    char message[MESSAGE_LIMIT]

cdef struct Loop:
    int epoll
    int timer                 # open loop only, else -1
    Connection *connections
    uint32_t connection_count
    uint32_t turn             # open loop: the connection whose turn it is
    nghttp2_nv headers[HEADERS]
    prepare_fn prepare
    judge_fn judge
    void *context
    uint8_t *buffer
    # what to do
    uint64_t seed
    uint64_t limit            # requests; 0: no limit
    uint64_t end_ns           # no request is started after this; 0: no end
    uint64_t interval_ns      # open loop: between two requests, on average if `scattered`; 0: closed loop
    bint scattered            # they come independently of each other
    uint64_t next_due_ns
    uint32_t cancel_share     # of 65536
    uint32_t deadline_share
    uint32_t cancel_span
    uint32_t deadline_low_us
    uint32_t deadline_high_us
    uint64_t stall_ns
    # what happened
    uint64_t issued
    uint64_t finished
    uint64_t answered
    uint64_t cancelled
    uint64_t reset
    uint64_t lost
    uint64_t deadlines
    uint64_t verdicts[VERDICT_COUNT]
    uint64_t statuses[STATUSES]
    uint64_t bytes_sent
    uint64_t bytes_received
    uint64_t latency_sum_ns
    uint64_t latency_max_ns
    uint64_t histogram[BUCKETS]
    Sample samples[SAMPLES]
    uint32_t sample_count
    bint no_memory


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec ts
    clock_gettime(CLOCK_MONOTONIC, &ts)
    return <uint64_t> ts.tv_sec * 1000000000 + <uint64_t> ts.tv_nsec


# --- latency histogram: 128 linear buckets in each power of two of nanoseconds

cdef inline uint32_t bucket_of(uint64_t ns) noexcept nogil:
    if ns < 2 * SUB_BUCKETS:
        return <uint32_t> ns
    cdef int shift = 63 - clz(ns) - SUB_BITS
    return <uint32_t> (<uint64_t> shift * SUB_BUCKETS + (ns >> shift))


cdef uint64_t bucket_top(uint32_t bucket) noexcept nogil:
    if bucket < 2 * SUB_BUCKETS:
        return bucket
    cdef uint32_t shift = bucket // SUB_BUCKETS - 1
    return ((<uint64_t> (bucket - shift * SUB_BUCKETS) + 1) << shift) - 1


cdef uint64_t percentile(const uint64_t *histogram, uint64_t count, double share) noexcept nogil:
    """The smallest bucket bound that `share` of `count` values do not exceed."""
    cdef uint64_t seen = 0, wanted = <uint64_t> (share * count + 0.5)
    cdef uint32_t i
    for i in range(<uint32_t> BUCKETS):
        seen += histogram[i]
        if seen >= wanted and seen > 0:
            return bucket_top(i)
    return 0


# --- one call

cdef bint may_start(Loop *loop) noexcept nogil:
    if loop.no_memory or (loop.limit != 0 and loop.issued >= loop.limit):
        return False
    return loop.end_ns == 0 or now_ns() < loop.end_ns


cdef void draw_fate(Connection *connection, Call *call) noexcept nogil:
    """Decide from the nonce whether the call gets a deadline, and after how many ends on its connection it is reset."""
    cdef Loop *loop = connection.loop
    cdef uint64_t draw = mix(call.nonce + 1)
    cdef uint64_t octaves
    call.timeout_us = 0
    if (draw & 0xFFFF) < loop.deadline_share:
        # log-uniform, to the octave, between low and high
        octaves = clz(loop.deadline_low_us) - clz(loop.deadline_high_us) + 1
        call.timeout_us = loop.deadline_low_us << ((draw >> 32) % octaves)
        call.timeout_us += <uint32_t> ((draw >> 40) % call.timeout_us)
        if call.timeout_us > loop.deadline_high_us:
            call.timeout_us = loop.deadline_high_us
        loop.deadlines += 1
    if ((draw >> 16) & 0xFFFF) < loop.cancel_share:
        call.cancel_at = connection.closed
        if (draw >> 63) != 0:
            call.cancel_at += (draw >> 48) % loop.cancel_span
        call.doom = <int32_t> connection.doomed_count
        connection.doomed[connection.doomed_count] = call
        connection.doomed_count += 1


cdef void forget_doom(Connection *connection, Call *call) noexcept nogil:
    cdef Call *last
    if call.doom < 0:
        return
    connection.doomed_count -= 1
    last = connection.doomed[connection.doomed_count]
    connection.doomed[call.doom] = last
    last.doom = call.doom
    call.doom = -1


cdef void start(Connection *connection, Call *call, uint64_t due_ns) noexcept nogil:
    """Submit the next request on this slot; when the connection takes no more, the slot becomes free."""
    cdef Loop *loop = connection.loop
    cdef nghttp2_nv headers[HEADERS]
    cdef nghttp2_data_provider provider
    cdef size_t header_count = HEADERS - 1
    cdef int32_t stream
    call.index = loop.issued
    call.nonce = mix(loop.seed + (call.index + 1) * <uint64_t> 0x9E3779B97F4A7C15)
    call.due_ns = due_ns
    call.doom = -1
    call.cancelled = False
    call.sent = 0
    call.answer_size = 0
    call.http_status = 0
    call.grpc_status = -1
    call.message[0] = 0
    draw_fate(connection, call)
    if not loop.prepare(loop.context, call):
        loop.no_memory = True
        release(connection, call)
        return
    memcpy(headers, loop.headers, sizeof(headers))
    if call.timeout_us != 0:
        headers[header_count].value = <uint8_t *> call.timeout_text
        headers[header_count].valuelen = snprintf(call.timeout_text, 16, b"%uu", call.timeout_us)
        header_count += 1
    provider.source.ptr = call
    provider.read_callback = read_body
    stream = nghttp2_submit_request(connection.session, NULL, headers, header_count, &provider, call)
    if stream < 0:
        connection.refusing = True
        release(connection, call)
        return
    call.stream = stream
    loop.issued += 1
    loop.bytes_sent += call.body_size


cdef void release(Connection *connection, Call *call) noexcept nogil:
    forget_doom(connection, call)
    call.stream = -1
    call.next_free = connection.free_calls
    connection.free_calls = call


cdef void keep_sample(Loop *loop, Call *call, Verdict verdict) noexcept nogil:
    cdef Sample *sample
    if loop.sample_count == SAMPLES:
        return
    sample = &loop.samples[loop.sample_count]
    loop.sample_count += 1
    sample.index = call.index
    sample.verdict = verdict
    sample.grpc_status = call.grpc_status
    sample.timeout_us = call.timeout_us
    sample.elapsed_ns = call.elapsed_ns
    memcpy(sample.message, call.message, MESSAGE_LIMIT)


cdef void count_answer(Loop *loop, Call *call) noexcept nogil:
    cdef Verdict verdict = CORRECT
    cdef uint64_t elapsed = call.elapsed_ns
    loop.answered += 1
    loop.statuses[call.grpc_status if 0 <= call.grpc_status < NO_STATUS else NO_STATUS] += 1
    loop.latency_sum_ns += elapsed
    loop.latency_max_ns = max(loop.latency_max_ns, elapsed)
    loop.histogram[bucket_of(elapsed)] += 1
    if loop.judge != NULL:
        verdict = loop.judge(loop.context, call)
    elif call.grpc_status > 0 or call.http_status != 200:
        verdict = WRONG_STATUS
    loop.verdicts[<int> verdict] += 1
    if verdict != CORRECT:
        keep_sample(loop, call, verdict)


cdef void finish(Connection *connection, Call *call, uint32_t error) noexcept nogil:
    cdef Loop *loop = connection.loop
    loop.finished += 1
    connection.closed += 1
    forget_doom(connection, call)
    call.elapsed_ns = now_ns() - call.due_ns
    if call.cancelled:
        loop.cancelled += 1
    elif call.grpc_status < 0 and error != NGHTTP2_NO_ERROR:
        loop.reset += 1
        keep_sample(loop, call, WRONG_STATUS)
    else:
        count_answer(loop, call)


# --- nghttp2 callbacks; user_data is the Connection

cdef ssize_t read_body(nghttp2_session *session, int32_t stream, uint8_t *out, size_t space, uint32_t *flags,
                       nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Call *call = <Call *> source.ptr
    cdef size_t size = min(call.body_size - call.sent, space)
    if size == call.body_size - call.sent:
        flags[0] |= NGHTTP2_DATA_FLAG_EOF
    if call.body_stays and size >= REFERENCE_FROM:
        flags[0] |= NGHTTP2_DATA_FLAG_NO_COPY
    else:
        memcpy(out, call.body + call.sent, size)
        call.sent += size
    return size


cdef int send_slice(nghttp2_session *session, nghttp2_frame *frame, const uint8_t *head, size_t size,
                    nghttp2_data_source *source, void *user_data) noexcept nogil:
    cdef Connection *connection = <Connection *> user_data
    cdef Call *call = <Call *> source.ptr
    # nghttp2_session_mem_send goes on after this until a frame comes that is copied: leave room for that one
    if connection.piece_count + 3 > PIECES or connection.arena_used + 9 + 2 * COPIED_SLICE > ARENA:
        return NGHTTP2_ERR_WOULDBLOCK
    put_copy(connection, head, 9)
    put_reference(connection, call.body + call.sent, size)
    call.sent += size
    return 0


cdef ssize_t slice_limit(nghttp2_session *session, uint8_t frame_type, int32_t stream, int32_t session_window,
                         int32_t stream_window, uint32_t frame_limit, void *user_data) noexcept nogil:
    cdef Call *call = <Call *> nghttp2_session_get_stream_user_data(session, stream)
    if call == NULL or not call.body_stays:
        frame_limit = min(frame_limit, <uint32_t> COPIED_SLICE)
    return min(min(session_window, stream_window), <int32_t> min(frame_limit, <uint32_t> REFERENCED_SLICE))


cdef int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name, size_t name_size,
                   const uint8_t *value, size_t value_size, uint8_t flags, void *user_data) noexcept nogil:
    cdef Call *call = <Call *> nghttp2_session_get_stream_user_data(session, frame.hd.stream_id)
    if call == NULL:
        return 0
    if name_size == 11 and memcmp(name, b"grpc-status", 11) == 0:
        call.grpc_status = parse_number(value, value_size)
    elif name_size == 7 and memcmp(name, b":status", 7) == 0:
        call.http_status = parse_number(value, value_size)
    elif name_size == 12 and memcmp(name, b"grpc-message", 12) == 0:
        value_size = min(value_size, <size_t> (MESSAGE_LIMIT - 1))
        memcpy(call.message, value, value_size)
        call.message[value_size] = 0
    return 0


cdef int32_t parse_number(const uint8_t *text, size_t size) noexcept nogil:
    """A short decimal number; 999 for anything else."""
    cdef int32_t number = 0
    cdef size_t i
    if size == 0 or size > 3:
        return 999
    for i in range(size):
        if not 48 <= text[i] <= 57:
            return 999
        number = number * 10 + (text[i] - 48)
    return number


cdef int on_data(nghttp2_session *session, uint8_t flags, int32_t stream, const uint8_t *data, size_t size,
                 void *user_data) noexcept nogil:
    cdef Loop *loop = (<Connection *> user_data).loop
    cdef Call *call
    cdef size_t wanted
    loop.bytes_received += size
    if loop.judge == NULL:
        return 0
    call = <Call *> nghttp2_session_get_stream_user_data(session, stream)
    if call == NULL:
        return 0
    wanted = call.answer_size + size
    if wanted > call.answer_capacity:
        wanted = max(2 * wanted, <size_t> 1024)
        call.answer = <uint8_t *> realloc(call.answer, wanted)
        call.answer_capacity = wanted
        if call.answer == NULL:
            loop.no_memory = True
            call.answer_capacity = 0
            return -1
    memcpy(call.answer + call.answer_size, data, size)
    call.answer_size += size
    return 0


cdef int on_close(nghttp2_session *session, int32_t stream, uint32_t error, void *user_data) noexcept nogil:
    cdef Connection *connection = <Connection *> user_data
    cdef Loop *loop = connection.loop
    cdef Call *call = <Call *> nghttp2_session_get_stream_user_data(session, stream)
    if call == NULL:
        return 0
    finish(connection, call, error)
    if loop.interval_ns == 0 and not connection.refusing and may_start(loop):
        start(connection, call, now_ns())
    else:
        release(connection, call)
    return 0


cdef int on_frame(nghttp2_session *session, const nghttp2_frame *frame, void *user_data) noexcept nogil:
    cdef Connection *connection = <Connection *> user_data
    if frame.hd.type == NGHTTP2_SETTINGS:
        connection.ready = True
    elif frame.hd.type == NGHTTP2_GOAWAY:
        connection.refusing = True
    return 0


# --- one connection

cdef void put_reference(Connection *connection, const uint8_t *data, size_t size) noexcept nogil:
    connection.pieces[connection.piece_count].iov_base = <void *> data
    connection.pieces[connection.piece_count].iov_len = size
    connection.piece_count += 1


cdef void put_copy(Connection *connection, const uint8_t *data, size_t size) noexcept nogil:
    cdef uint8_t *place = connection.arena + connection.arena_used
    cdef iovec *last
    memcpy(place, data, size)
    connection.arena_used += size
    if connection.piece_count > connection.first_piece:
        last = &connection.pieces[connection.piece_count - 1]
        if <uint8_t *> last.iov_base + last.iov_len == place:
            last.iov_len += size
            return
    put_reference(connection, place, size)


cdef void collect(Connection *connection) noexcept nogil:
    """Let nghttp2 serialise as much as one write takes."""
    cdef const uint8_t *data
    cdef ssize_t size
    # nghttp2 returns one frame at a time; a copied one is at most COPIED_SLICE bytes and its header
    while connection.piece_count + 2 <= PIECES and connection.arena_used + (2 * COPIED_SLICE) <= ARENA:
        size = nghttp2_session_mem_send(connection.session, &data)
        if size < 0:
            bury(connection)
        if size <= 0:
            return
        put_copy(connection, data, size)


cdef bint write_pieces(Connection *connection) noexcept nogil:
    """True when all pieces are written; False when the socket takes no more for now or the connection died."""
    cdef ssize_t size
    cdef iovec *piece
    while connection.first_piece < connection.piece_count:
        size = writev(connection.fd, &connection.pieces[connection.first_piece],
                      connection.piece_count - connection.first_piece)
        if size < 0:
            if errno == EINTR:
                continue
            if errno != EAGAIN:
                bury(connection)
            return False
        while size > 0:
            piece = &connection.pieces[connection.first_piece]
            if <size_t> size < piece.iov_len:
                piece.iov_base = <uint8_t *> piece.iov_base + size
                piece.iov_len -= size
                break
            size -= piece.iov_len
            connection.first_piece += 1
    connection.first_piece = connection.piece_count = 0
    connection.arena_used = 0
    return True


cdef void poll_write(Connection *connection, bint wanted) noexcept nogil:
    cdef epoll_event event
    if connection.polls_write == wanted or connection.dead:
        return
    connection.polls_write = wanted
    event.events = EPOLLIN | EPOLLOUT if wanted else EPOLLIN
    event.data.ptr = connection
    epoll_ctl(connection.loop.epoll, EPOLL_CTL_MOD, connection.fd, &event)


cdef void flush(Connection *connection) noexcept nogil:
    while not connection.dead:
        collect(connection)
        if connection.piece_count == connection.first_piece:
            poll_write(connection, False)
            return
        if not write_pieces(connection):
            poll_write(connection, True)
            return


cdef void cancel_due(Connection *connection) noexcept nogil:
    """Reset the doomed calls whose time has come; their requests are on the wire already."""
    cdef uint32_t i = 0
    cdef Call *call
    cdef bint any_due = False
    while i < connection.doomed_count:
        call = connection.doomed[i]
        if call.cancel_at <= connection.closed:
            forget_doom(connection, call)
            call.cancelled = True
            nghttp2_submit_rst_stream(connection.session, NGHTTP2_FLAG_NONE, call.stream, NGHTTP2_CANCEL)
            any_due = True
        else:
            i += 1
    if any_due:
        flush(connection)


cdef void receive(Connection *connection) noexcept nogil:
    cdef Loop *loop = connection.loop
    cdef ssize_t size = read(connection.fd, loop.buffer, READ_SIZE)
    if size < 0 and (errno == EAGAIN or errno == EINTR):
        return
    if size <= 0 or nghttp2_session_mem_recv(connection.session, loop.buffer, size) < 0:
        bury(connection)


cdef void bury(Connection *connection) noexcept nogil:
    """The connection is gone: what was in flight on it is lost."""
    cdef uint32_t i
    if connection.dead:
        return
    connection.dead = connection.refusing = True
    close(connection.fd)
    for i in range(connection.capacity):
        if connection.calls[i].stream >= 0:
            connection.calls[i].stream = -1
            connection.loop.finished += 1
            connection.loop.lost += 1


# --- the loop

cdef void start_due(Loop *loop) noexcept nogil:
    """Open loop: start what is due while a slot is free, connection by connection, and set the timer for the next."""
    cdef Connection *connection
    cdef itimerspec spec
    cdef uint32_t tried = 0
    cdef uint64_t now = now_ns()
    while loop.next_due_ns <= now and tried < loop.connection_count and may_start(loop):
        connection = &loop.connections[loop.turn]
        loop.turn = (loop.turn + 1) % loop.connection_count
        if connection.refusing or connection.free_calls == NULL:
            tried += 1
            continue
        tried = 0
        start(connection, take_free(connection), loop.next_due_ns)
        loop.next_due_ns += interval(loop)
    memset(&spec, 0, sizeof(spec))
    if loop.next_due_ns > now:
        spec.it_value.tv_sec = loop.next_due_ns // 1000000000
        spec.it_value.tv_nsec = loop.next_due_ns % 1000000000
    timerfd_settime(loop.timer, TFD_TIMER_ABSTIME, &spec, NULL)


cdef inline uint64_t interval(const Loop *loop) noexcept nogil:
    cdef double draw
    if not loop.scattered:
        return loop.interval_ns
    draw = <double>(mix(loop.seed ^ (loop.issued * <uint64_t> 0xD1B54A32D192ED03)) >> 11) / <double>(<uint64_t>1 << 53)
    return <uint64_t>(-log1p(-draw) * <double>loop.interval_ns)


cdef Call *take_free(Connection *connection) noexcept nogil:
    cdef Call *call = connection.free_calls
    connection.free_calls = call.next_free
    return call


cdef void fill(Connection *connection) noexcept nogil:
    """Closed loop: start a call on every free slot."""
    while connection.free_calls != NULL and not connection.refusing and may_start(connection.loop):
        start(connection, take_free(connection), now_ns())


cdef bint any_alive(Loop *loop) noexcept nogil:
    cdef uint32_t i
    for i in range(loop.connection_count):
        if not loop.connections[i].refusing:
            return True
    return False


cdef void step(Loop *loop, int timeout_ms) noexcept nogil:
    """Wait for events once and serve them."""
    cdef epoll_event events[EVENTS]
    cdef Connection *connection
    cdef uint64_t ticks
    cdef int i, count = epoll_wait(loop.epoll, events, EVENTS, timeout_ms)
    for i in range(count):
        connection = <Connection *> events[i].data.ptr
        if connection == NULL:
            read(loop.timer, &ticks, 8)
        elif not connection.dead and events[i].events & ~<uint32_t> EPOLLOUT:
            receive(connection)
    if loop.interval_ns != 0:
        start_due(loop)
        for i in range(<int> loop.connection_count):
            flush(&loop.connections[i])
            cancel_due(&loop.connections[i])
        return
    for i in range(count):
        connection = <Connection *> events[i].data.ptr
        flush(connection)
        if connection.doomed_count > 0 and not connection.dead:
            cancel_due(connection)


cdef void bury_stalled(Loop *loop) noexcept nogil:
    """Give up what is still in flight; its connections cannot be used again."""
    cdef Connection *connection
    cdef uint32_t i, j
    for i in range(loop.connection_count):
        connection = &loop.connections[i]
        for j in range(connection.capacity):
            if connection.calls[j].stream >= 0:
                bury(connection)
                break


cdef void drive(Loop *loop) noexcept nogil:
    """Run until everything that was started has ended and nothing more may start, or until nothing moves any more."""
    cdef uint64_t now = now_ns(), moved_ns = now, finished = 0
    cdef uint32_t i
    loop.next_due_ns = now
    for i in range(loop.connection_count):
        if loop.interval_ns == 0:
            fill(&loop.connections[i])
        flush(&loop.connections[i])
        cancel_due(&loop.connections[i])
    if loop.interval_ns != 0:
        start_due(loop)
    while loop.finished < loop.issued or (may_start(loop) and any_alive(loop)):
        step(loop, TICK_MS)
        now = now_ns()
        if loop.finished != finished or (loop.interval_ns != 0 and loop.finished == loop.issued):
            finished = loop.finished
            moved_ns = now
        elif now - moved_ns > loop.stall_ns:
            bury_stalled(loop)
            return


# --- Python

cdef class Workload:
    """Base of what makes requests; of no use by itself."""


cdef struct Bodies:
    size_t count
    const uint8_t **requests
    size_t *request_sizes
    const uint8_t **answers
    size_t *answer_sizes


cdef bint fixed_prepare(void *context, Call *call) noexcept nogil:
    cdef Bodies *bodies = <Bodies *> context
    cdef size_t i = call.index % bodies.count
    call.body = bodies.requests[i]
    call.body_size = bodies.request_sizes[i]
    call.body_stays = True
    return True


cdef Verdict fixed_judge(void *context, Call *call) noexcept nogil:
    cdef Bodies *bodies = <Bodies *> context
    cdef size_t i = call.index % bodies.count
    if call.grpc_status > 0 or call.http_status != 200:
        return WRONG_STATUS
    if call.answer_size != bodies.answer_sizes[i]:
        return MALFORMED
    return CORRECT if memcmp(call.answer, bodies.answers[i], call.answer_size) == 0 else WRONG_BYTES


cdef class Fixed(Workload):
    """Sends the given messages in turn and, if told what to expect, compares the answers byte by byte.

    Args:
        messages: serialized requests, without the gRPC prefix; no messages at all sends one empty body, not framed.
        expect: the serialized answers, one a message; None does not compare.
    """
    cdef list kept
    cdef Bodies bodies

    def __cinit__(self, messages=(), expect=None):
        framed = [frame_message(message) for message in messages] or [b""]
        answers = [frame_message(message) for message in expect] if expect is not None else []
        if answers and len(answers) != len(framed):
            raise ValueError(f"expected {len(framed)} answers for as many messages, got {len(answers)}")
        self.kept = framed + answers
        self.bodies.count = len(framed)
        self.bodies.requests = <const uint8_t **> calloc(2 * len(framed), sizeof(void *))
        self.bodies.request_sizes = <size_t *> calloc(2 * len(framed), sizeof(size_t))
        if self.bodies.requests == NULL or self.bodies.request_sizes == NULL:
            raise MemoryError
        self.bodies.answers = self.bodies.requests + len(framed)
        self.bodies.answer_sizes = self.bodies.request_sizes + len(framed)
        for i, body in enumerate(self.kept):
            self.bodies.requests[<size_t> i] = <const uint8_t *> <const char *> (<bytes> body)
            self.bodies.request_sizes[<size_t> i] = len(body)
        self.context = &self.bodies
        self.prepare = fixed_prepare
        if answers:
            self.judge = fixed_judge

    def __dealloc__(self):
        free(self.bodies.requests)
        free(self.bodies.request_sizes)


cdef class Driver:
    """Connections to one server, opened at once with the HTTP/2 handshake done.

    Args:
        address: "host:port", or "unix:PATH".
        connections: how many.
        window: flow-control window, in bytes, of each stream and of each connection.
        max_frame_size: the largest frame the server may send, in bytes.

    Raises:
        OSError: a connection cannot be made.
        TimeoutError: a server does not answer the handshake within 10 seconds.
    """
    cdef Loop loop
    cdef nghttp2_session_callbacks *callbacks
    cdef readonly str address

    def __cinit__(self, str address, *, uint32_t connections=1, int32_t window=(1 << 30) - 1,
                  uint32_t max_frame_size=16384):
        cdef uint32_t i
        if connections == 0:
            raise ValueError("expected at least one connection, got 0")
        self.address = address
        self.loop.timer = -1
        self.loop.epoll = epoll_create1(EPOLL_CLOEXEC)
        self.loop.buffer = <uint8_t *> calloc(1, READ_SIZE)
        self.loop.connections = <Connection *> calloc(connections, sizeof(Connection))
        self._open_timer()
        if self.loop.buffer == NULL or self.loop.connections == NULL:
            raise MemoryError
        self._make_callbacks()
        for i in range(connections):
            self._connect(&self.loop.connections[i], window, max_frame_size)
            self.loop.connection_count += 1
        self._shake_hands()

    def __dealloc__(self):
        self.close()
        nghttp2_session_callbacks_del(self.callbacks)
        free(self.loop.buffer)
        free(self.loop.connections)

    cdef _open_timer(self):
        cdef epoll_event event
        self.loop.timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        event.events = EPOLLIN
        event.data.ptr = NULL
        epoll_ctl(self.loop.epoll, EPOLL_CTL_ADD, self.loop.timer, &event)

    cdef _make_callbacks(self):
        if nghttp2_session_callbacks_new(&self.callbacks) != 0:
            raise MemoryError
        nghttp2_session_callbacks_set_on_header_callback(self.callbacks, on_header)
        nghttp2_session_callbacks_set_on_data_chunk_recv_callback(self.callbacks, on_data)
        nghttp2_session_callbacks_set_on_stream_close_callback(self.callbacks, on_close)
        nghttp2_session_callbacks_set_on_frame_recv_callback(self.callbacks, on_frame)
        nghttp2_session_callbacks_set_send_data_callback(self.callbacks, send_slice)
        nghttp2_session_callbacks_set_data_source_read_length_callback(self.callbacks, slice_limit)

    cdef _connect(self, Connection *connection, int32_t window, uint32_t max_frame_size):
        cdef nghttp2_settings_entry[3] settings
        cdef epoll_event event
        settings[0] = nghttp2_settings_entry(NGHTTP2_SETTINGS_ENABLE_PUSH, 0)
        settings[1] = nghttp2_settings_entry(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, window)
        settings[2] = nghttp2_settings_entry(NGHTTP2_SETTINGS_MAX_FRAME_SIZE, max_frame_size)
        connection.loop = &self.loop
        connection.arena = <uint8_t *> calloc(1, ARENA)
        if connection.arena == NULL:
            raise MemoryError
        if nghttp2_session_client_new(&connection.session, self.callbacks, connection) != 0:
            raise MemoryError
        nghttp2_submit_settings(connection.session, NGHTTP2_FLAG_NONE, settings, 3)
        nghttp2_session_set_local_window_size(connection.session, NGHTTP2_FLAG_NONE, 0, window)
        connection.fd = dial(self.address)
        event.events = EPOLLIN
        event.data.ptr = connection
        epoll_ctl(self.loop.epoll, EPOLL_CTL_ADD, connection.fd, &event)

    cdef _shake_hands(self):
        cdef uint32_t i
        for i in range(self.loop.connection_count):
            flush(&self.loop.connections[i])
        give_up = time.monotonic() + 10
        while not self._all_ready():
            if time.monotonic() > give_up:
                raise TimeoutError(f"{self.address} does not answer the HTTP/2 handshake")
            with nogil:
                step(&self.loop, TICK_MS)

    cdef bint _all_ready(self) except -1:
        cdef uint32_t i
        for i in range(self.loop.connection_count):
            if self.loop.connections[i].dead:
                raise ConnectionError(f"{self.address} closed a connection during the HTTP/2 handshake")
            if not self.loop.connections[i].ready:
                return False
        return True

    def run(self, Workload workload not None, *, uint32_t in_flight=1, uint64_t requests=0, double seconds=0.0,
            double rate=0.0, bint scattered=False, str path=INFER_PATH, str method="POST", double cancel_fraction=0.0,
            double deadline_fraction=0.0, deadline_us=(100, 20_000), uint64_t seed=1, double stall_seconds=30.0):
        """Drive the server and report; needs `requests`, `seconds` or both (whichever ends first).

        Args:
            in_flight: calls in flight on each connection; with `rate` the most there may be.
            rate: requests per second over all connections; 0 is the closed loop.
            scattered: with `rate`, requests come independently of each other instead of at fixed intervals.
            cancel_fraction: this share of the calls is to be reset, half of them as soon as they are written, half
                after up to 2 * in_flight other calls of their connection have ended; an answer may come before that.
            deadline_fraction: this share of the calls carries a grpc-timeout, drawn log-uniformly from `deadline_us`.
            seed: of everything random.
            stall_seconds: when no call ends for so long, those in flight are lost and the run ends.

        Raises:
            ConnectionError: every connection was lost in an earlier run.
        """
        if requests == 0 and seconds <= 0:
            raise ValueError("expected requests or seconds, got neither")
        if not 0 < deadline_us[0] <= deadline_us[1] or in_flight == 0 or workload.prepare == NULL:
            raise ValueError("expected 0 < deadline_us[0] <= deadline_us[1], in_flight >= 1 and a usable workload")
        kept = self._set_headers(path, method)
        self._clear_counters()
        cdef Loop *loop = &self.loop
        loop.prepare, loop.judge, loop.context = workload.prepare, workload.judge, workload.context
        loop.seed = mix(seed)
        loop.limit = requests
        loop.end_ns = now_ns() + <uint64_t> (seconds * 1e9) if seconds > 0 else 0
        loop.interval_ns = <uint64_t> (1e9 / rate) if rate > 0 else 0
        loop.scattered = scattered
        loop.cancel_share = <uint32_t> (cancel_fraction * 65536)
        loop.deadline_share = <uint32_t> (deadline_fraction * 65536)
        loop.cancel_span = 2 * in_flight
        loop.deadline_low_us, loop.deadline_high_us = deadline_us
        loop.stall_ns = <uint64_t> (stall_seconds * 1e9)
        self._take_calls(in_flight)
        started, cpu_started = time.monotonic(), time.thread_time()
        with nogil:
            drive(loop)
        elapsed, cpu = time.monotonic() - started, time.thread_time() - cpu_started
        self._give_calls()
        del kept
        if loop.no_memory:
            raise MemoryError("the driver has no memory for another request or answer")
        return self._report(elapsed, cpu)

    cdef _set_headers(self, str path, str method):
        """Fill the header block; the strings it returns must live as long as the block is used."""
        host = "localhost" if self.address.startswith("unix:") else self.address
        headers = [(b":method", method.encode()), (b":scheme", b"http"), (b":authority", host.encode()),
                   (b":path", path.encode()), (b"content-type", b"application/grpc"), (b"te", b"trailers"),
                   (b"grpc-timeout", b"")]
        for i, (name, value) in enumerate(headers):
            self.loop.headers[<size_t> i] = nghttp2_nv(
                <uint8_t *> <char *> (<bytes> name), <uint8_t *> <char *> (<bytes> value), len(name), len(value),
                NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE)
        self.loop.headers[HEADERS - 1].flags |= NGHTTP2_NV_FLAG_NO_INDEX
        return headers

    cdef _clear_counters(self):
        cdef Loop *loop = &self.loop
        memset(&loop.issued, 0, <size_t> (<char *> (loop + 1) - <char *> &loop.issued))

    cdef _take_calls(self, uint32_t in_flight):
        cdef Connection *connection
        cdef uint32_t i, j
        alive = False
        for i in range(self.loop.connection_count):
            connection = &self.loop.connections[i]
            connection.closed = connection.doomed_count = 0
            connection.free_calls = NULL
            connection.calls = <Call *> calloc(in_flight, sizeof(Call))
            connection.doomed = <Call **> calloc(in_flight, sizeof(Call *))
            if connection.calls == NULL or connection.doomed == NULL:
                self._give_calls()
                raise MemoryError
            connection.capacity = in_flight
            for j in range(in_flight):
                connection.calls[j].connection = connection
                connection.calls[j].doom = -1
                release(connection, &connection.calls[j])
            alive = alive or not connection.refusing
        if not alive:
            self._give_calls()
            raise ConnectionError(f"{self.address} has closed every connection")

    cdef _give_calls(self):
        cdef Connection *connection
        cdef uint32_t i, j
        for i in range(self.loop.connection_count):
            connection = &self.loop.connections[i]
            for j in range(connection.capacity):
                free(connection.calls[j].scratch)
                free(connection.calls[j].answer)
            free(connection.calls)
            free(connection.doomed)
            connection.capacity = 0
            connection.calls = connection.free_calls = NULL
            connection.doomed = NULL

    cdef _report(self, double elapsed, double cpu):
        cdef Loop *loop = &self.loop
        count = loop.answered
        quantile = {share: min(percentile(loop.histogram, count, share), loop.latency_max_ns) / 1e3
                    for share in (0.5, 0.9, 0.99, 0.999)}
        mean = loop.latency_sum_ns / 1e3 / count if count else 0.0
        return Report(
            requests=loop.issued, answered=count, cancelled=loop.cancelled, reset=loop.reset, lost=loop.lost,
            correct=loop.verdicts[<int> CORRECT], deadlines=loop.deadlines,
            statuses={-1 if i == NO_STATUS else i: loop.statuses[<size_t> i]
                      for i in range(STATUSES) if loop.statuses[<size_t> i]},
            wrong={VERDICTS[i]: loop.verdicts[<size_t> i]
                   for i in range(1, VERDICT_COUNT) if loop.verdicts[<size_t> i]},
            samples=[describe(&loop.samples[<size_t> i]) for i in range(loop.sample_count)],
            seconds=elapsed, rate=count / elapsed if elapsed else 0.0,
            bytes_sent=loop.bytes_sent, bytes_received=loop.bytes_received, driver_cpu_seconds=cpu,
            latency=Latency(mean, quantile[0.5], quantile[0.9], quantile[0.99], quantile[0.999],
                            loop.latency_max_ns / 1e3))

    @property
    def progress(self):
        """Counters of the run that is going on."""
        return Progress(self.loop.issued, self.loop.finished, self.loop.answered - self.loop.verdicts[<int> CORRECT])

    def idle(self, double seconds):
        """Keep the connections open without a call, answering the server's pings."""
        cdef uint64_t end_ns = now_ns() + <uint64_t> (seconds * 1e9)
        self.loop.interval_ns = 0
        with nogil:
            while now_ns() < end_ns:
                step(&self.loop, TICK_MS)

    @property
    def alive(self):
        """Connections that take further calls."""
        return sum(not self.loop.connections[<size_t> i].refusing for i in range(self.loop.connection_count))

    def close(self):
        """Say GOAWAY on every connection and close it."""
        cdef Connection *connection
        cdef uint32_t i
        for i in range(self.loop.connection_count):
            connection = &self.loop.connections[i]
            if connection.session != NULL and not connection.dead:
                nghttp2_session_terminate_session(connection.session, NGHTTP2_NO_ERROR)
                flush(connection)
            if not connection.dead:
                connection.dead = connection.refusing = True
                close(connection.fd)
            nghttp2_session_del(connection.session)
            free(connection.arena)
            connection.session = NULL
            connection.arena = NULL
        self.loop.connection_count = 0
        for fd in (self.loop.timer, self.loop.epoll):
            if fd >= 0:
                close(fd)
        self.loop.timer = self.loop.epoll = -1

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


cdef describe(Sample *sample):
    deadline = f", grpc-timeout {sample.timeout_us} µs" if sample.timeout_us else ""
    text = sample.message.decode("utf-8", "replace")
    what = f"wrong {VERDICTS[sample.verdict]}, grpc-status {sample.grpc_status} after {sample.elapsed_ns // 1000} µs"
    return f"request {sample.index}{deadline}: {what} {text!r}"


cdef int dial(str address) except -1:
    """A connected non-blocking socket's descriptor, owned by the caller."""
    if address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # TCP's grows by itself
        sock.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock.detach()
