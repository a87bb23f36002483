"""The books of lanes, read natively while no thread can go on: every counter beside its list, every limit
beside what it limits, and every wait beside its cause.

Nothing is locked and nothing is changed. The texts begin with what is wrong; empty: nothing is.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from inferd._native.caching.coalescer cimport Coalescer, Memo
from inferd._native.chain cimport Chain
from inferd._native.ensembles.ensemble cimport EnsembleLane
from inferd._native.ensembles.run cimport Ensemble, StepLimit
from inferd._native.execution.python_batch cimport Batch
from inferd._native.memory.common_pool cimport common_aside, common_pooled
from inferd._native.memory.host cimport host_trim
from inferd._native.memory.owned cimport owned_waits
from inferd._native.memory.resource cimport block_give, block_take
from inferd._native.request.bridge cimport Bridge
from inferd._native.request.lane cimport Lane, LaneHandle
from inferd._native.request.order cimport OrderEntry
from inferd._native.request.request cimport REQUEST_QUEUED, Request, request_alike, request_free, request_new
from inferd._native.scheduling.dispatcher cimport Line
from inferd._native.scheduling.levels cimport Level, Levels, level_at, level_of
from inferd._native.scheduling.policy cimport NEVER, BatchPlan, policy_plan
from inferd._native.scheduling.queue cimport Queue, QueueLane
from inferd._native.sequences.sequence cimport Sequence, Sequences
from inferd._native.sequences.sequencer cimport SequenceLane, Sequencer
from inferd._native.sequences.slots cimport InstanceSlots, Slots
from inferd._native.service.submission cimport Submission
from inferd._native.shares cimport Share
from inferd._native.transport.client cimport ClientUse
from inferd._native.transport.connection cimport Connection
from inferd._native.transport.endpoint cimport Endpoint
from inferd._native.transport.io cimport Socket
from inferd._native.transport.ledger cimport STAGES, Charge
from inferd._native.transport.message cimport Incoming
from inferd._native.transport.outgoing cimport Outgoing
from inferd._native.transport.stream cimport Conn, Stream, stream_ended, stream_unsent

cdef uint32_t FULL_CYCLE = 1 << 20
cdef uint32_t MORE_TENSORS = 1 << 10  # than a request may have that is kept for reuse


def free_kept(count: int) -> None:
    """Free what is kept for reuse: requests, of which there are at most so many, and blocks.

    The lists of free blocks of this thread stay, and are there afterwards.
    """
    cdef Request *request
    for _ in range(count):
        request = request_new()
        if request == NULL:
            return
        request.tensor_capacity = MORE_TENSORS
        request_free(request)
    block_give(block_take(1))
    host_trim()


def free_bytes() -> tuple[int, int]:
    """Bytes of free blocks that all threads share, and of those that are to be deleted."""
    return common_pooled(), common_aside()


def objects_wait() -> bool:
    """Whether the server still holds objects of Python whose memory has been written to sockets."""
    return owned_waits()


cdef class Gauge:
    """The limits of a lane. A queue limits the requests on each priority level, an ensemble the requests in it, and a
    lane with sequences its requests and the sequences that wait for a slot.

    Args:
        owner: of the lane; the functions below name it.
        limits: of requests on each level, the first being 1; 0: none.
        backlog: of sequences that wait for a slot; 0: none.
    """

    cdef LaneHandle handle
    cdef readonly object owner
    cdef tuple limits
    cdef int64_t backlog
    cdef bint had_idle  # an instance waited at the last look

    def __init__(self, LaneHandle handle not None, owner, limits: tuple[int, ...], backlog: int) -> None:
        self.handle = handle
        self.owner = owner
        self.limits = limits
        self.backlog = backlog


def reached(gauges: list[Gauge]) -> list[tuple[object, int, bool]]:
    """Which limits are reached now; to be called after every step.

    Returns:
        The owner; the level, 0 for the backlog of sequences; and whether all of a queue's requests came in this step,
        for an instance waited at it before, which takes what comes at the end of the step.
    """
    cdef Gauge gauge
    cdef list found = []
    for gauge in gauges:
        if isinstance(gauge.handle, QueueLane):
            _queue_reached(gauge, (<QueueLane>gauge.handle).queue(), found)
        elif isinstance(gauge.handle, SequenceLane):
            _sequences_reached(gauge, &(<SequenceLane>gauge.handle).sequencer().slots, found)
        elif 0 < <int64_t>gauge.limits[0] <= gauge.handle.lane.in_flight:
            found.append((gauge.owner, 1, False))
    return found


cdef int _queue_reached(Gauge gauge, const Queue *queue, list found) except -1:
    cdef const Levels *levels = &queue.levels
    cdef int64_t taken = queue.lane.in_flight if gauge.had_idle else 0  # when all had come
    cdef int64_t limit, count
    cdef uint32_t i
    gauge.had_idle = queue.line.idle_count > 0
    if levels.level_count != <uint32_t>len(gauge.limits):
        raise ValueError(f"a queue has {levels.level_count} levels, where {len(gauge.limits)} are configured")
    if taken or levels.count:
        for i in range(levels.level_count):
            limit = gauge.limits[i]
            count = levels.segments[2 * i].count + levels.segments[2 * i + 1].count
            if 0 < limit <= max(count, taken):
                found.append((gauge.owner, i + 1, taken > 0))
    return 0


cdef int _sequences_reached(Gauge gauge, const Slots *slots, list found) except -1:
    if 0 < <int64_t>gauge.limits[0] <= slots.waiting:
        found.append((gauge.owner, 1, False))
    if 0 < gauge.backlog <= slots.backlog.count:
        found.append((gauge.owner, 0, False))
    return 0


def with_pending(gauges: list[Gauge]) -> list[tuple[object, int]]:
    """The owners of lanes on which requests wait, and how many."""
    cdef Gauge gauge
    cdef uint32_t count
    cdef list found = []
    for gauge in gauges:
        count = gauge.handle.lane.scheduler.pending(gauge.handle.lane)
        if count:
            found.append((gauge.owner, count))
    return found


def oldest(LaneHandle handle) -> int:
    """When the first of the requests that wait in a queue came, in nanoseconds; 0: none waits."""
    cdef Request *request
    cdef int64_t found = 0
    if isinstance(handle, QueueLane):
        request = (<QueueLane>handle).queue().levels.first
        while request != NULL:
            found = request.queued_ns if found == 0 else min(found, request.queued_ns)
            request = request.next
    return found


def fits(LaneHandle handle, Batch batch not None) -> bool:
    """Whether the first request that waits would have had room in a batch that has just been taken from its queue."""
    cdef const Queue *queue
    cdef const Request *waiting
    if not isinstance(handle, QueueLane):
        return False
    queue = (<QueueLane>handle).queue()
    waiting = queue.levels.first
    return (waiting != NULL and queue.policy.batching
            and batch.batch.rows + <uint64_t>waiting.rows <= queue.policy.max_rows
            and (queue.policy.uniform or request_alike(batch.batch.requests[0], waiting)))


def shares(LaneHandle handle) -> list[tuple[int, int]]:
    """The client and the level of each request that waits in a queue."""
    cdef Request *request
    found = []
    if isinstance(handle, QueueLane):
        request = (<QueueLane>handle).queue().levels.first
        while request != NULL:
            found.append((request.origin.client, level_at(request) + 1))
            request = request.next
    return found


def audit(gauges: list[Gauge], now: int, grain: int, at_rest: bool) -> tuple[object, str] | None:
    """Check lanes, and return the owner of the first one that breaks a rule, and how; None: all keep the rules.

    Args:
        now: in nanoseconds.
        grain: by which timers may be late.
        at_rest: no thread can go on before time passes.
    """
    cdef Gauge gauge
    for gauge in gauges:
        problem = _audit(gauge.handle, now, grain, at_rest)
        if problem:
            return gauge.owner, problem
    return None


cdef str _audit(LaneHandle handle, int64_t now, int64_t grain, bint at_rest):
    if isinstance(handle, QueueLane):
        return _audit_queue((<QueueLane>handle).queue(), now, grain, at_rest)
    if isinstance(handle, SequenceLane):
        return _audit_sequences((<SequenceLane>handle).sequencer(), now, grain, at_rest)
    if isinstance(handle, EnsembleLane):
        return _audit_ensemble((<EnsembleLane>handle).ensemble())
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Connections

def responses_wait(Endpoint endpoint not None) -> bool:
    """Whether somebody has handed over responses or callbacks that no I/O thread has taken yet."""
    cdef Bridge *bridge = <Bridge *>endpoint.host.bridge
    return bridge != NULL and (bridge.head != NULL or bridge.first_callback != NULL)


def exposed(Connection connection not None) -> str:
    """Where its end is most dangerous: "in a call" of its thread to the system, "next" in the round in which its thread
    writes, or in the list of those "to write" in another one."""
    cdef Conn *conn = connection.conn.writer.now if connection.conn.writer != NULL else NULL
    if connection.conn.in_syscall:
        return "in a call"
    while conn != NULL and conn != &connection.conn:
        conn = conn.next_dirty
    if conn != NULL:
        return "next"
    return "to write" if connection.conn.dirty else ""


def audit_connections(Endpoint endpoint not None, uses: list[ClientUse]) -> str:
    """What is wrong with the connections of an endpoint, and with these clients: each holds what its calls hold."""
    cdef Conn *conn = endpoint.host.connections.first
    cdef uint32_t count = 0
    cdef size_t total = 0
    cdef ClientUse use
    calls: dict[int, int] = {}
    streams: dict[int, int] = {}
    held: dict[int, int] = {}
    while conn != NULL:
        count += 1
        if problem := _audit_connection(conn):
            return problem
        total += conn.account.total
        if conn.client != NULL:
            calls[conn.client.number] = calls.get(conn.client.number, 0) + conn.streams
            streams[conn.client.number] = streams.get(conn.client.number, 0) + _lasting(conn)
            held[conn.client.number] = held.get(conn.client.number, 0) + conn.account.total
        conn = conn.next
    if count != endpoint.host.connection_count:
        return f"{endpoint.host.connection_count} connections are counted, and there are {count}"
    if endpoint.host.thread_pool != NULL:
        total += endpoint.host.thread_pool.departed.total
    if total != endpoint.host.account.total:
        return f"{endpoint.host.account.total} bytes are held, and connections hold {total}"
    for use in uses:
        asked, lasting = calls.get(use.client.number, 0), streams.get(use.client.number, 0)
        if use.client.calls != asked or use.client.streams != lasting:
            counted = f"{use.client.calls} calls, {use.client.streams} of them streams"
            return f"{use.name} counts {counted}, and makes {asked}, {lasting} of them streams"
        if use.client.account.total != held.get(use.client.number, 0):
            return f"{use.name} has {use.client.account.total} bytes, and its connections {held}"
    return ""


cdef uint32_t _lasting(const Conn *conn):
    cdef const Stream *stream = conn.open.first
    cdef uint32_t count = 0
    while stream != NULL:
        count += stream.lasting
        stream = stream.next
    return count


cdef str _audit_connection(Conn *conn):
    cdef Stream *stream = conn.open.first
    cdef Stream *previous = NULL
    cdef size_t[<int>STAGES] held
    cdef size_t unsent = 0
    cdef size_t shut = 0
    cdef uint32_t count = 0
    cdef bint in_pool = False
    cdef int i
    memset(held, 0, sizeof(held))
    add_charge(held, &conn.framed)
    while stream != NULL:
        if stream.previous != previous or stream.conn != conn:
            return "a call does not know its connection, or the call before it"
        if problem := _audit_stream(stream, held):
            return f"call {stream.id} of a connection: {problem}"
        in_pool = in_pool or stream.inflating != NULL or stream.sender.deflating != NULL
        unsent += stream_unsent(stream)
        shut += stream.sender.unsent if stream.sender.shut else 0
        count += 1
        previous = stream
        stream = stream.next
    if conn.socket != NULL and (<Socket *>conn.socket).dropped and not conn.in_syscall:
        return "a connection that was to go when its thread came back to the front has stayed"
    if not has_output(conn.writer.first) or not has_output(conn.writer.now):
        return "a connection that is gone, or has nothing to write, is among those that have"
    if count != conn.streams:
        return f"a connection counts {conn.streams} calls, and has {count}"
    if (unsent, shut) != (conn.unsent, conn.shut):
        return f"a connection counts {conn.unsent} unsent bytes, {conn.shut} held back, and has {unsent} and {shut}"
    for i in range(<int>STAGES):
        # what the thread pool has at this moment is in no list
        if conn.account.bytes[i] < held[i] or (conn.account.bytes[i] > held[i] and not in_pool):
            return f"a connection is charged for {conn.account.bytes[i]} bytes at stage {i}, and has {held[i]}"
    return ""


cdef bint has_output(const Conn *conn) noexcept:
    while conn != NULL and conn.session != NULL and conn.dirty:
        conn = conn.next_dirty
    return conn == NULL


cdef void add_charge(size_t *held, const Charge *charge) noexcept:
    if charge.account != NULL:
        held[<int>charge.stage] += charge.bytes


cdef size_t add_incoming(size_t *held, const Chain *messages) noexcept:
    cdef Incoming *message = <Incoming *>messages.first
    cdef size_t bytes = 0
    while message != NULL:
        add_charge(held, &message.charge)
        bytes += message.charge.bytes
        message = <Incoming *>message.link.next
    return bytes


cdef size_t add_outgoing(size_t *held, const Chain *messages) noexcept:
    cdef Outgoing *message = <Outgoing *>messages.first
    cdef size_t left = 0
    while message != NULL:
        add_charge(held, &message.charge)
        left += message.left
        message = <Outgoing *>message.link.next
    return left


cdef str _audit_stream(const Stream *stream, size_t *held):
    cdef size_t queued = add_incoming(held, &stream.incoming) + add_incoming(held, &stream.compressed)
    cdef size_t plain = add_outgoing(held, &stream.sender.uncompressed)
    cdef size_t unsent = add_outgoing(held, &stream.sender.outgoing)
    add_charge(held, &stream.receiver.charge)
    add_charge(held, &stream.with_handler)
    if stream.queued < queued or (stream.queued > queued and stream.inflating == NULL):
        return f"{stream.queued} bytes of its messages are said to wait, and {queued} do"
    if stream.sender.plain < plain or (stream.sender.plain > plain and stream.sender.deflating == NULL):
        return f"{stream.sender.plain} bytes are said to wait until they are compressed, and {plain} do"
    if stream.sender.unsent != unsent:
        return f"{stream.sender.unsent} bytes are said to be unsent, and {unsent} are"
    if stream.withheld and queued == 0 and stream.inflating == NULL and not stream_ended(stream):
        return f"the peer has no credit for {stream.withheld} bytes, and nothing of it waits"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Queues

cdef str _audit_queue(Queue *queue, int64_t now, int64_t grain, bint at_rest):
    cdef Levels *levels = &queue.levels
    cdef Request *request = levels.first
    cdef Request *previous = NULL
    cdef uint64_t rows = 0
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef Level *level
    found = [0] * (2 * levels.level_count)
    splits = queue.lane.signature.splits  # the further parts of a request go in with the first, however many they are
    held: dict[tuple[int, int], int] = {}
    while request != NULL:
        if request.previous != previous:
            return f"request {count} of a queue does not know the one before it"
        if request.state != REQUEST_QUEUED:
            return f"a request in a queue is in state {<int>request.state}"
        if request.place >= 2 * levels.level_count or (previous != NULL and request.place < previous.place):
            return f"a request at place {request.place} is behind others of later places"
        # One that serves several may have found its level full. Its place is that of the best of them, and that one may
        # have come later.
        if level_at(request) != level_of(levels, request.terms.priority) and not request.shared:
            return f"a request of priority {request.terms.priority} waits at level {level_at(request) + 1}"
        in_time = request.place % 2 == 0
        if (in_time and previous != NULL and previous.place == request.place and previous.queued_ns > request.queued_ns
                and not (previous.shared or request.shared)):
            return f"a request of {request.queued_ns} ns waits behind one of {previous.queued_ns} ns"
        if not in_time and not request.shared and (
                request.expires_ns == 0 or request.expires_ns > now or not request.yields):
            return f"a request waits behind those in time, and may wait until {request.expires_ns} ns"
        if at_rest and in_time and request.expires_ns and now > request.expires_ns + grain:
            return f"a request waits, and might do so until {(now - request.expires_ns) // 1000} us ago"
        if at_rest and request.terms.deadline_ns and now > request.terms.deadline_ns + grain:
            return f"a request waits, and its deadline was {(now - request.terms.deadline_ns) // 1000} us ago"
        found[request.place] += 1
        key = (request.origin.client, level_at(request))
        held[key] = held.get(key, 0) + 1
        rows += request.rows
        count += 1
        if count == FULL_CYCLE:
            return "a queue goes round in a circle"
        previous = request
        request = request.next
        if request == NULL or request.place != previous.place:
            if levels.segments[previous.place].last != previous:
                return f"segment {previous.place} of a queue does not know its last request"
    if count != levels.count or rows != levels.rows:
        return f"a queue counts {levels.count} requests of {levels.rows} rows, and has {count} of {rows}"
    for i in range(2 * levels.level_count):
        if found[i] != levels.segments[i].count:
            return f"segment {i} of a queue counts {levels.segments[i].count} requests, and has {found[i]}"
    for i in range(levels.level_count):
        level = &levels.levels[i]
        if level.max_size and found[2 * i] + found[2 * i + 1] > level.max_size and not splits:
            return f"{found[2 * i] + found[2 * i + 1]} requests of priority {i + 1} wait, and {level.max_size} may"
    if queue.lane.max_queue and count > queue.lane.max_queue and not splits:
        return f"{count} requests wait, and {queue.lane.max_queue} may"
    if <int64_t>queue.lane.in_flight < <int64_t>count:
        return f"{queue.lane.in_flight} requests are counted on a lane where {count} wait"
    return _audit_shares(queue, held) or _audit_order(&queue.lane) or (_audit_line(queue, now) if at_rest else "")


cdef str _audit_shares(Queue *queue, dict held):
    cdef const Share *share
    cdef uint32_t i
    told = {}
    if queue.shares.buckets == NULL:
        return ""
    for i in range(queue.shares.capacity):
        share = queue.shares.buckets[i]
        while share != NULL:
            told[share.client, share.level] = share.count
            if share.count > queue.shares.bound:
                return f"a share of {share.count} requests, where none is said to exceed {queue.shares.bound}"
            share = share.following
    return f"shares of a queue are {told}, and its requests {held}" if told != held else ""


cdef str _audit_order(Lane *lane):
    cdef OrderEntry *entry
    cdef OrderEntry *previous = NULL
    cdef uint32_t count = 0
    if lane.order == NULL:
        return ""
    entry = lane.order.first
    while entry != NULL:
        if entry.previous != previous or entry.order != lane.order:
            return "the order of answers has lost an entry"
        if previous == NULL and entry.first != NULL and not lane.order.posted:
            return "the first answer of all that are to leave in order waits, and nobody sends it"
        count += 1
        previous = entry
        entry = entry.next
    if lane.order.last != previous:
        return "the order of answers does not know its last entry"
    if <int64_t>count > <int64_t>lane.in_flight:
        return f"{count} answers are to leave in order, and {lane.in_flight} requests are under way"
    return ""


cdef str _audit_line(Queue *queue, int64_t now):
    # no instance is idle beside a batch
    cdef BatchPlan plan
    cdef Line *line = &queue.line
    if line.idle_count == 0 or queue.levels.count == 0 or queue.held or line.lacking or queue.closed:
        return ""
    if queue.policy.adaptive:  # what is estimated changes while nobody looks
        return ""
    policy_plan(&queue.policy, &queue.predictor, queue.levels.first, now, &plan)
    if plan.count:
        return f"{line.idle_count} instances are idle, and {plan.count} requests are a batch"
    if line.watched_ns > plan.wake_ns and plan.end_ns == NEVER:  # the time that an execution takes is estimated, too
        return f"instances wait until {line.watched_ns} ns, and there is a batch at {plan.wake_ns} ns"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Sequences

cdef str _audit_sequence(Slots *slots, Sequence *sequence, int64_t instance, int64_t slot):
    cdef Request *request = sequence.queue.first
    cdef Request *previous = NULL
    cdef uint32_t count = 0
    if sequence.slot != slot or (slot >= 0 and sequence.instance != instance):
        return f"a sequence in slot {slot} takes itself to be in slot {sequence.slot} of instance {sequence.instance}"
    while request != NULL:
        if request.previous != previous or request.sequenced.sequence != sequence:
            return "a request of a sequence does not know it, or the one before"
        if request.state != REQUEST_QUEUED:
            return f"a request that waits in a sequence is in state {<int>request.state}"
        count += 1
        previous = request
        request = request.next
    if sequence.queue.last != previous or count != sequence.waiting:
        return f"a sequence counts {sequence.waiting} requests, and has {count}"
    if sequence.list == &slots.idle and (count or sequence.running != NULL or slot < 0):
        return f"an idle sequence has {count} requests"
    if slot >= 0 and sequence.list == NULL and sequence.running == NULL and not slots.direct:
        return f"a sequence with {count} requests is neither idle nor ready nor executed"
    return ""


cdef str _audit_list(Sequences *sequences_, str name):
    cdef Sequence *sequence = sequences_.first
    cdef Sequence *previous = NULL
    cdef uint32_t count = 0
    while sequence != NULL:
        if sequence.list != sequences_ or sequence.previous != previous:
            return f"a sequence does not know that it is in the list of {name} ones"
        if previous != NULL and previous.since_ns > sequence.since_ns:
            return f"the list of {name} sequences is out of order"
        count += 1
        previous = sequence
        sequence = sequence.next
    if sequences_.last != previous or sequences_.count != count:
        return f"{sequences_.count} {name} sequences are counted, and there are {count}"
    return ""


cdef str _audit_sequences(Sequencer *self, int64_t now, int64_t grain, bint at_rest):
    cdef Slots *slots = &self.slots
    cdef InstanceSlots *slot_set
    cdef Sequence *sequence
    cdef uint32_t i, k
    cdef uint32_t placed = 0
    cdef uint32_t listed = 0
    cdef uint32_t free_slots = 0
    cdef uint32_t waiting = 0
    cdef uint32_t in_set
    cdef uint64_t ready_rows
    cdef int64_t late
    for i in range(slots.slot_set_count):
        slot_set = slots.slot_sets[i]
        in_set = 0
        for k in range(slots.per_instance):
            sequence = slot_set.slots[k]
            if sequence == NULL:
                free_slots += 1
                continue
            if problem := _audit_sequence(slots, sequence, i, k):
                return problem
            placed += 1
            listed += sequence.listed
            in_set += sequence.waiting
        if in_set != slot_set.waiting:
            return f"an instance counts {slot_set.waiting} requests of its sequences, and there are {in_set}"
        waiting += in_set
        ready_rows = 0
        sequence = slot_set.ready.first
        while sequence != NULL:
            if sequence.queue.first == NULL:
                return "a sequence without requests is ready"
            ready_rows += sequence.queue.first.rows
            sequence = sequence.next
        if ready_rows != slot_set.ready_rows:
            return f"{slot_set.ready_rows} rows are said to be ready, and {ready_rows} are"
        if problem := _audit_list(&slot_set.ready, "ready"):
            return problem
        if at_rest:
            if problem := _audit_slots(self, i, now, grain):
                return problem
    in_set = 0
    sequence = slots.backlog.first
    while sequence != NULL:
        if problem := _audit_sequence(slots, sequence, -1, -1):
            return problem
        in_set += sequence.waiting
        listed += sequence.listed
        sequence = sequence.next
    if in_set != slots.backlog_waiting or waiting + in_set != slots.waiting:
        return f"{slots.waiting} requests wait, {slots.backlog_waiting} for slots; there are {waiting} and {in_set}"
    if problem := _audit_list(&slots.backlog, "waiting") or _audit_list(&slots.idle, "idle"):
        return problem
    # the slot of a direct sequence is free when its last request is executed
    is_known = placed + slots.backlog.count == slots.live or (
        slots.direct and placed + slots.backlog.count < slots.live and <int64_t>self.lane.in_flight > slots.waiting)
    if not is_known or listed > slots.table.count or (not slots.direct and listed != slots.table.count):
        return f"{slots.live} sequences live, {slots.table.count} are listed; there are {placed} and {listed}"
    if free_slots != slots.vacant_count:
        return f"{slots.vacant_count} slots are said to be free, and {free_slots} are"
    if slots.backlog.count and free_slots:
        return f"{slots.backlog.count} sequences wait for slots, and {free_slots} are free"
    if slots.max_backlog and slots.backlog.count > slots.max_backlog:
        return f"{slots.backlog.count} sequences wait for slots, and {slots.max_backlog} may"
    late = slots.idle_ns + 2 * grain
    if at_rest and slots.idle.first != NULL and not slots.closed and now > slots.idle.first.since_ns + late:
        return f"a sequence is idle for {(now - slots.idle.first.since_ns) // 1000} us, and lives"
    if <int64_t>self.lane.in_flight < <int64_t>slots.waiting:
        return f"{self.lane.in_flight} requests are counted on a lane where {slots.waiting} wait"
    return ""


cdef str _audit_slots(Sequencer *self, uint32_t instance, int64_t now, int64_t grain):
    # an idle instance has nothing to do
    cdef Slots *slots = &self.slots
    cdef InstanceSlots *slot_set = slots.slot_sets[instance]
    cdef Line *line = self.lines[instance]
    cdef Sequence *sequence
    cdef int64_t since = now
    cdef uint32_t k
    if line.idle_count == 0 or line.lacking or slots.closed or slots.hold:
        return ""
    for k in range(slots.per_instance):
        sequence = slot_set.slots[k]
        if sequence != NULL and sequence.queue.first != NULL and sequence.running == NULL:
            since = min(since, max(sequence.queue.first.queued_ns, sequence.since_ns))
    if now > since + slots.policy.delay_ns + grain:
        return f"an instance is idle, and a sequence of it has had a request for {(now - since) // 1000} us"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Answers that are shared and kept

def audit_memos(entrance) -> str:
    """What is wrong with the requests that share executions, and with the cache; nobody is in the front."""
    cdef Submission *submission = <Submission *>PyCapsule_GetPointer(entrance, "inferd.submission")
    cdef const Coalescer *coalescer = &submission.coalescer
    cdef const Memo *memo = coalescer.kept.first
    cdef uint64_t entries = 0
    cdef uint32_t count = 0
    cdef uint32_t i
    cdef size_t size = 0
    while memo != NULL:
        entries += 1
        size += memo.size
        if not memo.answered or memo.count or memo.size > coalescer.largest:
            return f"an answer of {memo.size} bytes is kept, and {memo.count} requests wait for it"
        if memo.size < _tensor_bytes(memo.work):
            return f"an answer of {_tensor_bytes(memo.work)} bytes is kept, and {memo.size} are counted"
        if problem := _audit_kept(memo.work):
            return problem
        memo = memo.next
    if entries != coalescer.entries or size != coalescer.size or size > coalescer.limit:
        return f"{coalescer.entries} answers of {coalescer.size} bytes are said to be kept, and {entries} of {size} are"
    for i in range(coalescer.bucket_count):
        memo = coalescer.buckets[i]
        while memo != NULL:
            count += 1
            entries -= memo.answered
            if problem := _audit_waiting(memo):
                return problem
            memo = memo.in_bucket
    if count != coalescer.count or entries:
        return f"{coalescer.count} keys are counted, and {count} are there; {entries} answers have none"
    return ""


cdef size_t _tensor_bytes(const Request *work):
    cdef size_t size = sizeof(Request)
    cdef uint32_t i
    for i in range(work.signature.output_count):
        size += work.response.outputs[i].size if work.response.outputs[i].block != NULL else 0
    return size


cdef str _audit_kept(const Request *work):
    # in memory of its own, and nothing else stays for it
    cdef uint32_t i
    for i in range(work.signature.output_count):
        if work.response.outputs[i].block != NULL and work.response.outputs[i].block != work.block:
            return "an answer is kept in the memory that its execution had"
    for i in range(work.signature.input_count):
        if work.inputs[i].block != NULL and work.inputs[i].block != work.block:
            return "an answer is kept with the memory of its request"
        if work.inputs[i].block != NULL and not work.inputs[i].present:
            return "an answer is kept with memory for an input that its request did not have"
    if work.response.parameter_block != NULL and work.response.parameter_block != work.block:
        return "an answer is kept with the memory of its parameters"
    return ""


cdef str _audit_waiting(const Memo *memo):
    cdef const Request *request = memo.waiting.first
    cdef const Request *previous = NULL
    cdef uint32_t count = 0
    while request != NULL:
        if request.previous != previous:
            return "a request that waits for another's answer does not know the one before it"
        count += 1
        previous = request
        request = request.next
    if count != memo.count or memo.late > count:
        return f"{memo.count} requests, {memo.late} of them late, are said to wait for an answer, and {count} do"
    is_settled = not (memo.answered or memo.asking or memo.taken or memo.stale or memo.delivering)
    if is_settled and memo.count and memo.work.state == REQUEST_QUEUED:
        return _audit_terms(memo)
    return ""


cdef str _audit_terms(const Memo *memo):
    # Requests that share work give it the latest of their deadlines and the first of their levels.
    cdef const Request *request = memo.waiting.first
    cdef const Lane *lane = <const Lane *>memo.work.lane
    deadlines = []
    places = []
    while request != NULL:
        deadlines.append(request.terms.deadline_ns)
        places.append(_level_on(lane, request.terms.priority))
        request = request.next
    latest = max(deadlines) if all(deadlines) else 0
    if memo.work.terms.deadline_ns != latest:
        return f"requests with deadlines at {deadlines} share one with a deadline at {memo.work.terms.deadline_ns}"
    if lane.level_count and _level_on(lane, memo.work.terms.priority) != min(places):
        return f"requests of levels {places} share one of priority {memo.work.terms.priority}"
    return ""


cdef uint64_t _level_on(const Lane *lane, uint64_t priority):
    return priority if 1 <= priority <= lane.level_count else lane.default_level


# ---------------------------------------------------------------------------------------------------------------------
# Ensembles

cdef str _audit_ensemble(Ensemble *ensemble):
    cdef StepLimit *limit
    cdef uint32_t i
    if ensemble.lane.max_queue and ensemble.requests > ensemble.lane.max_queue:
        return f"{ensemble.requests} requests are in an ensemble, and {ensemble.lane.max_queue} may"
    if <int64_t>ensemble.lane.in_flight < <int64_t>ensemble.requests:
        return f"{ensemble.lane.in_flight} requests are counted on a lane with {ensemble.requests} in its ensemble"
    if ensemble.max_inflight == 0:
        return ""
    for i in range(ensemble.plan.step_count):
        limit = &ensemble.step_limits[i]
        if limit.running > ensemble.max_inflight:
            return f"step {i} has {limit.running} requests under way, and {ensemble.max_inflight} may"
        if limit.first != NULL and limit.running < ensemble.max_inflight:
            return f"requests wait for step {i}, which has {limit.running} of {ensemble.max_inflight} under way"
    return ""
