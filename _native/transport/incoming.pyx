"""Request messages: assembled from the bytes of a stream, inflated in order, passed to the service of the call.

An announced message reserves nothing: its memory is at most ROOM_FOR_BYTE times the bytes that have come, or a page.
When enough have come, it gets its final block, and the bytes are copied there. Nearly all messages have their final
block from the first bytes on.

Messages wait until a handler takes them; while many wait, the stream gets no more flow control credit.
"""

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memmove

from inferd._native.assertion cimport assert_that
from inferd._native.chain cimport chain_pop, chain_push
from inferd._native.memory.resource cimport Block, block_contains, block_give, block_take
from inferd._native.refusal cimport REFUSAL_CARDINALITY, REFUSAL_LIMIT_EXCEEDED, REFUSAL_PROTOCOL
from inferd._native.text cimport format_text
from inferd._native.transport.budget cimport budget_spend
from inferd._native.transport.call_state cimport RECEIVED_ALL, RECEIVING_MESSAGE, RECEIVING_PREFIX, receiving_move
from inferd._native.transport.compression cimport (
    ENCODING_IDENTITY,
    RESULT_NO_MEMORY,
    RESULT_OK,
    RESULT_TOO_LARGE,
    RESULT_TRUNCATED,
    Result,
    encoding_name,
)
from inferd._native.transport.errorinfo cimport stream_refuse
from inferd._native.transport.eviction cimport conn_calm
from inferd._native.transport.expiry cimport stream_watch
from inferd._native.transport.ledger cimport (
    CALL_MEMORY,
    MESSAGE_MEMORY,
    STAGE_ARRIVING,
    STAGE_INFLATING,
    STAGE_WAITING,
    STAGE_WITH_HANDLER,
    charge_hand,
    charge_make,
    charge_move,
    charge_release,
    charge_resize,
)
from inferd._native.transport.message cimport Incoming, incoming_free
from inferd._native.transport.message_compression cimport MessageOwner, message_inflate
from inferd._native.transport.nghttp2 cimport NGHTTP2_ENHANCE_YOUR_CALM, nghttp2_session_consume_stream
from inferd._native.transport.outgoing cimport PREFIX
from inferd._native.transport.quota cimport quota_refuses_bytes, quota_refuses_message
from inferd._native.transport.stream cimport (
    Conn,
    Host,
    Receiver,
    Stream,
    host_look,
    mark_dirty,
    message_owner,
    stream_abandon,
    stream_drop_request,
    stream_ended,
    stream_inflates,
)

cdef enum:
    PLACED_FROM = 16 << 10   # bytes from which a message may go where its model wants it; smaller ones are copied there
    QUEUED_LIMIT = 1 << 20   # memory of complete messages beyond which a stream gets no more credit
    ALIGNMENT = 64
    ROOM_FOR_BYTE = 64       # bytes of room for each received byte
    FIRST_ROOM = 4 << 10     # and for the first one
    TINY = 16                # bytes: a smaller message of a stream is paid from the budget, like an empty frame
    TINY_COST = 10           # in frames: such a message takes an Incoming and an event, for some methods one of Python


# ---------------------------------------------------------------------------------------------------------------------
# Messages

cdef void stream_receive(Stream *stream, const uint8_t *data, size_t size, bint last) noexcept nogil:
    # Withhold credit only while messages wait: taking them gives it back. After its last frame the peer needs none.
    if not last:
        if stream.queued < QUEUED_LIMIT:
            nghttp2_session_consume_stream(stream.conn.session, stream.id, size)
        else:
            stream.withheld += size
    deframe(stream, data, size)
    if not last and not stream.single:
        stream_watch(stream)  # its messages may begin at any time
    quota_refuses_bytes(stream)


cdef void deframe(Stream *stream, const uint8_t *data, size_t size) noexcept nogil:
    cdef Receiver *receiver = &stream.receiver
    cdef size_t part
    while size and not stream_ended(stream):
        if receiver.state == RECEIVING_PREFIX:
            if receiver.prefix_size == 0 and not stream.single:
                receiver.begun_ns = stream.conn.host.now_ns
            part = min(size, PREFIX - receiver.prefix_size)
            memcpy(&receiver.prefix[receiver.prefix_size], data, part)
            receiver.prefix_size += <uint32_t> part
            data += part
            size -= part
            if receiver.prefix_size == PREFIX:
                begin_message(stream)
            continue
        if receiver.received == receiver.room and not find_room(stream, data, size):
            return
        assert_that(receiver.received < receiver.room and receiver.room <= receiver.size)
        part = min(size, receiver.room - receiver.received)
        if data == receiver.data + receiver.received:
            stream.conn.host.direct += part  # a direct read has put it in place
        else:
            memmove(receiver.data + receiver.received, data, part)  # the two places may overlap
        receiver.received += part
        data += part
        size -= part
        if receiver.received == receiver.size:
            end_message(stream)


