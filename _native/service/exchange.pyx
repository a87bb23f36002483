"""ModelStreamInfer on the native front door, without Python: requests in, responses out.

If a model gives one response for each request, the responses leave in the order of the requests. A decoupled model
gives any number; its responses leave as they come, and a parameter says which one is the last.

At most a window of requests is open. A request is closed when its last response was passed to the transport, which
takes responses only as fast as the client reads. So if a client sends without reading, the server stops reading, too. A
decoupled model may have a limited number of undelivered responses for one request. Each response is acknowledged when
the transport has taken it; so a client that does not read stops the model, too. Such a client must not keep the
instance from others: if other requests wait for the instance and the client does not read for some seconds, its stream
ends, and the model learns that its responses are discarded.

`inferd.server.rpc.exchange` is the same for the grpcio front door.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp

from inferd._native.atomic cimport add_own
from inferd._native.chain cimport Chain, Link, chain_pop, chain_push
from inferd._native.list cimport list_append, list_remove
from inferd._native.memory.resource cimport LIVE_EXCHANGES, Block, block_give, block_share, live_add
from inferd._native.refusal cimport (
    REFUSAL_LIMIT_EXCEEDED,
    REFUSAL_NONE,
    REFUSAL_STOPPING,
    Refusal,
    refusal_count,
    refusal_status,
)
from inferd._native.request.bridge cimport bridge_abandon, bridge_post
from inferd._native.request.callback cimport PostedCallback
from inferd._native.request.lane cimport Lane
from inferd._native.request.life cimport request_is_queued
from inferd._native.request.request cimport Request, Response, request_free, request_new
from inferd._native.service.call_request cimport submit_for_call
from inferd._native.service.encoding cimport error_outgoing, response_outgoing
from inferd._native.status cimport STATUS_DEADLINE_EXCEEDED, STATUS_OK
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.timers cimport Timer, timers_clear, timers_set
from inferd._native.transport.budget cimport COST_FRAME
from inferd._native.transport.call_state cimport RECEIVED_ALL
from inferd._native.transport.errorinfo cimport final_trailers, stream_refuse
from inferd._native.transport.expiry cimport stream_watch
from inferd._native.transport.headers cimport header_value
from inferd._native.transport.ledger cimport CALL_MEMORY, STAGE_WITH_HANDLER, charge_make, charge_resize
from inferd._native.transport.nghttp2 cimport nghttp2_nv, nghttp2_rcbuf_get_buf, nghttp2_vec
from inferd._native.transport.outgoing cimport Outgoing, outgoing_free
from inferd._native.transport.quota cimport quota_refuses_stream
from inferd._native.transport.stream cimport (
    WRITABLE_BELOW,
    Stream,
    end_round,
    stream_drop_request,
    stream_end,
    stream_ended,
    stream_inflates,
    stream_send,
    stream_time_left,
    stream_unsent,
)
from inferd._native.transport.unary cimport call_admit, call_wants, message_take

cdef extern from "<strings.h>" nogil:
    int strncasecmp(const char *a, const char *b, size_t size)

cdef enum:
    # Memory that the structures take, in addition to messages.
    STREAM_MEMORY = 1 << 10
    REQUEST_MEMORY = 4 << 10
    RESPONSE_MEMORY = 256
    RATE = 64 << 10          # sent bytes that pay for one second of debt
    PATIENCE = 3             # seconds of debt with which a stream ends

cdef int64_t LOOK_NS = 1000000000
cdef const char *CLOSE_ON_ERROR = "triton_grpc_error"  # metadata: with "true" the first error ends the stream


cdef struct Opened:
    # one request of a stream, until its last response is passed to the transport
    Opened *previous
    Opened *next
    Exchange *exchange
    Request *request         # NULL: its final response has come
    bint decoupled
    uint32_t pending         # responses that have come and are not sent
    Chain responses          # Sending, those of a model that is not decoupled
    size_t size              # bytes that it is charged for

cdef struct OpenedList:
    Opened *first
    Opened *last

cdef struct Sending:
    # a response that waits for its turn
    Link link
    Opened *opened
    Outgoing *message        # NULL: an error that ends the stream
    Block *ack
    size_t size
    int status               # of that error
    char *details
    Refusal refusal

cdef struct Exchange:
    PostedCallback over      # the first member
    Exchange *previous       # in ExchangeDoor.exchanges
    Exchange *next
    ExchangeDoor *door
    Stream *stream           # NULL: it is over
    uint64_t number
    OpenedList in_order      # requests to models that give one response each, the oldest first
    OpenedList decoupled
    Chain ready              # Sending, responses of decoupled models
    uint32_t open            # requests in both lists
    bint taking              # a message is being taken
    bint closing             # the server stops: no more requests are taken
    bint errors_end          # an error ends the stream
    bint blocked             # the transport has taken a response and takes no more yet
    Block *ack               # of that response
    Timer timer              # set while requests to decoupled models are open
    size_t written           # bytes since the last look
    double debt              # seconds for which others have waited because the client does not read


# ---------------------------------------------------------------------------------------------------------------------
# The call

cdef bint wants(Stream *stream, const uint8_t *name, size_t size) noexcept nogil:
    return is_close_on_error(name, size) or call_wants(stream, name, size)


cdef inline bint is_close_on_error(const uint8_t *name, size_t size) noexcept nogil:
    return size == 17 and memcmp(name, CLOSE_ON_ERROR, 17) == 0


cdef bint ends_on_error(const Stream *stream) noexcept nogil:
    # the value of the last header of that name
    cdef nghttp2_vec name, value
    cdef bint found = False
    cdef uint32_t i
    for i in range(stream.field_count):
        name = nghttp2_rcbuf_get_buf(stream.fields[i].name)
        if not is_close_on_error(name.base, name.len):
            continue
        value = header_value(stream.fields[i].value)
        found = (value.len == 1 and value.base[0] == c"1") or (
            value.len == 4 and strncasecmp(<const char *>value.base, "true", 4) == 0)
    return found


cdef void begin_call(Stream *stream) noexcept nogil:
    cdef ExchangeDoor *door = <ExchangeDoor *>stream.method.context
    cdef Exchange *self
    if not call_admit(stream):
        return
    if door.stopping != NULL:
        stream_refuse(stream, REFUSAL_STOPPING, format_text("%s", door.stopping))
        return
    self = <Exchange *>calloc(1, sizeof(Exchange))
    if self == NULL:
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the call"))
        return
    if quota_refuses_stream(stream):
        free(self)
        return
    live_add(LIVE_EXCHANGES, 1)
    door.streams += 1
    self.door = door
    self.stream = stream
    self.number = door.streams
    self.errors_end = ends_on_error(stream)
    self.over.run = tell_over
    list_append(&door.exchanges, self)
    stream.call = self
    charge_make(&stream.with_handler, &stream.conn.account, STAGE_WITH_HANDLER, CALL_MEMORY + STREAM_MEMORY)
    stream_watch(stream)


cdef inline void hold(Exchange *self, size_t size) noexcept nogil:
    # charge `size` bytes more; the transport releases the charge when the call has its status
    cdef Stream *stream = self.stream
    if stream.with_handler.account != NULL:
        charge_resize(&stream.with_handler, stream.with_handler.bytes + size)


cdef inline void let_go(Exchange *self, size_t size) noexcept nogil:
    cdef Stream *stream = self.stream
    if stream.with_handler.account != NULL:
        charge_resize(&stream.with_handler, stream.with_handler.bytes - size)


cdef void exchange_leave(Exchange *self) noexcept nogil:
    # The stream has its status, or is closed: free its responses, and abandon its requests.
    cdef Stream *stream = self.stream
    self.stream = NULL
    stream.call = NULL
    list_remove(&self.door.exchanges, self)
    if self.timer.slot:
        timers_clear(stream.conn.host.timers, &self.timer)
    block_give(self.ack)
    drop_responses(&self.ready)
    drop_requests(&self.in_order)
    drop_requests(&self.decoupled)
    bridge_post(self.door.submission.bridge, &self.over)


cdef void drop_responses(Chain *responses) noexcept nogil:
    while responses.first != NULL:
        sending_free(<Sending *>chain_pop(responses))


cdef void drop_requests(OpenedList *requests) noexcept nogil:
    cdef Opened *opened
    while requests.first != NULL:
        opened = requests.first
        list_remove(requests, opened)
        drop_responses(&opened.responses)
        if opened.request != NULL:
            bridge_abandon(opened.request)
        free(opened)


cdef void tell_over(PostedCallback *callback) noexcept nogil:
    cdef Exchange *self = <Exchange *>callback
    if self.door.over != NULL:
        self.door.over(self.door.over_context, self.number)
    free(self)
    live_add(LIVE_EXCHANGES, -1)


cdef void fail(Exchange *self, int status, const char *details, Refusal refusal) noexcept nogil:
    cdef Stream *stream = self.stream
    cdef size_t count
    cdef nghttp2_nv *trailers = final_trailers(status, details, refusal, self.door.report, &count)
    exchange_leave(self)
    stream_end(stream, status, details, trailers, count)
    stream_drop_request(stream)


cdef void refuse_stream(Exchange *self, Refusal refusal, const char *details) noexcept nogil:
    if not stream_ended(self.stream):
        refusal_count(refusal)
    fail(self, refusal_status(refusal), details, refusal)


cdef inline bint is_taken(const Stream *stream) noexcept nogil:
    # all messages that have come are taken
    return stream.incoming.first == NULL and not stream_inflates(stream)


cdef void settle(Exchange *self) noexcept nogil:
    # end the stream if nothing is left to be answered
    cdef Stream *stream = self.stream
    if self.open or stream_ended(stream):
        return
    if stream.receiver.state == RECEIVED_ALL and is_taken(stream):
        fail(self, STATUS_OK, "", REFUSAL_NONE)
    elif self.closing:
        refuse_stream(self, REFUSAL_STOPPING, self.door.stopping)


cdef void half_closed(Stream *stream) noexcept nogil:
    if stream.call != NULL:
        settle(<Exchange *>stream.call)


cdef void closed(Stream *stream, uint32_t error_code) noexcept nogil:
    exchange_leave(<Exchange *>stream.call)


cdef void late(Stream *stream) noexcept nogil:
    fail(<Exchange *>stream.call, STATUS_DEADLINE_EXCEEDED, "Deadline Exceeded", REFUSAL_NONE)


cdef inline void close_if_empty(Exchange *self) noexcept nogil:
    # If the server stops, take no more messages after those that have come: a client that always sends more would keep
    # the stream open.
    if self.door.stopping != NULL and self.stream.receiver.state != RECEIVED_ALL and is_taken(self.stream):
        self.closing = True


cdef void exchanges_drain(ExchangeDoor *door, const char *text) noexcept nogil:
    cdef Exchange *self = door.exchanges.first
    cdef Exchange *following
    door.stopping = text
    while self != NULL:
        following = self.next
        close_if_empty(self)
        settle(self)
        self = following


cdef const Stream *exchange_stream(const void *sink) noexcept nogil:
    return (<const Opened *>sink).exchange.stream


# ---------------------------------------------------------------------------------------------------------------------
# Requests

cdef void message_came(Stream *stream) noexcept nogil:
    if stream.call != NULL:
        take_more(<Exchange *>stream.call)


cdef void take_more(Exchange *self) noexcept nogil:
    # not reentrant: taking a message lets the transport inflate and announce the next one
    cdef Stream *stream = self.stream
    if self.taking:
        return
    self.taking = True
    while (self.stream != NULL and self.open < self.door.window and stream.incoming.first != NULL
           and not self.closing and not stream_ended(stream)):
        take(self)
    self.taking = False
    if self.stream != NULL:
        close_if_empty(self)


cdef void take(Exchange *self) noexcept nogil:
    cdef Stream *stream = self.stream
    cdef Request *request = NULL
    cdef Opened *opened = NULL
    cdef const uint8_t *data
    cdef size_t size
    cdef Block *block
    cdef int64_t left = stream_time_left(stream)
    if left == 0:
        late(stream)
        return
    self.open += 1  # before the message is taken: with the last one the transport calls half_closed
    opened = <Opened *>calloc(1, sizeof(Opened))
    request = request_new() if opened != NULL else NULL
    block = message_take(stream, &data, &size) if request != NULL else NULL
    if block == NULL or stream_ended(stream):
        block_give(block)
        free(opened)
        if request != NULL:
            request_free(request)
        if self.stream != NULL:  # else the transport has ended the call meanwhile
            refuse_stream(self, REFUSAL_LIMIT_EXCEEDED, "no memory for the request")
        return
    self.door.received += size
    opened.exchange = self
    opened.request = request
    opened.size = size + REQUEST_MEMORY
    hold(self, opened.size)
    request.deliver = exchange_deliver
    request.sink = opened
    request.origin.stream = self.number
    submit_for_call(self.door.submission, request, stream, block, data, size, left)
    opened.decoupled = request.signature != NULL and request.signature.decoupled
    if not opened.decoupled:
        list_append(&self.in_order, opened)
        return
    list_append(&self.decoupled, opened)
    if self.timer.slot == 0:
        look_later(self)


cdef void close(Exchange *self, Opened *opened) noexcept nogil:
    # the last response of the request has been passed on
    list_remove(&self.decoupled if opened.decoupled else &self.in_order, opened)
    let_go(self, opened.size)
    self.open -= 1
    free(opened)
    take_more(self)


# ---------------------------------------------------------------------------------------------------------------------
# Responses

cdef inline bint leaves_order(const Opened *opened) noexcept nogil:
    # Whether the request is in `in_order`, but its model is decoupled: that was not known until the model was loaded.
    return (not opened.decoupled and opened.request != NULL and opened.request.signature != NULL
            and opened.request.signature.decoupled)


cdef void leave_order(Exchange *self, Opened *opened) noexcept nogil:
    # The responses to this request leave as they come from now on. Without memory for a timer the stream ends.
    list_remove(&self.in_order, opened)
    opened.decoupled = True
    list_append(&self.decoupled, opened)
    if self.timer.slot == 0:
        look_later(self)


cdef inline void sending_free(Sending *sending) noexcept nogil:
    if sending.message != NULL:
        outgoing_free(sending.message)
    block_give(sending.ack)
    free(sending.details)
    free(sending)


cdef void exchange_deliver(void *sink, Response *response, int status, const char *details) noexcept nogil:
    cdef Opened *opened = <Opened *>sink
    cdef Exchange *self = opened.exchange
    cdef Sending *sending = NULL
    cdef bint silent = status == STATUS_OK and response.empty and not response.request.empty_final
    cdef bint leaves = leaves_order(opened)
    if stream_ended(self.stream):  # by the transport
        if response == NULL or response.final:
            opened.request = NULL
        exchange_leave(self)
        return
    if not silent:
        sending = sending_new(self, opened, response, status, details)
    if response == NULL or response.final:
        opened.request = NULL
    if not silent and sending == NULL:
        refuse_stream(self, REFUSAL_LIMIT_EXCEEDED, "no memory for the response")
        return
    if leaves:
        leave_order(self, opened)
        if self.stream == NULL:
            if sending != NULL:
                sending_free(sending)
            return
    if sending != NULL:
        opened.pending += 1
        hold(self, sending.size + RESPONSE_MEMORY)
        chain_push(&self.ready if opened.decoupled else &opened.responses, sending)
    elif opened.decoupled and opened.request == NULL and opened.pending == 0:
        close(self, opened)
    send_ready(self)


cdef Sending *sending_new(Exchange *self, Opened *opened, Response *response, int status,
                          const char *details) noexcept nogil:
    # NULL: no memory
    cdef Sending *sending = <Sending *>calloc(1, sizeof(Sending))
    if sending == NULL:
        return NULL
    sending.opened = opened
    sending.status = status
    sending.refusal = response.refusal if response != NULL else REFUSAL_NONE
    if status == STATUS_OK:
        sending.message = response_outgoing(response, True)
    elif self.errors_end:
        sending.details = format_text("%s", details)
        return sending
    else:
        sending.message = error_outgoing(opened.request, response == NULL or response.final, details)
    if sending.message == NULL:
        free(sending)
        return NULL
    sending.size = sending.message.left
    if status == STATUS_OK:
        add_own(&(<Lane *>response.request.lane).sent, <int64_t>sending.size)
    if response != NULL and response.ack != NULL:
        sending.ack = block_share(response.ack)
    return sending


cdef Sending *next_response(Exchange *self) noexcept nogil:
    # the response whose turn it is; NULL: none
    cdef Opened *opened
    if self.ready.first != NULL:
        return <Sending *>chain_pop(&self.ready)
    while self.stream != NULL and self.in_order.first != NULL:
        opened = self.in_order.first
        if opened.responses.first != NULL:
            return <Sending *>chain_pop(&opened.responses)
        if leaves_order(opened):
            leave_order(self, opened)
        elif opened.request != NULL:
            return NULL
        else:
            close(self, opened)
    return NULL


cdef void send_ready(Exchange *self) noexcept nogil:
    # pass on the responses that may leave now
    cdef Sending *sending
    while self.stream != NULL and not self.blocked and not stream_ended(self.stream):
        sending = next_response(self)
        if sending == NULL:
            break
        send(self, sending)
    if self.stream != NULL:
        settle(self)


cdef void send(Exchange *self, Sending *sending) noexcept nogil:
    cdef Stream *stream = self.stream
    cdef Opened *opened = sending.opened
    opened.pending -= 1
    let_go(self, sending.size + RESPONSE_MEMORY)
    if sending.message == NULL:
        fail(self, sending.status, text_or_no_memory(sending.details), sending.refusal)
        sending_free(sending)
        return
    self.door.sent += sending.size
    self.written += sending.size
    stream_send(stream, sending.message, True)
    sending.message = NULL
    if stream_unsent(stream) >= WRITABLE_BELOW:
        self.blocked = True
        self.ack = sending.ack
        sending.ack = NULL
    sending_free(sending)
    if opened.request == NULL and opened.pending == 0:
        close(self, opened)


cdef void writable(Stream *stream) noexcept nogil:
    cdef Exchange *self = <Exchange *>stream.call
    if self == NULL or not self.blocked:
        return
    self.blocked = False
    block_give(self.ack)
    self.ack = NULL
    send_ready(self)
    end_round(stream.conn.host)  # requests may have been taken


# ---------------------------------------------------------------------------------------------------------------------
# Clients that block instances by not reading

cdef void look_later(Exchange *self) noexcept nogil:
    self.timer.fire = timer_fired
    self.timer.owner = self
    if not timers_set(self.stream.conn.host.timers, &self.timer, self.stream.conn.host.now_ns + LOOK_NS):
        refuse_stream(self, REFUSAL_LIMIT_EXCEEDED, "no memory for the call")


cdef bint keeps_others_waiting(const Exchange *self) noexcept nogil:
    # whether other requests than this stream's wait for an instance that executes one of this stream's
    cdef const Opened *running = self.decoupled.first
    cdef const Opened *other
    cdef Lane *lane
    cdef uint32_t own
    while running != NULL:
        if running.request != NULL and not request_is_queued(running.request) and running.request.lane != NULL:
            lane = <Lane *>running.request.lane
            own = 0
            other = self.decoupled.first
            while other != NULL:
                own += (other.request != NULL and request_is_queued(other.request)
                        and <Lane *>other.request.lane == lane)
                other = other.next
            if lane.scheduler != NULL and lane.scheduler.pending(lane) > own:
                return True
        running = running.next
    return False


cdef bint is_unfinished(const Exchange *self) noexcept nogil:
    cdef const Opened *opened = self.decoupled.first
    while opened != NULL:
        if opened.request != NULL:
            return True
        opened = opened.next
    return False


cdef void timer_fired(Timer *timer, int64_t now) noexcept nogil:
    cdef Exchange *self = <Exchange *>timer.owner
    cdef char *text
    self.stream.conn.host.now_ns = now
    self.debt = max(0.0, self.debt - <double>self.written / RATE)
    self.written = 0
    if not is_unfinished(self):
        self.debt = 0
        return
    if self.blocked and keeps_others_waiting(self):
        self.debt += 1
    if self.debt < PATIENCE:
        look_later(self)
        return
    text = format_text(
        "the client has not read its responses for %.0f s while other requests wait for the instance that makes them; "
        "read faster, or ask for less at a time", self.debt)
    refuse_stream(self, REFUSAL_LIMIT_EXCEEDED, text_or_no_memory(text))
    free(text)


EXCHANGE.single = False
EXCHANGE.reset_cost = COST_FRAME
EXCHANGE.wants = wants
EXCHANGE.begin = begin_call
EXCHANGE.message = message_came
EXCHANGE.half_closed = half_closed
EXCHANGE.writable = writable
EXCHANGE.late = late
EXCHANGE.closed = closed
