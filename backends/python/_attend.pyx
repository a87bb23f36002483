"""The attendant: the thread that keeps one worker, as far as it waits in C.

It sleeps in one `ppoll` on the side socket, the pipes of the worker's output, the worker's end (a pidfd) and an eventfd
by which other threads call it, and needs the GIL only for what Python must see.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset, strdup

from _native.atomic cimport exchange32, load32, load64, store32
from _native.clock cimport now_ns
from _native.memory.arena cimport ArenaHandle, arena_take, arena_trim
from _native.memory.resource cimport Block, BlockView, block_give, block_view
from _native.threads cimport lock, unlock
from backends.python._bls cimport bls_abandon, bls_close, bls_open, bls_take
from backends.python._channel cimport (
    CHANNEL_BROKEN,
    CHANNEL_CLOSED,
    CHANNEL_DOWN,
    Channel,
    ChannelState,
    Outlet,
    Team,
    awake,
    channel_connect,
    channel_break,
    channel_down,
    channel_give,
    channel_kill,
    channel_leave,
    channel_life,
    channel_new,
    channel_nudge,
    channel_up,
    outlet_flush,
    packet_receive,
    packet_send,
    side_send,
    team_give,
    team_new,
)
from backends.python._execute cimport make_executor, make_gate, make_remote, results_close, results_open
from backends.python._grants cimport grant_asked, granted_record, grants_end
from backends.python._side cimport side_record, side_take
from backends.python._wire cimport ALLOCATE, CALL, HEALTH, IN_ARENA, LOG, METRIC, PACKET, Head

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
    # places in the list of what is waited for
    AT_WAKE = 0
    AT_END = 1
    AT_SIDE = 2
    AT_OUTPUT = 3
    AT_ERRORS = 4
    AT_CALLS = 5
    AT_WORK = 6
    PLACES = 7
    OUTPUT_PIECE = 8192
    OUTPUT_PER_SECOND = 1 << 20  # bytes that are read of what a worker prints; it waits with more
    MOST_LAST_WORDS = 1 << 20  # bytes that are read of it when the worker has ended

cdef int64_t SECOND_NS = 1000 * 1000 * 1000
cdef int64_t IDLE_NS = 5 * 1000 * 1000 * 1000  # after which memory that nobody has used is given back


class NonsenseError(Exception):
    """Raised by a listener: what a worker has sent cannot be read, so that it is ended."""


class FloodError(Exception):
    """Raised by a listener: a worker asks for more at once than is served, so that it is ended."""


cdef class TeamHandle:
    """What the workers of one model version know of each other."""

    cdef Team *team

    def __cinit__(self):
        self.team = team_new()
        if self.team == NULL:
            raise MemoryError

    def __dealloc__(self):
        team_give(self.team)

cdef class Link:
    """The server's end of the connection to the workers of one instance, one after the other.

    Args:
        arena: of the model.
        name: of the instance, for error texts.
        team: of the model version.
        timeout_ns: the longest that an execution may take; 0 for any time.
    """

    cdef Channel *channel
    cdef ArenaHandle arena
    cdef object listener
    cdef int output
    cdef int errors
    cdef int64_t taken       # of the arena, when it was last looked at
    cdef BlockView held      # a record in the arena that the worker may be reading
    cdef int64_t second_ns   # when the second began of which `printed` tells
    cdef bint told_killed    # `attend` has returned because the worker is being ended
    cdef int64_t printed     # bytes of the worker's output that were read in it

    def __cinit__(self, ArenaHandle arena not None, str name not None, TeamHandle team not None, timeout_ns: int):
        cdef bytes encoded = name.encode()
        self.channel = channel_new(arena.arena, encoded, team.team, timeout_ns)
        if self.channel == NULL:
            raise MemoryError
        self.arena = arena
        self.output = -1
        self.errors = -1

    def __dealloc__(self):
        channel_give(self.channel)

    @property
    def executor(self):
        """For NativeInstance.executor."""
        return make_executor(self.channel)

    @property
    def gate(self):
        """For NativeInstance.gate."""
        return make_gate(self.channel)

    @property
    def remote(self) -> object:
        """For NativeInstance.remote. After `allow_calls`, which also says whose loop it is."""
        return make_remote(self.channel)

    @property
    def flags(self) -> int:
        """Offset in the arena of the flags that say which requests are cancelled."""
        return self.channel.flags.data - self.channel.arena.base

    @property
    def open(self) -> int:
        """Requests that the worker has."""
        return self.channel.slots.open

    @property
    def life(self) -> int:
        """Number of the worker that is there, or was; each has its own."""
        return channel_life(self.channel)

    @property
    def overdue(self) -> bool:
        """The worker was killed because an execution took too long."""
        lock(&self.channel.guard)
        out = self.channel.overdue != 0
        unlock(&self.channel.guard)
        return out

    @property
    def killed(self) -> bool:
        """The worker is being ended."""
        return self.is_ending()

    @property
    def fault(self) -> str:
        """What the worker did that it was killed for; empty: nothing, or its execution took too long."""
        cdef const char *fault
        lock(&self.channel.guard)
        fault = self.channel.fault
        unlock(&self.channel.guard)
        return (<bytes>fault).decode() if fault != NULL else ""

    # -- the state; on the attendant's thread

    def connect(self, listener, int work, int side, int calls, int pid_fd, int supervisor, output: int,
                errors: int) -> None:
        """A worker was started.

        Args:
            listener: gets `on_output(stream, data)` (1: standard output, 2: standard error) and `on_packet(kind, flags,
                code, id, record)`, on the attendant's thread, until `down`. The latter may raise NonsenseError and
                FloodError.
            work, side, calls: the worker's sockets. All descriptors remain the caller's.
            pid_fd: tells of its end.
            supervisor: the socket to its supervisor; -1: none.
            output, errors: the pipes of what it prints.
        """
        self.listener = listener
        self.output = output
        self.errors = errors
        self.printed = 0
        self.told_killed = False
        with nogil:
            channel_connect(self.channel, work, side, calls, pid_fd, supervisor)
            bls_open(self.channel)

    def up(self) -> None:
        """The worker has loaded its model."""
        self.held = None
        with nogil:
            results_open(self.channel)
            channel_up(self.channel)

    def down(self, why: str, state: str) -> None:
        """There is no worker now; what it had is answered `why`.

        Args:
            why: for clients.
            state: "down": the next one is being started, requests wait for it; "broken": they do not; "closed": there
                will be none.
        """
        cdef bytes encoded = why.encode("utf-8", "replace")
        cdef char *text = strdup(encoded)
        cdef ChannelState next_state = {"down": CHANNEL_DOWN, "broken": CHANNEL_BROKEN, "closed": CHANNEL_CLOSED}[state]
        self.listener = None  # which has this, too
        with nogil:
            bls_close(self.channel)
            channel_down(self.channel, next_state, text)
            results_close(self.channel)
            bls_abandon(self.channel)

    def allow_calls(self, entrance) -> None:
        """Let the workers call other models.

        Args:
            entrance: a capsule "inferd.submission" around the Submission that they go through; it outlives the workers.
        """
        self.channel.submission = PyCapsule_GetPointer(entrance, "inferd.submission")

    # -- any thread

    def nudge(self) -> None:
        """Have `attend` return."""
        store32(&self.channel.called, 1)
        channel_nudge(self.channel)

    def leave(self) -> None:
        """Let the instance wait for no worker any more that is not up."""
        channel_leave(self.channel)

    def kill(self) -> None:
        """End the worker at once."""
        channel_kill(self.channel)

    # -- packets

    def send_work(self, kind: int, record: bytes = b"") -> None:
        """Send to the worker's main thread. Only while no EXECUTE can be under way.

        Raises:
            MemoryError: there is no shared memory for a large record.
        """
        cdef Head head
        cdef Block *block = NULL
        cdef const char *data = record
        cdef size_t size = len(record)
        memset(&head, 0, sizeof(Head))
        head.kind = kind
        head.size = <uint32_t>size
        if size + sizeof(Head) > PACKET:
            block = arena_take(self.channel.arena, size)
            if block == NULL:
                raise MemoryError(f"no shared memory for {size} bytes")
            memcpy(block.data, data, size)
            head.flags = IN_ARENA
            head.offset = <uint64_t>(block.data - self.channel.arena.base)
            self.held = block_view(block, block.data, size)  # until the worker is up
            block_give(block)
            size = 0
        with nogil:
            packet_send(self.channel.work, &head, sizeof(Head), data, size, 0)

    def send_side(self, kind: int, id: int, record: bytes = b"", life: int = 0) -> None:
        """Send to the worker's reader of the side socket; never blocks.

        Args:
            kind, id, record: of the packet.
            life: of the worker that it is for; it is for no other. 0: for the one that is there.
        """
        cdef Head head
        cdef const char *data = record
        memset(&head, 0, sizeof(Head))
        head.kind = kind
        head.id = id
        head.size = <uint32_t>len(record)
        side_send(self.channel, <uint64_t>life, &head, data, len(record))

    # -- the attendant's loop

    def attend(self, starting: bool, seconds: float | None = None) -> tuple[str, int, int, bytes]:
        """Keep the worker until something happens.

        Args:
            starting: return packets of the work socket, too, on which no instance waits yet or any more.
            seconds: at most.

        Returns:
            ("end", 0, 0, b""): the worker has ended, and all that it had said has been dealt with; ("packet", kind, id,
            record); ("wake", ...): `nudge` was called, or the worker is being ended; ("time", ...): the time is over.
        """
        cdef int64_t until = -1 if seconds is None else now_ns() + <int64_t>(seconds * 1e9)
        cdef bint with_work = starting
        cdef int event
        cdef Head head
        with nogil:
            event = self.loop(until, with_work, &head)
        if event == AT_WORK:
            return "packet", head.kind, head.id, self.work_record(&head)
        return {AT_END: "end", AT_WAKE: "wake"}.get(event, "time"), 0, 0, b""

    cdef bytes work_record(self, const Head *head):
        cdef Block *block = granted_record(self.channel, head)
        if block == NULL:
            return b""
        record = PyBytes_FromStringAndSize(<const char *>block.data, head.size)
        block_give(block)
        grants_end(self.channel)
        return record

    cdef bint take_work(self, Head *head) noexcept nogil:
        # a packet to be returned is in channel.packet
        cdef ssize_t size = packet_receive(self.channel.work, self.channel.packet, PACKET, 0)
        if size < <ssize_t>sizeof(Head):
            return False
        memcpy(head, self.channel.packet, sizeof(Head))
        if head.kind == ALLOCATE:
            grant_asked(self.channel, head)
            return False
        return head.flags & IN_ARENA or head.size == <size_t>size - sizeof(Head)

    cdef int loop(self, int64_t until, bint with_work, Head *head) noexcept nogil:
        # what happened, as a place in the list; PLACES: the time is over
        cdef pollfd fds[PLACES]
        cdef int64_t wait_ns
        cdef int count = PLACES if with_work else PLACES - 1
        cdef int ready
        self.list_all(fds)
        while True:
            self.list_outlets(fds)
            self.list_output(fds)
            wait_ns = self.patience(until)
            ready = poll_until(fds, count, wait_ns)
            if ready == 0 and wait_ns == IDLE_NS:
                self.look_after_memory()
            if ready > 0:
                self.serve(fds)
                if fds[<int>AT_END].revents:
                    self.drain(fds)
                    return AT_END
                if with_work and fds[<int>AT_WORK].revents:
                    if self.take_work(head):
                        return AT_WORK
                    if fds[<int>AT_WORK].revents & POLLHUP:
                        fds[<int>AT_WORK].fd = -1  # its end comes next
                if fds[<int>AT_WAKE].revents:
                    awake(self.channel.wake_fd)
                    if exchange32(&self.channel.called, 0):
                        return AT_WAKE
                    if not self.told_killed and self.is_ending():
                        self.told_killed = True
                        return AT_WAKE
            if 0 <= until <= now_ns():
                return PLACES

    cdef void list_all(self, pollfd *fds) noexcept nogil:
        cdef int i
        for i in range(PLACES):
            fds[i].events = POLLIN
            fds[i].revents = 0
        fds[<int>AT_WAKE].fd = self.channel.wake_fd
        fds[<int>AT_END].fd = self.channel.pid_fd
        fds[<int>AT_SIDE].fd = self.channel.side.fd
        fds[<int>AT_WORK].fd = self.channel.work

    cdef void list_outlets(self, pollfd *fds) noexcept nogil:
        cdef Channel *channel = self.channel
        lock(&channel.guard)  # threads that find a socket full put packets there
        fds[<int>AT_SIDE].events = POLLIN | (POLLOUT if channel.side.first != NULL else 0)
        # The loop reads it; where there is none, a worker that calls breaks the rules.
        fds[<int>AT_CALLS].fd = channel.calls.fd if channel.calls.first != NULL or channel.submission == NULL else -1
        unlock(&channel.guard)
        fds[<int>AT_CALLS].events = POLLOUT if channel.submission != NULL else POLLIN

    cdef bint is_ending(self) noexcept nogil:
        # whoever executes says so, and the loop
        cdef bint out
        lock(&self.channel.guard)
        out = self.channel.killed
        unlock(&self.channel.guard)
        return out

    cdef void list_output(self, pollfd *fds) noexcept nogil:
        # a worker that prints more than is read waits for the next second
        cdef int64_t now
        if self.printed:
            now = now_ns()
            if now - self.second_ns >= SECOND_NS:
                self.second_ns = now
                self.printed = 0
        fds[<int>AT_OUTPUT].fd = self.output if self.printed < OUTPUT_PER_SECOND else -1
        fds[<int>AT_ERRORS].fd = self.errors if self.printed < OUTPUT_PER_SECOND else -1

    cdef int64_t patience(self, int64_t until) noexcept nogil:
        # how long to sleep; -1: until something comes
        cdef int64_t out = IDLE_NS if load32(&self.channel.watching) else -1
        if self.printed >= OUTPUT_PER_SECOND:
            out = max(<int64_t>0, self.second_ns + SECOND_NS - now_ns())
        if until >= 0:
            until = max(<int64_t>0, until - now_ns())
            out = until if out < 0 else min(out, until)
        return out

    cdef void look_after_memory(self) noexcept nogil:
        # nothing has come for a while: what has not been used since the last look is given back
        cdef Channel *channel = self.channel
        cdef int64_t taken
        if not load32(&channel.watching):
            return
        taken = load64(&channel.arena.taken)
        if taken == self.taken:
            store32(&channel.watching, 0)
            arena_trim(channel.arena)
        self.taken = taken

    cdef void serve(self, pollfd *fds) noexcept nogil:
        if fds[<int>AT_SIDE].revents & POLLOUT:
            self.flush(&self.channel.side)
        if fds[<int>AT_CALLS].revents & POLLIN:
            channel_kill(self.channel)
        elif fds[<int>AT_CALLS].revents:
            self.flush(&self.channel.calls)
        if fds[<int>AT_SIDE].revents & (POLLIN | POLLHUP | POLLERR) and not self.take_side():
            fds[<int>AT_SIDE].fd = -1
        if fds[<int>AT_OUTPUT].revents and not self.take_output(self.output, 1):
            self.output = fds[<int>AT_OUTPUT].fd = -1
        if fds[<int>AT_ERRORS].revents and not self.take_output(self.errors, 2):
            self.errors = fds[<int>AT_ERRORS].fd = -1

    cdef void flush(self, Outlet *outlet) noexcept nogil:
        lock(&self.channel.guard)
        outlet_flush(outlet)
        unlock(&self.channel.guard)

    cdef void drain(self, pollfd *fds) noexcept nogil:
        # the worker has ended: what it said before
        fds[<int>AT_CALLS].fd = -1
        fds[<int>AT_WAKE].fd = -1
        fds[<int>AT_END].fd = -1
        fds[<int>AT_WORK].fd = -1
        fds[<int>AT_SIDE].events = POLLIN
        fds[<int>AT_OUTPUT].fd = self.output
        fds[<int>AT_ERRORS].fd = self.errors
        self.printed = 0
        while poll_until(fds, PLACES, 0) > 0:
            self.serve(fds)
            if self.printed >= MOST_LAST_WORDS:  # by what it has started and nothing could end
                fds[<int>AT_OUTPUT].fd = fds[<int>AT_ERRORS].fd = -1

    cdef bint take_side(self) noexcept nogil:
        # one packet; False: the worker has closed the socket
        cdef Head head
        cdef const uint8_t *packet = self.channel.side_packet
        cdef ssize_t size = packet_receive(self.channel.side.fd, self.channel.side_packet, PACKET, 0)
        if size <= 0:
            return False
        if load32(&self.channel.deaf):
            return True
        if size < <ssize_t>sizeof(Head):
            channel_break(self.channel, "sent a packet without a head")
            return True
        memcpy(&head, packet, sizeof(Head))
        if not head.flags & IN_ARENA and head.size != <size_t>size - sizeof(Head):
            channel_break(self.channel, "sent a packet that does not fit its head")
        elif not (side_take(self.channel, &head, packet + sizeof(Head))
                  or bls_take(self.channel, &head, packet + sizeof(Head))):
            if head.kind in (LOG, METRIC, CALL, HEALTH):
                with gil:
                    self.tell_packet(&head, packet + sizeof(Head))
            else:
                channel_break(self.channel, "sent a packet of an unknown kind")
        return True

    cdef bint take_output(self, int fd, int stream) noexcept nogil:
        # a piece of what the worker prints; False: it has closed the pipe
        cdef char piece[OUTPUT_PIECE]
        cdef ssize_t size = read(fd, piece, OUTPUT_PIECE)
        if size <= 0:
            return False
        if self.printed == 0:
            self.second_ns = now_ns()
        self.printed += size
        with gil:
            self.tell_output(stream, piece, size)
        return True

    cdef void tell_packet(self, const Head *head, const uint8_t *record) noexcept:
        cdef Block *block
        try:
            if head.flags & IN_ARENA:
                block = side_record(self.channel, head)
                if block == NULL:
                    return
                data = PyBytes_FromStringAndSize(<const char *>block.data, head.size)
                block_give(block)
            else:
                data = PyBytes_FromStringAndSize(<const char *>record, head.size)
            self.listener.on_packet(head.kind, head.flags, head.code, head.id, data)
        except NonsenseError:
            channel_break(self.channel, "sent a packet that cannot be read")
        except FloodError:
            channel_break(self.channel, "asks more at once than it may")
        except Exception:
            logger.exception("a packet of kind %d from a worker", head.kind)

    cdef void tell_output(self, int stream, const char *data, ssize_t size) noexcept:
        try:
            self.listener.on_output(stream, PyBytes_FromStringAndSize(data, size))
        except Exception:
            logger.exception("the output of a worker")
