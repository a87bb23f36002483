# The waiting requests in the order of service: by priority level, and within a level those in time before those whose
# time is over. Without clock, lock or thread.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.assertion cimport assert_that
from inferd._native.request.life cimport request_move
from inferd._native.request.request cimport REQUEST_NEW, REQUEST_QUEUED, REQUEST_TAKEN, Request

cdef extern from *:
    """
    #include <stdint.h>
    #define INFERD_LONGEST_TIMEOUT_US (INT64_C(1) << 51)
    """
    const int64_t LONGEST_TIMEOUT_US "INFERD_LONGEST_TIMEOUT_US"     # 71 years; adding it to a time does not overflow

cdef enum:
    MAX_LEVELS = 256

cdef struct Level:
    # a queue policy
    uint32_t max_size        # requests; 0: any number
    bint overridable         # a request may set a shorter time
    bint yields              # a request whose time is over goes behind the others; otherwise it is refused
    int64_t timeout_ns       # 0: no limit

cdef struct Segment:
    # the requests of one level that are in time, or those that are not
    Request *last            # undefined if there is none
    uint32_t count

cdef struct Levels:
    Request *first           # in the order of service
    uint32_t count
    uint64_t rows
    uint32_t level_count
    uint32_t default_level   # from 0
    Level *levels            # the highest priority first
    Segment *segments        # of level i: 2 * i those in time, 2 * i + 1 the others

# Read an inferd.backends.api.QueuePolicySpec.
cdef int level_init(Level *level, object spec) except -1
# Read an inferd.backends.api.QueueSpec; raises ValueError or MemoryError.
cdef int levels_init(Levels *self, object spec) except -1
cdef void levels_clear(Levels *self) noexcept nogil
# The level of a request with this priority: 1 is the highest; numbers that are no level mean the default.
cdef inline uint32_t level_of(const Levels *self, uint64_t priority) noexcept nogil:
    return <uint32_t>priority - 1 if 1 <= priority <= self.level_count else self.default_level
# Whether the level is full.
cdef inline bint level_is_full(const Levels *self, uint32_t level) noexcept nogil:
    cdef uint32_t most = self.levels[level].max_size
    return most and self.segments[2 * level].count + self.segments[2 * level + 1].count >= most
cdef inline uint32_t level_at(const Request *request) noexcept nogil:
    # the level of a waiting request, or of one that has waited
    return request.place // 2
cdef void levels_remove(Levels *self, Request *request) noexcept nogil
# Move a request to the place that it would have if it had always been at this level; not if the level is full. In a
# higher level that is the last place, because the others have waited there for longer; in a lower level it is before
# all that came later.
cdef void levels_move(Levels *self, Request *request, uint32_t level) noexcept nogil
# Put a request whose time is over behind the others of its level.
cdef void levels_yield(Levels *self, Request *request) noexcept nogil


# ---- on the way of every request ----

cdef inline Request *last_up_to(const Levels *self, uint32_t segment) noexcept nogil:
    # the last request of this segment, or of the segments before it
    while self.segments[segment].count == 0:
        if segment == 0:
            return NULL
        segment -= 1
    return self.segments[segment].last


cdef inline Request *levels_last(const Levels *self, uint32_t level) noexcept nogil:
    # the last request of this level or of higher ones; NULL: none
    return last_up_to(self, 2 * level + 1)


cdef inline void segment_append(Levels *self, Request *request, uint32_t segment) noexcept nogil:
    cdef Request *previous = last_up_to(self, segment)
    cdef Request *following
    if previous == NULL:
        following = self.first
        self.first = request
    else:
        following = previous.next
        previous.next = request
    if following != NULL:
        following.previous = request
    request.previous = previous
    request.next = following
    request.place = segment
    self.segments[segment].last = request
    self.segments[segment].count += 1


cdef inline int64_t time_allowed(const Level *level, const Request *request) noexcept nogil:
    # how long the request may wait; 0: without limit
    cdef int64_t asked
    if request.is_warmup:  # a model that is cold may take any time
        return 0
    if not level.overridable or request.terms.timeout_us == 0:
        return level.timeout_ns
    asked = min(request.terms.timeout_us, LONGEST_TIMEOUT_US) * 1000
    return min(asked, level.timeout_ns) if level.timeout_ns else asked


cdef inline void set_limit(const Level *level, Request *request) noexcept nogil:
    cdef int64_t allowed = time_allowed(level, request)
    if allowed:
        request.expires_ns = request.terms.executable_ns + allowed
        request.yields = level.yields


cdef inline void levels_put(Levels *self, Request *request, uint32_t level) noexcept nogil:
    # appends the request to its level; sets expires_ns and yields
    if not request.shared:
        set_limit(&self.levels[level], request)
    segment_append(self, request, 2 * level)
    request_move(request, REQUEST_NEW, REQUEST_QUEUED)
    self.count += 1
    self.rows += request.rows


cdef inline Request *levels_cut(Levels *self, uint32_t count) noexcept nogil:
    # removes the first `count` requests, at least one, as a chain by Request.next
    cdef Request *first = self.first
    cdef Request *last = NULL
    cdef Request *request = first
    cdef uint32_t _
    assert_that(0 < count and count <= self.count)
    for _ in range(count):
        request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)
        self.rows -= request.rows
        self.segments[request.place].count -= 1
        last = request
        request = request.next
    self.count -= count
    self.first = request
    assert_that((request == NULL) == (self.count == 0) and (self.count or self.rows == 0))
    last.next = NULL
    if request != NULL:
        request.previous = NULL
    return first