cdef void begin_message(Stream *stream) noexcept nogil:
    # the prefix of the message is complete
    cdef Receiver *receiver = &stream.receiver
    cdef size_t limit = stream.conn.host.max_message
    cdef char *text
    receiving_move(&receiver.state, RECEIVING_MESSAGE)
    receiver.size = (<size_t>receiver.prefix[1] << 24 | <size_t>receiver.prefix[2] << 16
                     | <size_t>receiver.prefix[3] << 8 | <size_t>receiver.prefix[4])
    receiver.received = 0
    receiver.room = 0
    if receiver.prefix[0] > 1:
        stream_refuse(stream, REFUSAL_PROTOCOL, format_text("the first byte of a gRPC message must be 0 or 1"))
    elif receiver.prefix[0] and stream.encoding == ENCODING_IDENTITY:
        stream_refuse(stream, REFUSAL_PROTOCOL, format_text(
            "a message is marked as compressed but the call declares no grpc-encoding"))
    elif stream.single and receiver.messages == 1:
        stream_refuse(stream, REFUSAL_CARDINALITY, format_text("expected one request message, got more"))
    elif receiver.size > limit:
        text = format_text("Received message larger than max (%zu vs. %zu)", receiver.size, limit)
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, text)
    elif not fits(stream):
        stream_drop_request(stream)
    elif receiver.size < TINY and not stream.single and not may_be_tiny(stream.conn):
        stream_abandon(stream, NGHTTP2_ENHANCE_YOUR_CALM)
    elif receiver.size == 0 and find_room(stream, NULL, 0):
        end_message(stream)


cdef bint may_be_tiny(Conn *conn) noexcept nogil:
    # tens of thousands in one read would keep the front from other connections
    if budget_spend(&conn.budget, TINY_COST, conn.host.spare_frames, conn.host.now_ns):
        return True
    conn_calm(conn, "too_many_messages")
    return False


cdef inline size_t overhead(const Stream *stream) noexcept nogil:
    # memory in addition to the bytes of a message, with that of the call if this is its only message
    return CALL_MEMORY if stream.single else MESSAGE_MEMORY


cdef bint find_room(Stream *stream, const uint8_t *more, size_t more_size) noexcept nogil:
    # The room is full, and `more` of the message has come: get more room. False: the call has ended.
    cdef Receiver *receiver = &stream.receiver
    cdef Block *block
    cdef size_t come = receiver.received + more_size
    cdef size_t room = receiver.size
    cdef size_t whole = (receiver.size + ALIGNMENT - 1) & ~<size_t>(ALIGNMENT - 1)
    cdef size_t behind = 0 if receiver.prefix[0] else stream.forwarded_size  # an inflated copy has that room
    if come < (receiver.size + ROOM_FOR_BYTE - 1) // ROOM_FOR_BYTE:
        room = min(receiver.size, max(<size_t>FIRST_ROOM, 2 * come))
    if room < receiver.size:
        behind = 0
        block = block_take(room)
    elif receiver.received:
        block = place_for(stream, receiver.data, receiver.received, whole + behind)
    else:
        block = place_for(stream, more, more_size, whole + behind)
    if stream_ended(stream):
        block_give(block)
        return False
    if block == NULL:
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the request message"))
        return False
    if receiver.charge.account != NULL:
        charge_resize(&receiver.charge, room + behind + overhead(stream))
    else:
        charge_make(&receiver.charge, &stream.conn.account, STAGE_ARRIVING, room + behind + overhead(stream))
    # The message ends at a cache line. In nearly all requests so does the last tensor; if its size is a multiple of the
    # line, it also begins at one and is used in place.
    more = block.data + (whole - receiver.size if room == receiver.size else 0)
    assert_that(receiver.received <= room and block_contains(block, more, room))
    if receiver.received:
        memcpy(<uint8_t *>more, receiver.data, receiver.received)
    block_give(receiver.block)
    receiver.block = block
    receiver.data = <uint8_t *>more
    receiver.room = room
    return True


cdef Block *place_for(Stream *stream, const uint8_t *head, size_t head_size, size_t size) noexcept nogil:
    # the final block of the message that begins with `head`
    cdef Block *block = NULL
    if stream.method.service.place != NULL and size >= PLACED_FROM and not stream.receiver.prefix[0]:
        block = stream.method.service.place(stream, head, head_size, size)
    return block if block != NULL or stream_ended(stream) else block_take(size)


cdef void end_message(Stream *stream) noexcept nogil:
    cdef Receiver *receiver = &stream.receiver
    cdef bint compressed = receiver.prefix[0]
    cdef Incoming *message = &stream.first
    assert_that(receiver.block != NULL and receiver.received == receiver.size)
    receiver.messages += 1
    receiving_move(&receiver.state, RECEIVING_PREFIX)
    receiver.prefix_size = 0
    if compressed or message.block != NULL:
        message = <Incoming *>malloc(sizeof(Incoming))  # a thread of the pool may hold it longer than the stream lives
        if message == NULL:
            stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the request message"))
            return
    message.embedded = message == &stream.first
    message.block = receiver.block
    message.data = receiver.data
    message.size = receiver.size
    message.compressed = compressed
    message.charge.account = NULL
    charge_hand(&receiver.charge, &message.charge)
    receiver.block = NULL
    receiver.room = receiver.received = receiver.size = 0
    stream.queued += message.charge.bytes
    if compressed or stream_inflates(stream):
        charge_move(&message.charge, STAGE_INFLATING)
        chain_push(&stream.compressed, message)
        inflate_next(stream)
    else:
        message_ready(stream, message)


