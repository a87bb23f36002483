"""The attendant's loop: all that it waits for, in C.

It sleeps in one `ppoll` on the side socket, the pipes of the worker's output, the worker's end (a pidfd) and an eventfd
by which other threads call it, and needs the GIL only for what Python must see.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy

from inferd._native.atomic cimport exchange32, load32, load64, store32
from inferd._native.clock cimport now_ns
from inferd._native.memory.arena cimport arena_trim
from inferd._native.memory.resource cimport Block, block_give
from inferd._native.threads cimport lock, unlock
from inferd.backends.python._bls cimport bls_take
from inferd.backends.python._channel cimport (
    Channel,
    Outlet,
    awake,
    channel_break,
    channel_end,
    outlet_flush,
    packet_poll,
)
from inferd.backends.python._grants cimport grant_asked
from inferd.backends.python._life cimport WORKER_ENDING
from inferd.backends.python._side cimport side_record, side_signal, side_take
from inferd.backends.python._wire cimport ALLOCATE, CALL, FINAL, HEALTH, IN_ARENA, LOG, METRIC, PACKET, RESPONSE, Head

import logging

logger = logging.getLogger("inferd.python")

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <errno.h>
    #include <poll.h>
    #include <stdint.h>
    #include <time.h>
    #include <unistd.h>
    static inline int inferd_poll(struct pollfd *fds, int count, int64_t ns) {
        struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
        int ready;
        do ready = ppoll(fds, (nfds_t)count, ns < 0 ? NULL : &t, NULL); while (ready < 0 && errno == EINTR);
        return ready;
    }
    """
    struct pollfd:
        int fd
        short events
        short revents
    enum:
        POLLIN
        POLLOUT
        POLLHUP
        POLLERR
    int poll_until "inferd_poll"(pollfd *fds, int count, int64_t ns) nogil

cdef extern from "unistd.h" nogil:
    ssize_t read(int fd, void *data, size_t size)

cdef enum:
    OUTPUT_PIECE = 8192
    OUTPUT_PER_SECOND = 1 << 20  # bytes of a worker's output that are read; a worker that prints more waits
    MOST_LAST_WORDS = 1 << 20  # bytes of its output that are read when the worker has ended
    TAKEN_AT_ONCE = 64  # packets of the side socket, before the rest has its turn
    STEADY = 16  # small responses in quick succession, after which the attendant lets more of them gather

cdef int64_t SECOND_NS = 1000 * 1000 * 1000
cdef int64_t IDLE_NS = 5 * 1000 * 1000 * 1000  # after which unused memory is given back
# Waking up for each response would cost the worker and the server more than the response: see `gathers`.
cdef int64_t QUICK_NS = 100 * 1000  # at most so long after the one before
cdef int64_t GATHER_NS = 40 * 1000


class NonsenseError(Exception):
    """Raised by a listener: a packet of the worker cannot be read, so the worker is ended."""


cdef int watch_loop(WorkerWatch *watch, int64_t until, bint with_work, Head *head) noexcept nogil:
    cdef pollfd fds[PLACES]
    cdef int64_t wait_ns
    cdef int count = PLACES if with_work else PLACES - 1
    cdef int ready
    list_all(watch, fds)
    while True:
        list_outlets(watch, fds)
        list_output(watch, fds)
        wait_ns = patience(watch, until)
        if gathers(watch):
            fds[<int>AT_SIDE].events &= ~POLLIN
            wait_ns = GATHER_NS if wait_ns < 0 else min(wait_ns, GATHER_NS)
        ready = poll_until(fds, count, wait_ns)
        if ready == 0 and wait_ns == IDLE_NS:
            look_after_memory(watch)
        if ready > 0:
            serve(watch, fds)
            if fds[<int>AT_END].revents:
                drain(watch, fds)
                return AT_END
            if with_work and fds[<int>AT_WORK].revents:
                if take_work(watch, head):
                    return AT_WORK
                if fds[<int>AT_WORK].revents & POLLHUP:
                    fds[<int>AT_WORK].fd = -1  # the worker's end is reported next
            if fds[<int>AT_WAKE].revents:
                awake(watch.channel.wake_fd)
                if exchange32(&watch.channel.called, 0):
                    return AT_WAKE
                if not watch.told_ending and watch_is_ending(watch):
                    watch.told_ending = True
                    return AT_WAKE
        if 0 <= until <= now_ns():
            return PLACES


