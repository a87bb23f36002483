"""Calls and connections for Python.

The thread of a synchronous call waits in `Link.run`, without the GIL, and no other thread touches the call's Python
side. For calls that announce themselves, `Link.attend`, in a thread, or `Link.serve`, in a loop, calls their owners.

Threads wait for the lock of a line only without the GIL, because its holder may need the GIL for TLS.
"""

import sys

from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport errno
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from inferd_client._native.atomic cimport atomic_add
from inferd_client._native.clock cimport now_ns
from inferd_client._native.line cimport (
    CANCELLED, EXPIRED, NO_MEMORY, NOT_GIVEN_UP, TOO_LARGE, Arrived, GivenUp, line_attend, line_flush, line_free,
    line_give_up, line_hand_over, line_kill, line_open, line_receive, line_submit, line_tick, line_turn, line_wait,
    line_wake_reader, wire_free, wire_open,
)
from inferd_client._native.linux cimport iovec, pthread_cond_signal, pthread_mutex_lock, pthread_mutex_unlock
from inferd_client._native.messages cimport Content, message_of
from inferd_client._native.nghttp2 cimport (
    NGHTTP2_NV_FLAG_NO_COPY_NAME, NGHTTP2_NV_FLAG_NO_COPY_VALUE, NGHTTP2_REFUSED_STREAM, nghttp2_nv,
)
from inferd_client._native.output cimport output_empty
from inferd_client._native.session cimport (
    CONNECTION_LOST, STREAM_RESET, session_open, session_release, session_resume, session_terminate,
)

cdef enum:
    SLICE_NS = 200000000     # how long a thread waits without checking for signals
    TURNS = 64               # how often it reads for other threads without checking for them
    BATCH = 64               # calls whose news one round takes
    FEW_PIECES = 64          # of a call, which may be moved each time
    CONNECTION_WINDOW = (1 << 30) - 1  # of flow control: no stream holds up another

STATUS_CANCELLED, STATUS_UNKNOWN, STATUS_DEADLINE_EXCEEDED, STATUS_PERMISSION_DENIED = 1, 2, 4, 7
STATUS_RESOURCE_EXHAUSTED, STATUS_UNIMPLEMENTED, STATUS_INTERNAL, STATUS_UNAVAILABLE = 8, 12, 13, 14
STATUS_UNAUTHENTICATED = 16
OF_HTTP = {400: STATUS_INTERNAL, 401: STATUS_UNAUTHENTICATED, 403: STATUS_PERMISSION_DENIED,
           404: STATUS_UNIMPLEMENTED, 429: STATUS_UNAVAILABLE, 502: STATUS_UNAVAILABLE, 503: STATUS_UNAVAILABLE,
           504: STATUS_UNAVAILABLE}
OF_RESETS = {7: STATUS_UNAVAILABLE, 8: STATUS_CANCELLED, 11: STATUS_RESOURCE_EXHAUSTED, 12: STATUS_PERMISSION_DENIED}
"""gRPC's statuses for those of HTTP, and for the errors with which HTTP/2 resets streams."""


