"""Request messages: put together from the bytes of a stream, inflated in order, handed to the method of the call.

A message of a native method waits for the client's half-close, and then, if the peer does not read its answers, parked
(`_native.transport.backpressure`). Messages of other calls wait until they are taken; while many do, the stream gets no
more flow-control credit.
"""

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove

from _native.chain cimport chain_pop, chain_push
from _native.inference.request cimport (
    STATUS_DEADLINE_EXCEEDED,
    STATUS_INTERNAL,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAVAILABLE,
    STATUS_UNIMPLEMENTED,
)
from _native.memory.resource cimport Block, block_give, block_take
from _native.text cimport format_text, text_or_no_memory
from _native.transport.backpressure cimport (
    UNSENT_LIMIT,
    hand_over,
    hold,
    holds_too_much,
    host_has_room,
    let_go,
    may_run,
    park,
    partial_join,
    partial_leave,
    reserve,
    unpark,
    wait_for_host,
    wait_no_more,
)
from _native.transport.client cimport Client
from _native.transport.compression cimport (
    ENCODING_IDENTITY,
    RESULT_NO_MEMORY,
    RESULT_OK,
    RESULT_TOO_LARGE,
    RESULT_TRUNCATED,
    Result,
    encoding_name,
)
from _native.transport.errorinfo cimport stream_refuse
from _native.transport.nghttp2 cimport nghttp2_session_consume_stream
from _native.transport.packing cimport pack_inflate
from _native.transport.stream cimport (
    PREFIX,
    Conn,
    Host,
    Incoming,
    Stream,
    incoming_free,
    mark_dirty,
    stream_fail,
    stream_inflates,
    stream_time_left,
)

cdef enum:
    PLACED_FROM = 16 << 10   # bytes from which a message may go where its model wants it; smaller ones are copied there
    QUEUED_LIMIT = 1 << 20           # bytes of complete messages beyond which a stream gets no more credit
    ALIGNMENT = 64


# ---------------------------------------------------------------------------------------------------------------------
# Messages

cdef void stream_receive(Stream *stream, const uint8_t *data, size_t size, bint last) noexcept nogil:
    cdef Host *host = stream.conn.host
    # credit is kept back only where a message is taken later, which gives it
    if stream.queued_bytes == 0 or (stream.queued_bytes < QUEUED_LIMIT and not holds_too_much(host)):
        nghttp2_session_consume_stream(stream.conn.session, stream.id, size)
    else:
        stream.withheld += size
    deframe(stream, data, size)
    if stream.ended:
        return
    if stream.held and (stream.prefix_size == PREFIX or (stream.single and not last)):
        partial_join(stream)
    else:
        partial_leave(stream)
    if stream.conn.client != NULL and charge_exceeded(stream.conn.client):
        refuse_client(stream)
    elif holds_too_much(host):
        make_room(host)


cdef void deframe(Stream *stream, const uint8_t *data, size_t size) noexcept nogil:
    cdef size_t part
    while size and not stream.ended:
        if stream.prefix_size < PREFIX:
            if stream.prefix_size == 0 and not stream.single:
                stream.begun_ns = stream.conn.host.now_ns
            stream.prefix[stream.prefix_size] = data[0]
            stream.prefix_size += 1
            data += 1
            size -= 1
            if stream.prefix_size == PREFIX:
                begin_message(stream, data, size)
            continue
        part = min(size, stream.size - stream.received)
        if data == stream.data + stream.received:
            stream.conn.host.direct += part  # it was read to there
        else:
            memmove(stream.data + stream.received, data, part)  # where it was read to may overlap
        stream.received += part
        hold(stream, part)
        data += part
        size -= part
        if stream.received == stream.size:
            end_message(stream)


cdef Block *block_for(Stream *stream, const uint8_t *head, size_t head_size, size_t size) noexcept nogil:
    cdef Host *host = stream.conn.host
    cdef Block *block = NULL
    if host.place != NULL and size >= PLACED_FROM and not stream.prefix[0]:
        block = host.place(host.place_context, head, head_size, size)
    return block if block != NULL else block_take(size)