cdef bint take_work(WorkerWatch *watch, Head *head) noexcept nogil:
    # True: channel.packet has a packet for the caller
    cdef ssize_t size = packet_poll(watch.channel.work, watch.channel.packet, PACKET)
    if size <= 0 or not is_whole(watch, watch.channel.packet, size, head):
        return False
    if head.kind == ALLOCATE:
        grant_asked(watch.channel, head)
        return False
    return True


cdef bint is_whole(WorkerWatch *watch, const uint8_t *packet, ssize_t size, Head *head) noexcept nogil:
    # whether the packet has a head, which is set, and the record that fits it; otherwise the worker is ended
    if size < <ssize_t>sizeof(Head):
        channel_break(watch.channel, "sent a packet without a head")
        return False
    memcpy(head, packet, sizeof(Head))
    if not head.flags & IN_ARENA and head.size != <size_t>size - sizeof(Head):
        channel_break(watch.channel, "sent a packet that does not fit its head")
        return False
    return True


cdef void list_all(WorkerWatch *watch, pollfd *fds) noexcept nogil:
    cdef int i
    for i in range(PLACES):
        fds[i].events = POLLIN
        fds[i].revents = 0
    fds[<int>AT_WAKE].fd = watch.channel.wake_fd
    fds[<int>AT_END].fd = watch.channel.pid_fd
    fds[<int>AT_SIDE].fd = watch.channel.side.fd
    fds[<int>AT_WORK].fd = watch.channel.work


cdef void list_outlets(WorkerWatch *watch, pollfd *fds) noexcept nogil:
    cdef Channel *channel = watch.channel
    lock(&channel.guard)  # other threads add packets that a full socket did not take
    fds[<int>AT_SIDE].events = POLLIN | (POLLOUT if channel.side.first != NULL else 0)
    # The front reads the socket of calls. Without it, a worker that calls breaks a rule.
    fds[<int>AT_CALLS].fd = channel.calls.fd if channel.calls.first != NULL or channel.submission == NULL else -1
    unlock(&channel.guard)
    fds[<int>AT_CALLS].events = POLLOUT if channel.submission != NULL else POLLIN


cdef bint watch_is_ending(WorkerWatch *watch) noexcept nogil:
    # the executor sets this state, or the front
    cdef bint out
    lock(&watch.channel.guard)
    out = watch.channel.state == WORKER_ENDING
    unlock(&watch.channel.guard)
    return out


cdef void list_output(WorkerWatch *watch, pollfd *fds) noexcept nogil:
    # a worker that prints more than may be read waits for the next second
    cdef int64_t now
    if watch.printed:
        now = now_ns()
        if now - watch.second_ns >= SECOND_NS:
            watch.second_ns = now
            watch.printed = 0
    fds[<int>AT_OUTPUT].fd = watch.output if watch.printed < OUTPUT_PER_SECOND else -1
    fds[<int>AT_ERRORS].fd = watch.errors if watch.printed < OUTPUT_PER_SECOND else -1


cdef int64_t patience(WorkerWatch *watch, int64_t until) noexcept nogil:
    # how long to sleep; -1: until something comes
    cdef int64_t out = IDLE_NS if load32(&watch.channel.watching) else -1
    if watch.printed >= OUTPUT_PER_SECOND:
        out = max(<int64_t>0, watch.second_ns + SECOND_NS - now_ns())
    if until >= 0:
        until = max(<int64_t>0, until - now_ns())
        out = until if out < 0 else min(out, until)
    return out


cdef bint gathers(WorkerWatch *watch) noexcept nogil:
    # Whether the next look at the side socket comes later, once after each look at it: the worker sends one small
    # response after the other, and waits for nothing.
    if watch.steady < STEADY or watch.gathered:
        return False
    watch.gathered = True
    return True


cdef void look_after_memory(WorkerWatch *watch) noexcept nogil:
    # no packet has come for a while: give back memory that was not used since the last look
    cdef Channel *channel = watch.channel
    cdef int64_t taken
    if not load32(&channel.watching):
        return
    taken = load64(&channel.arena.taken)
    if taken == watch.taken:
        store32(&channel.watching, 0)
        arena_trim(channel.arena)
    watch.taken = taken


