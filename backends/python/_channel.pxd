# The server's end of the connection to one worker: its sockets, its requests, and the memory that it may access.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.atomic cimport load64
from inferd._native.execution.remote cimport Remote
from inferd._native.memory.arena cimport Arena
from inferd._native.memory.resource cimport Block
from inferd._native.memory.registry cimport RegionWatch
from inferd._native.request.bridge cimport WatchedDescriptor
from inferd._native.request.lane cimport Lane
from inferd._native.request.request cimport Request
from inferd._native.threads cimport Condition, Mutex
from inferd._native.timers cimport Timer
from inferd.backends.python._life cimport WorkerState
from inferd.backends.python._loans cimport Loans
from inferd.backends.python._slots cimport Slots
from inferd.backends.python._wire cimport Head

cdef enum:
    BLS_BUCKETS = 256
    KEPT_REGIONS = 64        # regions of clients that a worker keeps mapped

cdef struct Team:
    # the workers of one model version
    int32_t references       # atomic
    int32_t hopeful          # atomic: instances that are patient

cdef struct Parcel:
    # a packet that waits until the socket takes it
    Parcel *next
    size_t size
    uint8_t data[1]

cdef struct Outlet:
    # a socket to which any thread sends packets, and the packets that wait
    int fd
    Parcel *first
    Parcel *last
    size_t waiting           # bytes in waiting packets
    uint32_t count           # number of waiting packets

cdef struct Channel:
    int32_t references       # atomic: the attendant's, and one for each waiting response and each BLS call
    Arena *arena
    char *name               # of the instance
    char *model              # its name, for the models that it calls; NULL: it can call none
    Block *flags             # SLOTS bytes in the arena: which requests are cancelled
    Team *team
    Lane *lane               # of the requests that it executes, under the guard; NULL: none has come
    void *submission         # Submission, for BLS calls; NULL: none are possible
    void *bls_calls[BLS_BUCKETS]  # BlsCalls in flight, by id; used in the front
    void *bls_families[BLS_BUCKETS]  # the same by the request on whose behalf they are made
    int64_t timeout_ns       # longest execution; 0: no limit

    Mutex guard              # protects everything up to the next heading
    Condition changed        # of `state`
    WorkerState state
    bint patient             # requests wait for the next worker; else the last starts failed, or there will be none
    char *why                # why there is no worker, as text for callers
    int work
    Outlet side
    Outlet calls
    int pid_fd               # readable when the worker has ended
    int supervisor           # socket to the supervisor, which ends the worker when it is shut down; -1: a thread
    bint executing           # an execution is in progress: the instance's thread, or the front, uses `work`
    bint maps_regions        # the worker can map shared memory of trusted clients; written while nothing is executed
    bint leaving             # do not wait for another worker
    Slots slots
    Loans loans
    int64_t life             # atomic, written by the attendant: number of the worker, different for each
    int32_t call_count       # atomic, written with the lock: BLS calls in flight
    uint64_t call_bytes      # of their requests
    int32_t watching         # atomic: the attendant looks regularly for unused memory
    int32_t overdue          # the worker was ended because its execution took too long
    const char *fault        # the rule that the worker has broken and was ended for; NULL: none
    int32_t deaf             # atomic: the worker has broken a rule, and nothing more is read from it
    int32_t wishes           # atomic: changes of its calls that the front has not processed
    void *parting            # a Wish of _bls that ends all calls of this worker; allocated before it can make any
    int32_t called           # atomic: the Python part of the attendant is needed
    int wake_fd              # wakes the attendant

    # used by the executor: the instance's thread, or the front
    uint64_t execution       # id of the current EXECUTE
    uint64_t *numbers        # of the batch's requests
    uint32_t number_capacity
    uint8_t *packet          # PACKET bytes, to send and to receive
    Block *execute_block     # lent for the current EXECUTE, with its record; NULL: the record was in the packet
    RegionWatch regions[KEPT_REGIONS]  # regions that the worker keeps mapped
    double bytes_per_row     # of outputs that do not fit into packets; a decaying mean

    # used on the attendant's thread only
    uint8_t *side_packet
    void *unsignalled        # the attendant's: a bridge with responses of which the front has not heard

    # used in the front only, while there is a worker
    WatchedDescriptor descriptor  # the socket of calls
    WatchedDescriptor results  # the work socket
    Remote remote
    Timer limit              # of an execution that the front has begun
    uint8_t *calls_packet

cdef Team *team_new() noexcept nogil
cdef void team_give(Team *team) noexcept nogil

cdef Channel *channel_new(Arena *arena, const char *name, Team *team, int64_t timeout_ns) noexcept nogil
cdef Channel *channel_share(Channel *channel) noexcept nogil
cdef void channel_give(Channel *channel) noexcept nogil

# On the attendant's thread: a worker was started. These descriptors are valid until channel_ended.
cdef void channel_connect(Channel *channel, int work, int side, int calls, int pid_fd, int supervisor) noexcept nogil
# On the attendant's thread: the worker has loaded its model. `maps_regions`: it can map shared memory of clients.
cdef void channel_up(Channel *channel, bint maps_regions) noexcept nogil
# On the attendant's thread: the worker has ended, or could not be started; `state` is WORKER_NONE or WORKER_CLOSED. Its
# requests get `why` (from malloc, taken over). After the return the descriptors are not used any more, and all that the
# worker held has been given back.
cdef void channel_ended(Channel *channel, WorkerState state, bint patient, char *why) noexcept nogil
# The worker that has this request, or was to get it, has ended: set the request's error. Nothing else turns the end of
# a worker into a status and a text. `was_sent`: the request may have reached it. Under the guard.
cdef void channel_refuse(Channel *channel, Request *request, bint was_sent) noexcept nogil