cdef void begin_message(Stream *stream, const uint8_t *head, size_t head_size) noexcept nogil:
    # `head`: what has come of it already
    cdef size_t limit = stream.conn.host.max_message
    cdef size_t room
    cdef char *text
    stream.size = (<size_t>stream.prefix[1] << 24 | <size_t>stream.prefix[2] << 16
                   | <size_t>stream.prefix[3] << 8 | <size_t>stream.prefix[4])
    stream.received = 0
    if stream.prefix[0] > 1:
        stream_fail(stream, STATUS_INTERNAL, "the first byte of a gRPC message must be 0 or 1")
        return
    if stream.prefix[0] and stream.encoding == ENCODING_IDENTITY:
        stream_fail(stream, STATUS_INTERNAL,
                    "a message is marked as compressed but the call declares no grpc-encoding")
        return
    if stream.method.unary != NULL and stream.messages == 1:
        stream_fail(stream, STATUS_UNIMPLEMENTED, "expected one request message, got more")
        return
    if limit and stream.size > limit:
        text = format_text("Received message larger than max (%zu vs. %zu)", stream.size, limit)
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, text_or_no_memory(text))
        free(text)
        return
    # The message ends at a cache line: so does, in nearly all requests, the last tensor, and a tensor whose size is a
    # multiple of the line begins at one and is used in place.
    room = (stream.size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)
    stream.block = block_for(stream, head, head_size, room + stream.tail_size)
    if stream.block == NULL:
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the request message")
        return
    stream.data = stream.block.data + (room - stream.size)
    if stream.size == 0:
        end_message(stream)


cdef void end_message(Stream *stream) noexcept nogil:
    cdef Incoming *message
    stream.messages += 1
    stream.prefix_size = 0
    if stream.method.unary != NULL and not stream.prefix[0]:
        return  # kept until the client half-closes
    message = <Incoming *>malloc(sizeof(Incoming))
    if message == NULL:
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the request message")
        return
    message.block = stream.block
    message.data = stream.data
    message.size = stream.size
    message.compressed = stream.prefix[0]
    stream.block = NULL
    message.counted = message.size
    stream.queued_bytes += message.counted
    if message.compressed or stream_inflates(stream):
        chain_push(&stream.packed, message)
        inflate_next(stream)
    else:
        message_ready(stream, message)


cdef void message_ready(Stream *stream, Incoming *message) noexcept nogil:
    # takes it over
    if stream.method.unary != NULL:
        stream.block = message.block
        stream.data = <uint8_t *>message.data
        stream.size = message.size
        stream.queued_bytes = 0
        free(message)
        return
    chain_push(&stream.incoming, message)
    if stream.call != NULL:
        stream.conn.host.hooks.message(stream)


cdef void stream_drop_message(Stream *stream) noexcept nogil:
    cdef Incoming *message = <Incoming *>chain_pop(&stream.incoming)
    stream.queued_bytes -= message.counted
    let_go(stream, message.counted)
    incoming_free(message)
    inflate_next(stream)
    if stream.withheld and stream.queued_bytes < QUEUED_LIMIT:
        nghttp2_session_consume_stream(stream.conn.session, stream.id, stream.withheld)
        stream.withheld = 0
        mark_dirty(stream.conn)


cdef void stream_half_closed(Stream *stream) noexcept nogil:
    stream.remote_closed = True
    partial_leave(stream)
    if stream.ended:
        return
    if stream.prefix_size != 0:
        stream_fail(stream, STATUS_INTERNAL, "the request ends in the middle of a message")
    elif stream_inflates(stream):
        pass  # inflate_next comes back
    elif stream.method.unary == NULL:
        stream.conn.host.hooks.half_closed(stream)
    elif stream.messages == 0:
        stream_fail(stream, STATUS_UNIMPLEMENTED, "expected one request message, got none")
    elif may_run(stream.conn):
        run_native(stream)
    elif holds_too_much(stream.conn.host):
        refuse_message(stream)
        stream_drop_request(stream)
    else:
        park(stream)


# ---------------------------------------------------------------------------------------------------------------------
# What is too much

cdef inline bint charge_exceeded(const Client *client) noexcept nogil:
    return client.max_bytes != 0 and client.bytes > client.max_bytes


cdef void refuse_client(Stream *stream) noexcept nogil:
    cdef const Client *client = stream.conn.client
    stream_refuse(stream, STATUS_RESOURCE_EXHAUSTED, "CLIENT_LIMIT", format_text(
        "client %s has %zu bytes in flight, which is more than its limit of %zu", client.name, <size_t>client.bytes,
        <size_t>client.max_bytes))
    stream_drop_request(stream)


cdef void make_room(Host *host) noexcept nogil:
    # the oldest incomplete request goes; one that is alone may be as large as it likes
    cdef Stream *oldest
    while holds_too_much(host) and host.partials.first != NULL and host.partials.first.stream.held < host.held:
        oldest = host.partials.first.stream
        refuse_message(oldest)
        stream_drop_request(oldest)
        host.others_ran = True


cdef void refuse_message(Stream *stream) noexcept nogil:
    cdef const Host *host = stream.conn.host
    stream_refuse(stream, STATUS_UNAVAILABLE, "SERVER_FULL", format_text(
        "the server holds %zu bytes of requests that are not complete or not taken, more than its limit of %zu",
        host.held, host.held_limit))


