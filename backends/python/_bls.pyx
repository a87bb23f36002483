"""Business logic scripting: calls that a model makes to other models.

A call is a serialized ModelInferRequest, and the server treats it like every other message: decodes it in place, checks
it with the same error texts, and queues it. The front itself reads it from the socket of calls, so that no other thread
must wake. A call that is too large for a packet comes on the side socket, and a callback passes it to the front. The
front sends the responses to the worker, as serialized ModelInferResponse messages. No thread of the server waits for
them, so calls may be nested to any depth: the calling model waits in its own worker, and occupies only its own
instance.

This module handles the packets of a worker about its calls, and the changes that other threads want; `_bls_calls` has
the calls in flight, `_bls_responses` their responses.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from inferd._native.atomic cimport fetch_add32, load32
from inferd._native.request.bridge cimport PostedCallback, WatchedDescriptor, bridge_attach, bridge_detach, bridge_post
from inferd._native.service.submission cimport Submission
from inferd.backends.python._bls_calls cimport (
    call_cancel,
    call_credit,
    call_find,
    call_make,
    call_new,
    calls_cancel,
    calls_leave,
)
from inferd.backends.python._bls_responses cimport BlsCall
from inferd.backends.python._channel cimport (
    Channel,
    channel_break,
    channel_exhausted,
    channel_give,
    channel_life,
    channel_share,
    packet_poll,
)
from inferd.backends.python._wire cimport BLS_CANCEL, BLS_CREDIT, BLS_REQUEST, BLS_WINDOW, IN_ARENA, PACKET, Head

cdef enum:
    MOST_PACKETS = 32        # packets that are read at a time
    MOST_WISHES = 1 << 16    # changes of calls that the front has not seen yet

cdef struct Wish:
    # a change of a channel's calls, for the front to make
    PostedCallback callback
    Channel *channel
    uint64_t life            # of the worker whose calls they are
    uint64_t id              # of the call; 0: all calls
    uint64_t parent          # all calls on behalf of this request, if it is not 0
    uint32_t credit          # 0: cancel


# ---------------------------------------------------------------------------------------------------------------------
# From the worker, on the socket of calls

cdef void bls_open(Channel *channel) noexcept nogil:
    if channel.submission == NULL:
        return
    if channel.parting == NULL:
        channel.parting = calloc(1, sizeof(Wish))
    if channel.parting == NULL:
        channel_exhausted(channel)  # it is deaf from now on: no call is made that its end would have to end
        return
    channel.descriptor.fd = channel.calls.fd
    channel.descriptor.owner = channel
    channel.descriptor.read = read_calls
    if not bridge_attach((<Submission *>channel.submission).bridge, &channel.descriptor):
        channel_exhausted(channel)  # its calls would wait forever


cdef void bls_close(Channel *channel) noexcept nogil:
    if channel.descriptor.fd >= 0:
        bridge_detach((<Submission *>channel.submission).bridge, &channel.descriptor)
        channel.descriptor.fd = -1


cdef bint read_calls(WatchedDescriptor *descriptor) noexcept nogil:
    cdef Channel *channel = <Channel *>descriptor.owner
    cdef ssize_t size
    cdef int _
    for _ in range(MOST_PACKETS):
        size = packet_poll(descriptor.fd, channel.calls_packet, PACKET)
        if size < 0:
            return True
        if size == 0:
            return False
        if load32(&channel.deaf) or not read_call(channel, <size_t>size):
            return False
    return True


cdef bint read_call(Channel *channel, size_t size) noexcept nogil:
    # one packet; False: the worker is ended
    cdef Head head
    cdef BlsCall *call
    if size < sizeof(Head):
        channel_break(channel, "sent a packet without a head")
        return False
    memcpy(&head, channel.calls_packet, sizeof(Head))
    if head.flags & IN_ARENA or head.size != size - sizeof(Head):
        channel_break(channel, "sent a packet that does not fit its head")
        return False
    if head.kind == BLS_CREDIT:
        call_credit(channel, channel_life(channel), head.id, credit_of(&head))
    elif head.kind == BLS_CANCEL:
        call_cancel(call_find(channel, channel_life(channel), head.id))
    elif head.kind == BLS_REQUEST:
        call = call_new(channel, &head, channel.calls_packet + sizeof(Head))
        if call != NULL:
            call_make(&call.callback)
    else:
        channel_break(channel, "sent a packet of an unknown kind on the socket of calls")
        return False
    return True


cdef inline uint32_t credit_of(const Head *head) noexcept nogil:
    return <uint32_t>max(<uint64_t>1, min(head.offset, <uint64_t>BLS_WINDOW + 1))


# ---------------------------------------------------------------------------------------------------------------------
# From the worker, on the side socket

cdef bint bls_take(Channel *channel, const Head *head, const uint8_t *record) noexcept nogil:
    cdef BlsCall *call
    if head.kind == BLS_REQUEST:
        if channel.submission == NULL:
            channel_break(channel, "calls another model, which is not possible here")
            return True
        call = call_new(channel, head, record)
        if call != NULL:
            bridge_post((<Submission *>channel.submission).bridge, &call.callback)
    elif head.kind == BLS_CREDIT:
        wish(channel, head.id, 0, credit_of(head))
    elif head.kind == BLS_CANCEL:
        wish(channel, head.id, 0, 0)
    else:
        return False
    return True


cdef void bls_abandon(Channel *channel) noexcept nogil:
    cdef Wish *one = <Wish *>channel.parting
    if one == NULL:
        return
    channel.parting = NULL
    post(channel, one)


cdef void bls_leave(Channel *channel, uint64_t number) noexcept nogil:
    # By a callback, because no request may be abandoned while another one is being abandoned. On other threads than the
    # front's, the request has not been sent to the worker yet, so it has no calls.
    if load32(&channel.call_count):
        wish(channel, 0, number, 0)


cdef void wish(Channel *channel, uint64_t id, uint64_t parent, uint32_t credit) noexcept nogil:
    cdef Wish *one
    if channel.submission == NULL:
        return
    if id and load32(&channel.wishes) >= MOST_WISHES:
        channel_break(channel, "sends changes of calls faster than the server makes them")
        return
    one = <Wish *>calloc(1, sizeof(Wish))
    if one == NULL:
        channel_exhausted(channel)
        return
    one.id = id
    one.parent = parent
    one.credit = credit
    post(channel, one)


cdef void post(Channel *channel, Wish *one) noexcept nogil:
    fetch_add32(&channel.wishes, 1)
    one.life = channel_life(channel)
    one.callback.run = grant_wish
    one.channel = channel_share(channel)
    bridge_post((<Submission *>channel.submission).bridge, &one.callback)


cdef void grant_wish(PostedCallback *callback) noexcept nogil:
    cdef Wish *one = <Wish *>callback
    if one.id and one.life != channel_life(one.channel):
        pass  # its worker has ended meanwhile
    elif one.parent:
        calls_cancel(one.channel, one.life, one.parent)
    elif one.id == 0:
        calls_leave(one.channel, one.life)
    elif one.credit:
        call_credit(one.channel, one.life, one.id, one.credit)
    else:
        call_cancel(call_find(one.channel, one.life, one.id))
    fetch_add32(&one.channel.wishes, -1)
    channel_give(one.channel)
    free(one)
