"""The server's end of the connection to one worker.

Three threads meet here. The *instance's* thread, or the front in its place, sends EXECUTE and waits for DONE on the
work socket. The *attendant's* thread starts the worker, reads the side socket and ends the worker (`_life`). The
*front* reads the socket of calls, and sends what concerns BLS calls and cancellations. `guard` protects what they
share; no one holds it while waiting for the worker, so a worker that is stopped or hangs blocks only the thread that
waits for its batch.

A request that is given to the worker has a slot (`_slots`), and memory that the worker may use is a loan (`_loans`):
both define what the worker may do. A worker that breaks a rule is ended, and nothing more is read from it.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strdup

from inferd._native.atomic cimport fetch_add32, load32, store32, store64
from inferd._native.clock cimport now_ns
from inferd._native.memory.arena cimport Arena, arena_give, arena_share, arena_take
from inferd._native.memory.resource cimport Block, block_give
from inferd._native.memory.shm cimport region_unwatch
from inferd._native.refusal cimport REFUSAL_WORKER_DIED
from inferd._native.request.accounting cimport account_detached, account_failed
from inferd._native.request.bridge cimport Bridge, bridge_return
from inferd._native.assertion cimport CHECKED
from inferd._native.request.request cimport Request, request_refuse, request_unfollow
from inferd._native.request.statistics cimport FAILURE_BACKEND
from inferd._native.status cimport STATUS_OK
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.threads cimport (
    condition_destroy,
    condition_init,
    lock,
    mutex_destroy,
    mutex_init,
    notify_all,
    unlock,
    wait,
    wait_until,
)
from inferd.backends.python._life cimport (
    WORKER_CLOSED,
    WORKER_ENDING,
    WORKER_STARTING,
    WORKER_UP,
    WorkerState,
    check_worker_move,
)
from inferd.backends.python._loans cimport (
    Kept,
    execution_forget,
    kept_give,
    loans_free,
    loan_end_last,
)
from inferd.backends.python._slots cimport SLOT_OPEN, WINDOW, Slot, slot_credit, slot_find, slot_give, slot_return
from inferd.backends.python._wire cimport CREDIT, FORGET, PACKET, SLOT_MASK, SLOTS, Head

cdef extern from "sys/socket.h" nogil:
    int shutdown(int fd, int how)
    enum:
        SHUT_RDWR
        SHUT_WR

cdef extern from "unistd.h" nogil:
    int close(int fd)

cdef enum:
    SIBLINGS_NS = 50 * 1000 * 1000   # how often a broken instance looks whether another one is up
    MOST_WAITING = 256 << 20  # bytes that may wait until the worker reads them, for each socket
    MOST_PARCELS = 1 << 17  # packets that may wait, for each socket

cdef const char *OUT_OF_MEMORY = "sent a packet for which the server had no memory"
cdef const char *DEAF = "does not read what it is sent"


# ---------------------------------------------------------------------------------------------------------------------
# Life

cdef Team *team_new() noexcept nogil:
    cdef Team *team = <Team *>calloc(1, sizeof(Team))
    if team != NULL:
        team.references = 1
    return team


cdef void team_give(Team *team) noexcept nogil:
    if team != NULL and fetch_add32(&team.references, -1) == 1:
        free(team)


cdef Channel *channel_new(Arena *arena, const char *name, Team *team, int64_t timeout_ns) noexcept nogil:
    cdef Channel *channel = <Channel *>calloc(1, sizeof(Channel))
    cdef int i
    if channel == NULL:
        return NULL
    channel.name = strdup(name)
    channel.why = strdup("its worker is not running yet")
    channel.packet = <uint8_t *>malloc(PACKET)
    channel.side_packet = <uint8_t *>malloc(PACKET)
    channel.calls_packet = <uint8_t *>malloc(PACKET)
    channel.wake_fd = make_wake_fd()
    channel.flags = arena_take(arena, SLOTS)
    if (channel.name == NULL or channel.packet == NULL or channel.side_packet == NULL or channel.wake_fd < 0
            or channel.calls_packet == NULL or channel.flags == NULL):
        block_give(channel.flags)
        if channel.wake_fd >= 0:
            close(channel.wake_fd)
        free(channel.name)
        free(channel.why)
        free(channel.packet)
        free(channel.side_packet)
        free(channel.calls_packet)
        free(channel)
        return NULL
    channel.arena = arena_share(arena)
    fetch_add32(&team.references, 1)
    channel.team = team
    channel.references = 1
    channel.timeout_ns = timeout_ns
    channel.work = -1
    channel.side.fd = -1
    channel.calls.fd = -1
    channel.descriptor.fd = -1
    channel.results.fd = -1
    channel.pid_fd = -1
    channel.supervisor = -1
    channel.patient = True
    for i in range(KEPT_REGIONS):
        channel.regions[i].closed = region_closed
        channel.regions[i].owner = channel
    fetch_add32(&team.hopeful, 1)
    mutex_init(&channel.guard, NULL)
    condition_init(&channel.changed)
    return channel


cdef Channel *channel_share(Channel *channel) noexcept nogil:
    fetch_add32(&channel.references, 1)
    return channel


cdef void channel_give(Channel *channel) noexcept nogil:
    if channel == NULL or fetch_add32(&channel.references, -1) != 1:
        return
    free(channel.slots.slots)
    free(channel.parting)
    loans_free(&channel.loans)
    free(channel.numbers)
    free(channel.why)
    free(channel.name)
    free(channel.model)
    free(channel.packet)
    free(channel.side_packet)
    free(channel.calls_packet)
    close(channel.wake_fd)
    condition_destroy(&channel.changed)
    mutex_destroy(&channel.guard)
    block_give(channel.flags)
    arena_give(channel.arena)
    team_give(channel.team)
    free(channel)


cdef void channel_connect(Channel *channel, int work, int side, int calls, int pid_fd, int supervisor) noexcept nogil:
    lock(&channel.guard)
    channel.work = work
    channel.side.fd = side
    channel.calls.fd = calls
    channel.pid_fd = pid_fd
    channel.supervisor = supervisor
    channel.overdue = False
    channel.fault = NULL
    store64(&channel.life, channel.life + 1)
    store32(&channel.deaf, 0)
    move(channel, WORKER_STARTING, channel.patient)
    unlock(&channel.guard)


cdef void move(Channel *channel, WorkerState after, bint patient) noexcept nogil:
    # under the guard
    if CHECKED:
        check_worker_move(channel.state, after)
    fetch_add32(&channel.team.hopeful, <int>patient - <int>channel.patient)
    channel.state = after
    channel.patient = patient
    notify_all(&channel.changed)


cdef void channel_up(Channel *channel, bint maps_regions) noexcept nogil:
    lock(&channel.guard)
    channel.maps_regions = maps_regions
    if channel.state == WORKER_STARTING:  # otherwise the worker is being ended already
        move(channel, WORKER_UP, True)
    unlock(&channel.guard)


cdef void channel_ended(Channel *channel, WorkerState state, bint patient, char *why) noexcept nogil:
    cdef uint32_t i
    cdef Slot slot
    lock(&channel.guard)
    free(channel.why)
    channel.why = why
    if channel.work >= 0:
        shutdown(channel.work, SHUT_RDWR)
    move(channel, state, patient)
    while channel.executing:
        wait(&channel.changed, &channel.guard)
    channel.work = -1
    channel.side.fd = -1
    channel.calls.fd = -1
    channel.pid_fd = -1
    channel.supervisor = -1
    drop_parcels(&channel.side)
    drop_parcels(&channel.calls)
    for i in range(channel.slots.count):
        slot = channel.slots.slots[i]
        if slot.state != SLOT_OPEN:
            continue
        channel_refuse(channel, slot.request, True)
        unlock(&channel.guard)
        finish_detached(channel, slot.request, slot.taken_ns)
        lock(&channel.guard)
    unlock(&channel.guard)
    region_unwatch(channel.regions, KEPT_REGIONS)
    end_loans(channel)


cdef void channel_refuse(Channel *channel, Request *request, bint was_sent) noexcept nogil:
    cdef const char *next_worker = ""
    if not was_sent and not channel.patient and channel.state != WORKER_CLOSED:
        next_worker = "; the worker is restarting, and no worker has received this request"
    request_refuse(request, REFUSAL_WORKER_DIED, format_text(
        "Failed to process the request(s) for model '%s', message: %s%s", channel.name,
        text_or_no_memory(channel.why), next_worker))


cdef void region_closed(void *owner, uint64_t number) noexcept nogil:
    # The socket has room for KEPT_REGIONS of these packets and an EXECUTE; if it is full, the worker does not read.
    cdef Channel *channel = <Channel *>owner
    cdef Head head
    memset(&head, 0, sizeof(Head))
    head.kind = FORGET
    head.id = number
    lock(&channel.guard)
    if channel.work >= 0 and packet_send(channel.work, &head, sizeof(Head), NULL, 0, MSG_DONTWAIT) == 1:
        end_now(channel, DEAF)
    unlock(&channel.guard)


cdef void end_loans(Channel *channel) noexcept nogil:
    # the worker has ended
    cdef Block *block = NULL
    cdef Kept *kept = NULL
    while True:
        lock(&channel.guard)
        kept = execution_forget(&channel.loans)
        block = loan_end_last(&channel.loans)
        unlock(&channel.guard)
        if kept == NULL and block == NULL:
            return
        kept_give(kept)
        block_give(block)


cdef bint channel_await(Channel *channel) noexcept nogil:
    cdef bint up
    lock(&channel.guard)
    while True:
        up = channel.state == WORKER_UP
        if up or channel.leaving or channel.state == WORKER_CLOSED:
            break
        if channel.patient:
            wait(&channel.changed, &channel.guard)
        elif load32(&channel.team.hopeful):
            # another instance executes, or soon will: this one must not take requests from it only to refuse them
            wait_until(&channel.changed, &channel.guard, now_ns() + SIBLINGS_NS)
        else:
            break
    unlock(&channel.guard)
    return up


cdef void channel_leave(Channel *channel) noexcept nogil:
    lock(&channel.guard)
    channel.leaving = True
    unlock(&channel.guard)
    notify_all(&channel.changed)


cdef void channel_nudge(Channel *channel) noexcept nogil:
    wake(channel.wake_fd)


cdef void channel_break(Channel *channel, const char *rule) noexcept nogil:
    end_for(channel, rule)


cdef void channel_exhausted(Channel *channel) noexcept nogil:
    end_for(channel, OUT_OF_MEMORY)


cdef void channel_end(Channel *channel) noexcept nogil:
    end_for(channel, NULL)


cdef void end_for(Channel *channel, const char *fault) noexcept nogil:
    lock(&channel.guard)
    end_now(channel, fault)
    unlock(&channel.guard)


cdef void end_now(Channel *channel, const char *fault) noexcept nogil:
    # under the guard
    if fault != NULL:
        store32(&channel.deaf, 1)
        if channel.fault == NULL:
            channel.fault = fault
    if channel.supervisor >= 0:
        shutdown(channel.supervisor, SHUT_WR)
        pidfd_continue(channel.pid_fd)
    if channel.state == WORKER_STARTING or channel.state == WORKER_UP:
        shutdown(channel.work, SHUT_RDWR)  # ends a worker that is a thread
        move(channel, WORKER_ENDING, channel.patient)
        wake(channel.wake_fd)  # the attendant then ends the worker


# ---------------------------------------------------------------------------------------------------------------------
# Requests

cdef void slot_cancelled(Request *request, void *owner) noexcept nogil:
    cdef Channel *channel = <Channel *>owner
    cdef Slot *slot
    cdef uint32_t credit = 0
    channel.flags.data[request.number & SLOT_MASK] = 1
    lock(&channel.guard)
    slot = slot_find(&channel.slots, request.number)
    if slot != NULL:
        slot_return(slot, WINDOW)  # unblock the sender: its responses are discarded
        credit = slot_credit(slot)
    unlock(&channel.guard)
    send_credit(channel, request.number, credit)


cdef void send_credit(Channel *channel, uint64_t number, uint32_t credit) noexcept nogil:
    cdef Head head
    if credit == 0:
        return
    memset(&head, 0, sizeof(Head))
    head.kind = CREDIT
    head.id = number
    head.offset = credit
    side_send(channel, 0, &head, NULL, 0)  # for any worker: a later one never has a request of this number


cdef void finish_detached(Channel *channel, Request *request, int64_t taken_ns) noexcept nogil:
    request_unfollow(request)
    lock(&channel.guard)
    slot_give(&channel.slots, slot_find(&channel.slots, request.number))
    unlock(&channel.guard)
    if request.response.status == STATUS_OK:
        account_detached(request, taken_ns)
    else:
        account_failed(request, now_ns(), FAILURE_BACKEND)
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


# ---------------------------------------------------------------------------------------------------------------------
# The sockets that packets are sent to from any thread

cdef void drop_parcels(Outlet *outlet) noexcept nogil:
    cdef Parcel *parcel
    while outlet.first != NULL:
        parcel = outlet.first
        outlet.first = parcel.next
        free(parcel)
    outlet.last = NULL
    outlet.waiting = 0
    outlet.count = 0


cdef void side_send(Channel *channel, uint64_t life, const Head *head, const void *record,
                    size_t size) noexcept nogil:
    outlet_send(channel, &channel.side, life, head, record, size)


cdef void calls_send(Channel *channel, uint64_t life, const Head *head, const void *record,
                     size_t size) noexcept nogil:
    outlet_send(channel, &channel.calls, life, head, record, size)


cdef void outlet_send(Channel *channel, Outlet *outlet, uint64_t life, const Head *head, const void *record,
                      size_t size) noexcept nogil:
    cdef Parcel *parcel
    cdef bint there
    lock(&channel.guard)
    there = outlet.fd >= 0 and (life == 0 or life == channel_life(channel))
    if there and (outlet.first != NULL or packet_send(
            outlet.fd, head, sizeof(Head), record, size, MSG_DONTWAIT) == 1):
        parcel = NULL
        if outlet.waiting < MOST_WAITING and outlet.count < MOST_PARCELS:
            parcel = <Parcel *>malloc(sizeof(Parcel) + sizeof(Head) + size)
        if outlet.waiting >= MOST_WAITING or outlet.count >= MOST_PARCELS:
            end_now(channel, DEAF)
        elif parcel == NULL:
            end_now(channel, OUT_OF_MEMORY)  # the worker would wait for the packet forever
        else:
            outlet.waiting += sizeof(Head) + size
            outlet.count += 1
            parcel.next = NULL
            parcel.size = sizeof(Head) + size
            memcpy(parcel.data, head, sizeof(Head))
            if size:
                memcpy(<uint8_t *>parcel.data + sizeof(Head), record, size)
            if outlet.last == NULL:
                outlet.first = parcel
                wake(channel.wake_fd)
            else:
                outlet.last.next = parcel
            outlet.last = parcel
    unlock(&channel.guard)


cdef void outlet_flush(Outlet *outlet) noexcept nogil:
    cdef Parcel *parcel = outlet.first
    while parcel != NULL:
        if packet_send(outlet.fd, parcel.data, parcel.size, NULL, 0, MSG_DONTWAIT) == 1:
            return
        outlet.first = parcel.next
        outlet.waiting -= parcel.size
        outlet.count -= 1
        free(parcel)
        parcel = outlet.first
    outlet.last = NULL