cdef void stream_drop_request(Stream *stream) noexcept nogil:
    # of a call that has ended: what has come of the message is of no use any more
    partial_leave(stream)
    unpark(stream)
    block_give(stream.block)
    stream.block = NULL
    let_go(stream, stream.held)


# ---------------------------------------------------------------------------------------------------------------------
# Compressed messages

cdef void inflate_next(Stream *stream) noexcept nogil:
    if stream_inflates(stream):
        inflate_rest(stream)


cdef void inflate_rest(Stream *stream) noexcept nogil:
    # Go on with what waits, as far as somebody takes it: inflated messages are bounded like others.
    cdef Incoming *message
    cdef Result result
    while stream.packed.first != NULL and stream.inflating == NULL and not stream.ended and (
            stream.incoming.first == NULL or stream.queued_bytes < QUEUED_LIMIT):
        message = <Incoming *>chain_pop(&stream.packed)
        result = RESULT_OK
        if not message.compressed or pack_inflate(stream, message, &result, inflated_later):
            inflated(stream, message, result)
    mark_dirty(stream.conn)
    if stream.remote_closed and not stream_inflates(stream):
        stream_half_closed(stream)


cdef void inflated_later(Stream *stream, Incoming *message, Result result) noexcept nogil:
    inflated(stream, message, result)
    inflate_rest(stream)


cdef void inflated(Stream *stream, Incoming *message, Result result) noexcept nogil:
    stream.queued_bytes -= message.counted
    let_go(stream, message.counted)
    if result != RESULT_OK:
        incoming_free(message)
        inflating_failed(stream, result)
        return
    message.counted = message.size
    stream.queued_bytes += message.counted
    hold(stream, message.counted)
    message_ready(stream, message)


cdef void inflating_failed(Stream *stream, Result result) noexcept nogil:
    cdef char *text
    if result == RESULT_TOO_LARGE:
        text = format_text("Received message larger than max after decompression (limit %zu)",
                           stream.conn.host.max_inflated)
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, text_or_no_memory(text))
        free(text)
    elif result == RESULT_NO_MEMORY:
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the decompressed request message")
    else:
        text = format_text("a request message could not be decompressed: its %s data is %s",
                           encoding_name(stream.encoding),
                           <const char *>("truncated" if result == RESULT_TRUNCATED else "corrupt"))
        stream_fail(stream, STATUS_INTERNAL, text_or_no_memory(text))
        free(text)


# ---------------------------------------------------------------------------------------------------------------------
# Native calls

cdef void run_native(Stream *stream) noexcept nogil:
    cdef Block *block = stream.block
    cdef int64_t left = stream_time_left(stream)
    if left == 0:
        stream_fail(stream, STATUS_DEADLINE_EXCEEDED, "Deadline Exceeded")
        stream_drop_request(stream)
        return
    if stream.tail_size:
        block = with_tail(stream)
        if block == NULL:
            stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the request message")
            stream_drop_request(stream)
            return
    stream.block = NULL
    hand_over(stream)
    reserve(stream)
    stream.method.unary(stream.method.context, stream, block, stream.data, stream.size, left)


cdef Block *with_tail(Stream *stream) noexcept nogil:
    # the message with stream.tail behind it; there is room for it but when the message was inflated
    cdef Block *block = stream.block
    cdef size_t room = (stream.size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)
    if stream.prefix[0]:
        block = block_take(room + stream.tail_size)
        if block == NULL:
            return NULL
        memcpy(block.data + (room - stream.size), stream.data, stream.size)
        stream.data = block.data + (room - stream.size)
        block_give(stream.block)
    memcpy(stream.data + stream.size, stream.tail, stream.tail_size)
    stream.size += stream.tail_size
    return block


cdef void run_first_parked(Conn *conn) noexcept nogil:
    run_native(<Stream *>chain_pop(&conn.parked))


cdef void calls_resume(Conn *conn) noexcept nogil:
    while conn.parked.first != NULL and may_run(conn):
        run_first_parked(conn)
    if conn.parked.first != NULL:
        wait_for_host(conn)


cdef void calls_resume_all(Host *host) noexcept nogil:
    cdef Conn *conn
    cdef bint ran = False
    while host.waiting.first != NULL and host_has_room(host):
        conn = <Conn *>host.waiting.first
        wait_no_more(conn)
        if conn.parked.first != NULL and conn.unsent <= UNSENT_LIMIT:
            run_first_parked(conn)
            ran = True
            if conn.parked.first != NULL:
                wait_for_host(conn)
    if ran:
        host.others_ran = True
        end_round(host)