# On the instance's thread: wait until a worker is up (True), or until none is expected soon (False).
cdef bint channel_await(Channel *channel) noexcept nogil

cdef inline uint64_t channel_life(const Channel *channel) noexcept nogil:
    return <uint64_t>load64(&channel.life)

# Called when a request is abandoned: sets its flag for the worker. See request_follow; `owner` is the channel.
cdef void slot_cancelled(Request *request, void *owner) noexcept nogil
# Send credit, if it is more than 0, to a sender that waits. Without the lock.
cdef void send_credit(Channel *channel, uint64_t number, uint32_t credit) noexcept nogil

# Send on the side socket, or on that of calls, from any thread: in order, without blocking; the attendant sends
# packets that the socket does not take. `record` follows the head. `life`: only for the worker with this number; 0: any
# worker.
cdef void side_send(Channel *channel, uint64_t life, const Head *head, const void *record,
                    size_t size) noexcept nogil
cdef void calls_send(Channel *channel, uint64_t life, const Head *head, const void *record,
                     size_t size) noexcept nogil
# The attendant's part of that, when the socket takes packets again. With the lock.
cdef void outlet_flush(Outlet *outlet) noexcept nogil
# End a request that the channel owns and whose response is complete: frees its slot, counts it, and returns it over
# the bridge. Without the lock.
cdef void finish_detached(Channel *channel, Request *request, int64_t taken_ns) noexcept nogil

# Do not wait for workers that are not up.
cdef void channel_leave(Channel *channel) noexcept nogil
# Wake the attendant.
cdef void channel_nudge(Channel *channel) noexcept nogil
# Have the worker ended at once, if there is one.
cdef void channel_end(Channel *channel) noexcept nogil
# Have the worker ended because it has broken this rule, a static text such as "sent a packet that is none". Nothing
# more is read from it.
cdef void channel_break(Channel *channel, const char *rule) noexcept nogil
# Have the worker ended because there is no memory for its packets.
cdef void channel_exhausted(Channel *channel) noexcept nogil


cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <errno.h>
    #include <poll.h>
    #include <signal.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/eventfd.h>
    #include <sys/socket.h>
    #include <sys/syscall.h>
    #include <sys/uio.h>
    #include <unistd.h>
    #ifndef SYS_pidfd_send_signal
    #define SYS_pidfd_send_signal 424
    #endif
    /* One packet; 0, or -1 when the peer is gone. `flags` may be MSG_DONTWAIT: then 1 when there is no room. */
    static inline int inferd_packet_send(int fd, const void *head, size_t head_size, const void *record, size_t size,
                                         int flags) {
        struct iovec parts[2] = {{(void *)head, head_size}, {(void *)record, size}};
        struct msghdr message;
        memset(&message, 0, sizeof message);
        message.msg_iov = parts;
        message.msg_iovlen = size ? 2 : 1;
        ssize_t sent;
        do sent = sendmsg(fd, &message, flags | MSG_NOSIGNAL); while (sent < 0 && errno == EINTR);
        if (sent >= 0) return 0;
        return (flags & MSG_DONTWAIT) && (errno == EAGAIN || errno == EWOULDBLOCK) ? 1 : -1;
    }
    /* One packet if there is one: its size, 0 when the peer is gone, -1 when there is none. For an empty
       packet recv returns 0, too; here its size is 1: shorter than a head, so it breaks a rule. */
    static inline ssize_t inferd_packet_poll(int fd, void *data, size_t room) {
        ssize_t size;
        do size = recv(fd, data, room, MSG_DONTWAIT); while (size < 0 && errno == EINTR);
        if (size == 0) {
            struct pollfd one = {fd, POLLIN, 0};
            return poll(&one, 1, 0) < 0 || one.revents & (POLLHUP | POLLERR) ? 0 : 1;
        }
        return size > 0 ? size : errno == EAGAIN || errno == EWOULDBLOCK ? -1 : 0;
    }
    /* One packet: its size, 0 when the peer is gone, -1 when `ns` (0: forever) have passed. */
    static inline ssize_t inferd_packet_receive(int fd, void *data, size_t room, int64_t ns) {
        if (ns) {
            struct pollfd one = {fd, POLLIN, 0};
            struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
            int ready;
            do ready = ppoll(&one, 1, &t, NULL); while (ready < 0 && errno == EINTR);
            if (ready == 0) return -1;
        }
        ssize_t size;
        do size = recv(fd, data, room, 0); while (size < 0 && errno == EINTR);
        return size < 0 ? 0 : size;
    }
    /* for a supervisor that was stopped */
    static inline void inferd_pidfd_continue(int fd) { syscall(SYS_pidfd_send_signal, fd, SIGCONT, NULL, 0); }
    static inline int inferd_wake_fd(void) { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); }
    static inline void inferd_wake(int fd) { uint64_t one = 1; if (write(fd, &one, 8) < 0) {} }
    static inline void inferd_awake(int fd) { uint64_t n; if (read(fd, &n, 8) < 0) {} }
    """
    int packet_send "inferd_packet_send"(int fd, const void *head, size_t head_size, const void *record, size_t size,
                                         int flags) noexcept nogil
    ssize_t packet_receive "inferd_packet_receive"(int fd, void *data, size_t room, int64_t ns) noexcept nogil
    ssize_t packet_poll "inferd_packet_poll"(int fd, void *data, size_t room) noexcept nogil
    void pidfd_continue "inferd_pidfd_continue"(int fd) noexcept nogil
    int make_wake_fd "inferd_wake_fd"() noexcept nogil
    void wake "inferd_wake"(int fd) noexcept nogil
    void awake "inferd_awake"(int fd) noexcept nogil
    int MSG_DONTWAIT