def timeout_text(double seconds):
    """A grpc-timeout: at most eight digits, rounded up."""
    cdef uint64_t microseconds = <uint64_t> min(max(seconds * 1e6 + 0.999, 1.0), 9e13)
    if microseconds < 100000000:
        return b"%du" % microseconds
    if microseconds < 100000000000:
        return b"%dm" % ((microseconds + 999) // 1000)
    return b"%dS" % ((microseconds + 999999) // 1000000)


cdef class Call:
    """One RPC.

    Args:
        headers: pairs of bytes, those that begin with ":" first.
        pieces: of the framed messages: bytes, or Content. They must not change until the call has ended.
        timeout: seconds, or None.
        many: whether the server may send several messages.
        goes_on: whether `Link.send` sends further messages.
        owner: its `call_changed(call, done)` is called when messages have come, and at the end. None: a thread waits.
        future: of asyncio, instead of an owner: gets a result when the call has ended.
    """

    def __cinit__(self, list headers, list pieces, timeout=None, *, bint many=False, bint goes_on=False, owner=None,
                  future=None):
        cdef size_t i = 0
        cdef bytes name, value
        wire_open(&self.wire)
        self.wire.call = <void *> self
        self.wire.many = many
        self.wire.announces = owner is not None or future is not None
        self.wire.exchange.goes_on = goes_on
        self.wire.exchange.stays = True
        self.owner = owner
        self.future = future
        self.texts = headers
        if timeout is not None:
            self.wire.deadline_ns = now_ns() + <uint64_t> (min(max(<double> timeout, 0.0), 1e9) * 1e9) + 1
            self.texts = [*headers, (b"grpc-timeout", timeout_text(timeout))]
        self.header_count = len(self.texts)
        self.headers = <nghttp2_nv *> calloc(self.header_count, sizeof(nghttp2_nv))
        if self.headers == NULL:
            raise MemoryError
        for name, value in self.texts:
            self.headers[i] = nghttp2_nv(<uint8_t *> <char *> name, <uint8_t *> <char *> value, len(name), len(value),
                                         NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE)
            i += 1
        self.pieces = list(pieces) if goes_on else pieces  # `Link.send` changes it
        self.parts = self.parts_of(pieces, self.few_parts)
        self.room = max(<size_t> len(pieces), <size_t> PARTS)
        self.wire.exchange.parts = self.parts
        self.wire.exchange.part_count = <uint32_t> len(pieces)

    def __dealloc__(self):
        wire_free(&self.wire)
        free(self.headers)
        if self.parts != self.few_parts:
            free(self.parts)

    cdef iovec *parts_of(self, list pieces, iovec *room) except NULL:
        """The memory of the pieces; in `room` if PARTS is enough, else in memory that the caller frees."""
        cdef size_t i, count = len(pieces)
        cdef iovec *parts = room
        if room == NULL or count > PARTS:
            parts = <iovec *> calloc(count + 1, sizeof(iovec))
        if parts == NULL:
            raise MemoryError
        for i in range(count):
            piece = pieces[<Py_ssize_t> i]
            if type(piece) is bytes:
                parts[i] = iovec(<void *> <char *> (<bytes> piece), len(<bytes> piece))
            else:
                parts[i] = iovec((<Content?> piece).view.buf, (<Content> piece).view.len)
        return parts

    @property
    def unsent(self):
        """Bytes of its messages that the server has not taken yet."""
        return self.wire.exchange.unsent

    @property
    def done(self):
        """Whether it has ended."""
        return self.wire.done

    def messages(self):
        """Take the arrived messages: pairs (Message, its compression's encoding).

        While some are untaken, the server may send no more than the window of a stream. On a link of an event loop call
        `flush` afterwards, which lets the server continue.
        """
        cdef Arrived *arrived
        with nogil:
            pthread_mutex_lock(&self.link.line.lock)
            arrived = self.wire.first
            self.wire.first = self.wire.last = NULL
            session_release(&self.link.line.session, &self.wire.exchange)
            if not self.link.line.evented:
                line_flush(&self.link.line)
            pthread_mutex_unlock(&self.link.line.lock)
        return self.taken(arrived)

    def message(self):
        """The only message of an ended call, as in `messages`; None: there is none, or more than one."""
        cdef Arrived *arrived = self.wire.first
        if arrived == NULL or arrived.next != NULL:
            return None
        self.wire.first = self.wire.last = NULL
        return self.taken(arrived)[0]

    def response(self):
        """The message of a call that has ended with OK and exactly one message, which is not compressed; else None."""
        cdef Arrived *arrived = self.wire.first
        if (self.wire.given_up != NOT_GIVEN_UP or self.wire.exchange.grpc_status != 0 or arrived == NULL
                or arrived.next != NULL or arrived.compressed):
            return None
        self.wire.first = self.wire.last = NULL
        message = message_of(arrived.data, arrived.size, arrived.capacity)
        free(arrived)
        return message

    cdef list taken(self, Arrived *arrived):
        cdef Arrived *following
        found = []
        while arrived != NULL:
            following = arrived.next
            encoding = ""
            if arrived.compressed:
                encoding = (<bytes> self.wire.encoding).decode("latin-1") or "identity"
            found.append((message_of(arrived.data, arrived.size, arrived.capacity), encoding))
            free(arrived)
            arrived = following
        return found

    @property
    def safe_to_repeat(self):
        """Of a call that has ended: whether the server has not touched it."""
        if self.wire.given_up != NOT_GIVEN_UP or self.wire.exchange.grpc_status >= 0:
            return False
        if self.wire.ending == STREAM_RESET and self.wire.error == NGHTTP2_REFUSED_STREAM:
            return True
        return not self.wire.exchange.began and self.wire.exchange.http_status == 0

    @property
    def answered(self):
        """Of a call that has ended: whether the server has sent its status."""
        return self.wire.given_up == NOT_GIVEN_UP and self.wire.exchange.grpc_status >= 0

    def status(self):
        """Of a call that has ended: (grpc-status, text)."""
        cdef int32_t status = self.wire.exchange.grpc_status, http = self.wire.exchange.http_status
        if self.wire.given_up == EXPIRED:
            return STATUS_DEADLINE_EXCEEDED, "Deadline Exceeded"
        if self.wire.given_up == CANCELLED:
            return STATUS_CANCELLED, "Locally cancelled by application!"
        if self.wire.given_up == TOO_LARGE:
            return (STATUS_RESOURCE_EXHAUSTED, f"Received message larger than max ({self.wire.message_size} vs. "
                    f"{self.link.line.limit})")
        if self.wire.given_up == NO_MEMORY:
            return STATUS_RESOURCE_EXHAUSTED, f"there is no memory for {self.wire.message_size} bytes of a response"
        if status >= 0:
            text = (<bytes> self.wire.text).decode("utf-8", "replace") if self.wire.text != NULL else ""
            if "%" in text:
                from urllib.parse import unquote
                text = unquote(text)
            return (status if status <= 16 else STATUS_UNKNOWN), text
        if self.wire.ending == CONNECTION_LOST:
            if not self.link.line.session.ready:
                return STATUS_UNAVAILABLE, (f"the connection to {self.link.peer} was lost before the server spoke "
                                            f"HTTP/2: is that the port of gRPC, with TLS where the server has it?")
            return STATUS_UNAVAILABLE, f"the connection to {self.link.peer} was lost"
        if self.wire.ending == STREAM_RESET:
            return (OF_RESETS.get(self.wire.error, STATUS_INTERNAL),
                    f"{self.link.peer} reset the call with HTTP/2's error {self.wire.error}")
        if http != 200:
            return (OF_HTTP.get(http, STATUS_UNKNOWN),
                    f"{self.link.peer} answered with HTTP's status {http}, not in gRPC")
        return STATUS_UNKNOWN, f"{self.link.peer} ended the call without a status"

    @property
    def details(self):
        """The details of the server's error: a google.rpc.Status, in Base64; empty without one."""
        return <bytes> self.wire.details if self.wire.details != NULL else b""


cdef bint wait_for(Link link, Call call, bint message) noexcept nogil:
    """Wait for the call's end, or also for a message; releases the lock of the line. False: check for signals first."""
    cdef bint heard
    cdef int turns = 0
    while not call.wire.done and not (message and call.wire.first != NULL):
        if not link.line.reading:
            link.line.reading = True
            heard = line_turn(&link.line, 0)
            link.line.reading = False
            turns += 1
            if not heard or turns == TURNS:  # a signal that comes between two polls interrupts neither
                line_hand_over(&link.line)
                pthread_mutex_unlock(&link.line.lock)
                return False
        elif line_wait(&link.line, &call.wire, now_ns() + SLICE_NS):
            return True
        elif not call.wire.done and link.line.reading:
            pthread_mutex_unlock(&link.line.lock)
            return False
    if link.line.count != 0 or link.line.news != NULL:
        line_hand_over(&link.line)
    pthread_mutex_unlock(&link.line.lock)
    return True


cdef class Link:
    """A connection to a server.

    Args:
        fd: a connected socket that does not block; the link's from now on.
        peer: names the other end in texts.
        tls: a Tls whose handshake is done, or None.
        window: of flow control, bytes of each stream.
        limit: bytes of a received message.
        keepalive: seconds between a sign of life and a PING, seconds to wait for its answer, and whether also while no
            call is in flight; None: no PINGs.
        evented: an event loop polls.
        busy_poll: seconds for which a waiting thread polls before it sleeps.
    """

    def __cinit__(self, int fd, str peer, tls=None, *, int32_t window=1 << 23, size_t limit=(1 << 31) - 1,
                  keepalive=None, bint evented=False, double busy_poll=0.0):
        self.line.fd = fd
        self.line.wake = -1
        self.peer = peer
        self.lingering = set()
        self.tls = tls
        self.line.tls = <void *> tls if tls is not None else NULL
        self.line.evented = evented
        self.line.busy_ns = <uint64_t> (busy_poll * 1e9)
        self.line.limit = limit
        if keepalive is not None:
            self.line.ping_every_ns = <uint64_t> (<double> keepalive[0] * 1e9)
            self.line.ping_timeout_ns = <uint64_t> (<double> keepalive[1] * 1e9)
            self.line.ping_idle = keepalive[2]
        if not line_open(&self.line):
            if self.line.wake < 0:
                raise OSError(errno, "no eventfd for another connection")
            raise MemoryError
        if not session_open(&self.line.session, window, CONNECTION_WINDOW, 1 << 20):
            raise MemoryError

    def __dealloc__(self):
        line_free(&self.line)

    # --- hints, read without the lock, so they may be out of date

    @property
    def usable(self):
        """Whether it takes further calls."""
        return not self.line.dead and not self.line.session.refusing and not self.line.closing

    @property
    def dead(self):
        """Whether the connection is gone."""
        return self.line.dead

    @property
    def count(self):
        """Calls in flight."""
        return self.line.count

    @property
    def blocked(self):
        """Whether output waits because the socket is full."""
        return self.line.blocked and not self.line.dead

    @property
    def fd(self):
        return self.line.fd

    # --- ended calls to which something still refers

    cdef keep(self, Call call):
        """The call has ended for its caller."""
        # Without the lock: while a part of the call is unwritten, the output is not empty, whatever other threads add.
        if call.wire.orphaned or not output_empty(&self.line.session.output):
            self.lingering.add(call)

    cdef forget(self):
        """Drop calls to which nothing refers any more."""
        cdef bint empty
        cdef Call call
        if not self.lingering:
            return
        known, self.lingering = self.lingering, set()  # do not check those that other threads add meanwhile
        with nogil:
            pthread_mutex_lock(&self.line.lock)
            empty = output_empty(&self.line.session.output) or self.line.dead
            pthread_mutex_unlock(&self.line.lock)
        if empty:
            known = {call for call in known if call.wire.orphaned and not self.line.dead}
        known.update(self.lingering)
        self.lingering = known

    # --- calls

    def run(self, Call call not None):
        """Make the call and wait for its end. False: the link takes no calls any more, and the call was not made.

        Raises:
            BaseException: what a signal's handler raises, such as KeyboardInterrupt; the call is given up.
        """
        cdef bint taken, ended = False
        self.forget()
        call.link = self
        with nogil:
            atomic_add(&self.line.coming, 1)
            pthread_mutex_lock(&self.line.lock)
            taken = line_submit(&self.line, &call.wire, call.headers, call.header_count)
            if atomic_add(&self.line.coming, -1) == 0:
                line_flush(&self.line)  # otherwise the next thread writes, once for both calls
            if taken:
                if call.wire.deadline_ns != 0 and call.wire.deadline_ns < self.line.wakes_ns:
                    line_wake_reader(&self.line)
                ended = wait_for(self, call, False)
            else:
                pthread_mutex_unlock(&self.line.lock)
        if not taken:
            return False
        if not ended:
            self.wait(call)
        self.keep(call)
        return True

    def wait(self, Call call not None, *, bint message=False):
        """Wait until a started call has ended, or, if requested, has a message.

        Raises:
            BaseException: what a signal's handler raises, such as KeyboardInterrupt; the call is given up.
        """
        cdef bint ended = False
        while not ended:
            try:
                PyErr_CheckSignals()
            except BaseException:
                self.give_up(call)
                raise
            with nogil:
                pthread_mutex_lock(&self.line.lock)
                ended = wait_for(self, call, message)

    def start(self, Call call not None, *, bint flush=True):
        """Begin the call. False: the link takes no calls any more."""
        cdef bint taken
        self.forget()
        call.link = self
        if call.wire.announces:
            Py_INCREF(call)  # until its owner knows its end
        with nogil:
            pthread_mutex_lock(&self.line.lock)
            taken = line_submit(&self.line, &call.wire, call.headers, call.header_count)
            if taken:
                if flush:
                    line_flush(&self.line)
                if not self.line.evented:
                    if call.wire.deadline_ns != 0 and call.wire.deadline_ns < self.line.wakes_ns:
                        line_wake_reader(&self.line)
                    if not self.line.reading and call.wire.announces:
                        pthread_cond_signal(&self.line.attendant)
            pthread_mutex_unlock(&self.line.lock)
        if not taken and call.wire.announces:
            Py_DECREF(call)
        return taken

    def send(self, Call call not None, list pieces not None, *, bint goes_on=True):
        """Send further messages of a call that goes on; without pieces, end it."""
        cdef size_t count = len(pieces), left, room
        cdef iovec *added = call.parts_of(pieces, NULL)
        cdef iovec *grown = NULL
        cdef iovec *old = NULL
        cdef bint drained, no_memory = False
        cdef size_t i, sent, written
        cdef uint64_t emptied
        with nogil:
            pthread_mutex_lock(&self.line.lock)
            left = call.wire.exchange.part_count - call.wire.exchange.part
            drained = output_empty(&self.line.session.output)
            emptied = self.line.emptied
            if left == 0:
                call.wire.exchange.part = call.wire.exchange.part_count = 0
            if call.wire.exchange.part_count + count > call.room:
                room = 2 * (left + count) + PARTS  # so that each part is moved a few times, however many wait
                grown = <iovec *> calloc(room + 1, sizeof(iovec))
                no_memory = grown == NULL
            if grown != NULL:
                if left != 0:
                    memcpy(grown, call.wire.exchange.parts + call.wire.exchange.part, left * sizeof(iovec))
                old, call.parts, call.room = call.parts, grown, room
                call.wire.exchange.parts = grown
                call.wire.exchange.part = 0
                call.wire.exchange.part_count = <uint32_t> left
            if not no_memory:
                if count != 0:
                    memcpy(call.parts + call.wire.exchange.part_count, added, count * sizeof(iovec))
                call.wire.exchange.part_count += <uint32_t> count
                for i in range(count):
                    call.wire.exchange.unsent += added[i].iov_len
                call.wire.exchange.goes_on = goes_on
                if call.wire.in_flight:
                    session_resume(&self.line.session, &call.wire.exchange)
                    line_flush(&self.line)
            pthread_mutex_unlock(&self.line.lock)
        free(added)
        if old != call.few_parts:
            free(old)
        if no_memory:
            raise MemoryError
        sent = len(call.pieces) - left
        written = sent if drained else call.sealed if emptied != call.emptied else 0
        if len(call.pieces) > FEW_PIECES and written < FEW_PIECES:
            written = 0  # the next time: to drop pieces moves all others
        del call.pieces[:<Py_ssize_t> written]
        call.pieces += pieces
        call.sealed, call.emptied = sent - written, emptied

    def give_up(self, Call call not None, *, bint expired=False):
        """The caller wants no response: the call ends with CANCELLED, or DEADLINE_EXCEEDED."""
        cdef GivenUp why = EXPIRED if expired else CANCELLED
        with nogil:
            pthread_mutex_lock(&self.line.lock)
            line_give_up(&self.line, &call.wire, why)
            pthread_mutex_unlock(&self.line.lock)
        self.keep(call)

    # --- news

    def news(self):
        """Tell owners of their calls' ends and messages."""
        cdef Wire *found[BATCH]
        cdef bint done[BATCH]
        cdef int i, count = BATCH
        cdef Call call
        while count == BATCH:
            count = 0
            with nogil:
                pthread_mutex_lock(&self.line.lock)
                while self.line.news != NULL and count < BATCH:
                    found[count] = self.line.news
                    self.line.news = found[count].next_news
                    found[count].has_news = False
                    done[count] = found[count].done
                    count += 1
                pthread_mutex_unlock(&self.line.lock)
            for i in range(count):
                call = <Call> found[i].call
                owner, future = call.owner, call.future
                if done[i]:
                    self.keep(call)
                    call.owner = call.future = None  # they hold each other
                    Py_DECREF(call)
                try:
                    if future is None:
                        owner.call_changed(call, done[i])
                    elif done[i] and not future.done():
                        future.set_result(None)
                except BaseException as error:
                    if self.line.evented and not isinstance(error, Exception):
                        raise  # such as KeyboardInterrupt, in the thread of an event loop
                    sys.excepthook(*sys.exc_info())  # the other calls need this thread

    def attend(self):
        """Read while calls that announce themselves are in flight, and tell their owners; until it is closed or
        gone."""
        cdef bint ended = False
        self.attended = True
        while not ended:
            with nogil:
                pthread_mutex_lock(&self.line.lock)
                while self.line.news == NULL and not ended:
                    if self.line.announcing == 0 and (self.line.closing or self.line.dead):
                        ended = True
                    elif self.line.reading or (self.line.announcing == 0 and not self.line.ping_idle):
                        line_attend(&self.line, now_ns() + 5 * <uint64_t> SLICE_NS)
                    else:
                        self.line.reading = True
                        line_turn(&self.line, 0)
                        self.line.reading = False
                line_hand_over(&self.line)
                pthread_mutex_unlock(&self.line.lock)
            self.news()
            if not ended and self.line.session.refusing and self.line.count == 0:
                self.close()
        self.attended = False

    def serve(self):
        """For an event loop, when the socket is readable or writable: read or write, and tell the owners of calls."""
        with nogil:
            pthread_mutex_lock(&self.line.lock)
            line_receive(&self.line)
            line_flush(&self.line)
            pthread_mutex_unlock(&self.line.lock)
        if self.line.news != NULL:
            self.news()

    def flush(self):
        """Write the output."""
        with nogil:
            pthread_mutex_lock(&self.line.lock)
            line_flush(&self.line)
            pthread_mutex_unlock(&self.line.lock)

    def tick(self):
        """For an event loop: send due PINGs. Returns seconds until the next call; None: no call is needed."""
        cdef uint64_t due
        with nogil:
            pthread_mutex_lock(&self.line.lock)
            due = line_tick(&self.line)
            pthread_mutex_unlock(&self.line.lock)
        if self.line.news != NULL:
            self.news()
        return None if due == 0 else max(<double> due - <double> now_ns(), 0.0) / 1e9

    def close(self):
        """Send GOAWAY and end; calls in flight end with CANCELLED."""
        with nogil:
            pthread_mutex_lock(&self.line.lock)
            if not self.line.dead:
                self.line.closing = True
                while self.line.flight != NULL and not self.line.dead:
                    line_give_up(&self.line, self.line.flight, CANCELLED)
                if not self.line.dead:
                    session_terminate(&self.line.session)
                    line_flush(&self.line)
                line_kill(&self.line)
            pthread_mutex_unlock(&self.line.lock)
        if self.line.evented:
            self.news()