cdef void message_ready(Stream *stream, Incoming *message) noexcept nogil:
    # takes over `message`
    charge_move(&message.charge, STAGE_WAITING)
    chain_push(&stream.incoming, message)
    stream.method.service.message(stream)


cdef void stream_drop_message(Stream *stream) noexcept nogil:
    cdef Incoming *message = <Incoming *>chain_pop(&stream.incoming)
    cdef size_t size = message.charge.bytes
    assert_that(stream.queued >= size)
    stream.queued -= size
    if stream.single and not stream_ended(stream):
        if stream.with_handler.account == NULL:
            charge_hand(&message.charge, &stream.with_handler)
            charge_move(&stream.with_handler, STAGE_WITH_HANDLER)
        else:
            charge_release(&message.charge)
            charge_resize(&stream.with_handler, stream.with_handler.bytes + size)
    incoming_free(message)
    inflate_next(stream)
    if stream.withheld and stream.queued < QUEUED_LIMIT:
        nghttp2_session_consume_stream(stream.conn.session, stream.id, stream.withheld)
        stream.withheld = 0
        mark_dirty(stream.conn)
        if stream.receiver.state == RECEIVING_MESSAGE:  # the time in which the peer could not send does not count
            host_look(stream.conn.host)
            stream.receiver.begun_ns = stream.conn.host.now_ns
            stream_watch(stream)


cdef void stream_half_closed(Stream *stream) noexcept nogil:
    cdef bint whole = stream.receiver.state == RECEIVING_PREFIX and stream.receiver.prefix_size == 0
    receiving_move(&stream.receiver.state, RECEIVED_ALL)
    if stream_ended(stream):
        return
    if not whole:
        stream_refuse(stream, REFUSAL_PROTOCOL, format_text("the request ends in the middle of a message"))
    elif not stream_inflates(stream):  # else inflate_rest calls it
        stream.method.service.half_closed(stream)


cdef bint fits(Stream *stream) noexcept nogil:
    # False: the announced message exceeds a limit by itself, and the call is refused
    cdef const Host *host = stream.conn.host
    cdef size_t size = stream.receiver.size
    if quota_refuses_message(stream, size):
        return False
    if size > host.account.limit:
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text(
            "the request announces a message of %zu bytes; all clients together may have %zu", size,
            host.account.limit))
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Compressed messages

cdef void inflate_next(Stream *stream) noexcept nogil:
    if stream_inflates(stream):
        inflate_rest(stream)


cdef void inflate_rest(Stream *stream) noexcept nogil:
    # Inflate the messages that wait, as long as the handler takes them: inflated messages are bounded like others.
    cdef MessageOwner owner = message_owner(stream, &stream.inflating)
    cdef Incoming *message
    cdef Result result
    while stream.compressed.first != NULL and stream.inflating == NULL and not stream_ended(stream) and (
            stream.incoming.first == NULL or stream.queued < QUEUED_LIMIT):
        message = <Incoming *>chain_pop(&stream.compressed)
        result = RESULT_OK
        if not message.compressed or message_inflate(&owner, message, stream.encoding, stream.conn.host.max_inflated,
                                                     stream.forwarded_size, &result, inflated_later):
            inflated(stream, message, result)
    mark_dirty(stream.conn)
    if stream.receiver.state == RECEIVED_ALL and not stream_inflates(stream) and not stream_ended(stream):
        stream.method.service.half_closed(stream)


cdef void inflated_later(void *call, Incoming *message, Result result) noexcept nogil:
    inflated(<Stream *>call, message, result)
    inflate_rest(<Stream *>call)


cdef void inflated(Stream *stream, Incoming *message, Result result) noexcept nogil:
    # `message.charge` is still that of the compressed message
    assert_that(stream.queued >= message.charge.bytes)
    stream.queued -= message.charge.bytes
    if result != RESULT_OK or stream_ended(stream):
        incoming_free(message)
        if result != RESULT_OK:
            inflating_failed(stream, result)
        return
    charge_resize(&message.charge, message.size + stream.forwarded_size + overhead(stream))
    stream.queued += message.charge.bytes
    message_ready(stream, message)


cdef void inflating_failed(Stream *stream, Result result) noexcept nogil:
    cdef char *text
    if result == RESULT_TOO_LARGE:
        text = format_text("Received message larger than max after decompression (limit %zu)",
                           stream.conn.host.max_inflated)
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, text)
    elif result == RESULT_NO_MEMORY:
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the decompressed request message"))
    else:
        text = format_text("a request message could not be decompressed: its %s data is %s",
                           encoding_name(stream.encoding),
                           <const char *>("truncated" if result == RESULT_TRUNCATED else "corrupt"))
        stream_refuse(stream, REFUSAL_PROTOCOL, text)
