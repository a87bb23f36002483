"""The server's end of the connection to the workers of one instance, as Python holds it."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset, strdup

from inferd._native.atomic cimport store32
from inferd._native.clock cimport now_ns
from inferd._native.memory.arena cimport ArenaHandle, arena_take
from inferd._native.memory.resource cimport Block, BlockView, block_give, block_view
from inferd._native.threads cimport lock, unlock
from inferd.backends.python._attend cimport AT_END, AT_WAKE, AT_WORK, WorkerWatch, watch_is_ending, watch_loop
from inferd.backends.python._bls cimport bls_abandon, bls_close, bls_open
from inferd.backends.python._channel cimport (
    Channel,
    Team,
    channel_connect,
    channel_end,
    channel_ended,
    channel_give,
    channel_leave,
    channel_life,
    channel_new,
    channel_nudge,
    channel_up,
    packet_send,
    side_send,
    team_give,
    team_new,
)
from inferd.backends.python._execute cimport make_executor, make_gate, make_remote, results_close, results_open
from inferd.backends.python._grants cimport granted_record, grants_end
from inferd.backends.python._life cimport WORKER_CLOSED, WORKER_NONE
from inferd.backends.python._slots cimport SLOT_GIVEN, SLOT_OPEN
from inferd.backends.python._wire cimport IN_ARENA, PACKET, Head


cdef bint given_up(Channel *channel) noexcept nogil:
    cdef bint out
    cdef uint32_t i
    lock(&channel.guard)
    out = channel.executing
    for i in range(channel.slots.count):
        if channel.slots.slots[i].state in (SLOT_GIVEN, SLOT_OPEN) and not channel.flags.data[i]:
            out = False
    unlock(&channel.guard)
    return out


cdef class TeamHandle:
    """The state that the workers of one model version share."""

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
    cdef WorkerWatch watch
    cdef BlockView held      # a record in the arena that the worker may be reading

    def __cinit__(self, ArenaHandle arena not None, str name not None, TeamHandle team not None, timeout_ns: int):
        cdef bytes encoded = name.encode()
        self.channel = channel_new(arena.arena, encoded, team.team, timeout_ns)
        if self.channel == NULL:
            raise MemoryError
        self.arena = arena
        self.watch.channel = self.channel
        self.watch.output = -1
        self.watch.errors = -1

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
        """For NativeInstance.remote. Call `allow_calls` before, which sets the bridge."""
        return make_remote(self.channel)

    @property
    def flags(self) -> int:
        """Offset in the arena of the flags that say which requests are cancelled."""
        return self.channel.flags.data - self.channel.arena.base

    @property
    def arena_fd(self) -> int:
        """The descriptor of the arena."""
        return self.channel.arena.fd

    @property
    def open(self) -> int:
        """Requests that the worker has."""
        return self.channel.slots.open

    @property
    def given_up(self) -> bool:
        """The worker executes something, and no client waits for any of its requests."""
        return given_up(self.channel)

    @property
    def life(self) -> int:
        """Number of the present worker, or of the last one; no two have the same."""
        return channel_life(self.channel)

    @property
    def overdue(self) -> bool:
        """The worker was ended because an execution took too long."""
        lock(&self.channel.guard)
        out = self.channel.overdue != 0
        unlock(&self.channel.guard)
        return out

    @property
    def ending(self) -> bool:
        """The worker is being ended."""
        return watch_is_ending(&self.watch)

    @property
    def fault(self) -> str:
        """The rule that the worker broke and was ended for; empty: none, or its execution took too long."""
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
                code, id, record)`, on the attendant's thread, until `ended`. on_packet may raise NonsenseError.
            work, side, calls: the worker's sockets. All descriptors remain the caller's.
            pid_fd: readable when it has ended.
            supervisor: the socket to its supervisor; -1: none.
            output, errors: the pipes of its standard output and standard error.
        """
        self.listener = listener
        self.watch.listener = <void *>listener
        self.watch.output = output
        self.watch.errors = errors
        self.watch.printed = 0
        self.watch.told_ending = False
        self.watch.steady = 0
        with nogil:
            channel_connect(self.channel, work, side, calls, pid_fd, supervisor)
            bls_open(self.channel)

    def up(self, maps_regions: bool = False) -> None:
        """The worker has loaded its model; `maps_regions`: it can map shared memory of clients itself."""
        cdef bint maps = maps_regions
        self.held = None
        with nogil:
            results_open(self.channel)
            channel_up(self.channel, maps)

    def ended(self, why: str, *, patient: bool = False, closed: bool = False) -> None:
        """The worker has ended, or could not be started; its requests fail with `why`.

        Args:
            why: for clients.
            patient: requests wait for the next one.
            closed: no other one will come.
        """
        cdef bytes encoded = why.encode("utf-8", "replace")
        cdef char *text = strdup(encoded)
        cdef bint waits = patient
        cdef bint last = closed
        self.watch.listener = NULL
        self.listener = None  # the listener refers to this object, too
        with nogil:
            bls_close(self.channel)
            channel_ended(self.channel, WORKER_CLOSED if last else WORKER_NONE, waits, text)
            results_close(self.channel)
            bls_abandon(self.channel)

    def allow_calls(self, entrance, str model not None) -> None:
        """Let the workers call other models. Call this once.

        Args:
            model: the name of the calling model.
            entrance: a capsule "inferd.submission" around the Submission that they go through; it outlives the workers.
        """
        cdef bytes encoded = model.encode()
        self.channel.model = strdup(encoded)
        if self.channel.model == NULL:
            raise MemoryError
        self.channel.submission = PyCapsule_GetPointer(entrance, "inferd.submission")

    # -- any thread

    def nudge(self) -> None:
        """Have `attend` return."""
        store32(&self.channel.called, 1)
        channel_nudge(self.channel)

    def leave(self) -> None:
        """Stop the instance from waiting for a worker that is not up."""
        channel_leave(self.channel)

    def end(self) -> None:
        """Have the worker ended at once."""
        channel_end(self.channel)

    # -- packets

    def send_work(self, kind: int, record: bytes = b"") -> None:
        """Send to the worker's main thread. Only while no EXECUTE can be in flight.

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
            life: of the worker that the packet is for, and no other; 0: the present worker.
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
            starting: also return packets of the work socket: no instance's thread reads it yet, or any more.
            seconds: at most.

        Returns:
            ("end", 0, 0, b""): the worker has ended, and all its packets have been processed; ("packet", kind, id,
            record); ("wake", ...): `nudge` was called, or the worker is being ended; ("time", ...): the time is over.
        """
        cdef int64_t until = -1 if seconds is None else now_ns() + <int64_t>(seconds * 1e9)
        cdef bint with_work = starting
        cdef int event
        cdef Head head
        with nogil:
            event = watch_loop(&self.watch, until, with_work, &head)
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