cdef void serve(WorkerWatch *watch, pollfd *fds) noexcept nogil:
    if fds[<int>AT_SIDE].revents & POLLOUT:
        flush(watch, &watch.channel.side)
    if fds[<int>AT_CALLS].revents & POLLIN:
        channel_end(watch.channel)
    elif fds[<int>AT_CALLS].revents:
        flush(watch, &watch.channel.calls)
    if fds[<int>AT_SIDE].revents & (POLLIN | POLLHUP | POLLERR) and not take_all_side(watch):
        fds[<int>AT_SIDE].fd = -1
    if fds[<int>AT_OUTPUT].revents and not take_output(watch, watch.output, 1):
        watch.output = fds[<int>AT_OUTPUT].fd = -1
    if fds[<int>AT_ERRORS].revents and not take_output(watch, watch.errors, 2):
        watch.errors = fds[<int>AT_ERRORS].fd = -1


cdef void flush(WorkerWatch *watch, Outlet *outlet) noexcept nogil:
    lock(&watch.channel.guard)
    outlet_flush(outlet)
    unlock(&watch.channel.guard)


cdef void drain(WorkerWatch *watch, pollfd *fds) noexcept nogil:
    # the worker has ended: read what it sent before
    fds[<int>AT_CALLS].fd = -1
    fds[<int>AT_WAKE].fd = -1
    fds[<int>AT_END].fd = -1
    fds[<int>AT_WORK].fd = -1
    fds[<int>AT_SIDE].events = POLLIN
    fds[<int>AT_OUTPUT].fd = watch.output
    fds[<int>AT_ERRORS].fd = watch.errors
    watch.printed = 0
    while poll_until(fds, PLACES, 0) > 0:
        serve(watch, fds)
        if watch.printed >= MOST_LAST_WORDS:  # processes that it started may live on and print
            fds[<int>AT_OUTPUT].fd = fds[<int>AT_ERRORS].fd = -1


cdef bint take_all_side(WorkerWatch *watch) noexcept nogil:
    # what the worker has sent up to now; False: it has closed the socket
    cdef int64_t now = now_ns()
    cdef ssize_t size
    cdef int _
    if now - watch.side_ns > QUICK_NS:
        watch.steady = 0
    watch.side_ns = now
    watch.gathered = False
    for _ in range(TAKEN_AT_ONCE):
        size = packet_poll(watch.channel.side.fd, watch.channel.side_packet, PACKET)
        if size <= 0:
            break
        if not load32(&watch.channel.deaf):
            take_side(watch, size)
    side_signal(watch.channel)
    return size != 0


cdef void take_side(WorkerWatch *watch, ssize_t size) noexcept nogil:
    cdef Head head
    cdef const uint8_t *packet = watch.channel.side_packet
    if not is_whole(watch, packet, size, &head):
        return
    watch.steady = watch.steady + 1 if head.kind == RESPONSE and not head.flags & (IN_ARENA | FINAL) else 0
    if not (side_take(watch.channel, &head, packet + sizeof(Head))
            or bls_take(watch.channel, &head, packet + sizeof(Head))):
        if head.kind in (LOG, METRIC, CALL, HEALTH):
            side_signal(watch.channel)
            with gil:
                tell_packet(watch, &head, packet + sizeof(Head))
        else:
            channel_break(watch.channel, "sent a packet of an unknown kind")


cdef bint take_output(WorkerWatch *watch, int fd, int stream) noexcept nogil:
    # read a piece of the worker's output; False: it has closed the pipe
    cdef char piece[OUTPUT_PIECE]
    cdef ssize_t size = read(fd, piece, OUTPUT_PIECE)
    if size <= 0:
        return False
    if watch.printed == 0:
        watch.second_ns = now_ns()
    watch.printed += size
    with gil:
        tell_output(watch, stream, piece, size)
    return True


cdef void tell_packet(WorkerWatch *watch, const Head *head, const uint8_t *record) noexcept:
    cdef Block *block
    try:
        if head.flags & IN_ARENA:
            block = side_record(watch.channel, head)
            if block == NULL:
                return
            data = PyBytes_FromStringAndSize(<const char *>block.data, head.size)
            block_give(block)
        else:
            data = PyBytes_FromStringAndSize(<const char *>record, head.size)
        (<object>watch.listener).on_packet(head.kind, head.flags, head.code, head.id, data)
    except NonsenseError:
        channel_break(watch.channel, "sent a packet that cannot be read")
    except Exception:
        logger.exception("a packet of kind %d from a worker", head.kind)


cdef void tell_output(WorkerWatch *watch, int stream, const char *data, ssize_t size) noexcept:
    try:
        (<object>watch.listener).on_output(stream, PyBytes_FromStringAndSize(data, size))
    except Exception:
        logger.exception("the output of a worker")
