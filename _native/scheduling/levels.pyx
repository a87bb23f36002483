"""Priority levels: the waiting requests in the order of service.

They are in one list: level by level, the highest first; within a level first the requests that are in time, then those
whose time is over and that continue to wait (timeout_action DELAY), each in the order of arrival. The end of each
segment is known. So inserting a request looks only at the segments before it, and removing one needs no search.

Priorities are strict: while a higher level has requests, lower ones are served only to fill up a batch. A request that
must not wait for ever needs a timeout or a deadline.
"""

from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free

from inferd._native.assertion cimport assert_that
from inferd._native.request.life cimport request_move
from inferd._native.request.request cimport REQUEST_QUEUED, REQUEST_TAKEN, Request

cdef int level_init(Level *level, object spec) except -1:
    level.max_size = spec.max_size
    level.timeout_ns = min(spec.timeout_us, LONGEST_TIMEOUT_US) * 1000
    level.overridable = spec.overridable
    level.yields = spec.yields
    return 0


cdef int levels_init(Levels *self, object spec) except -1:
    cdef uint32_t i
    if not 1 <= len(spec.levels) <= MAX_LEVELS:
        raise ValueError(f"{len(spec.levels)} priority levels, 1 to {MAX_LEVELS} are served")
    self.first = NULL
    self.count = 0
    self.rows = 0
    self.level_count = len(spec.levels)
    if not 1 <= spec.default_level <= self.level_count:
        raise ValueError(f"default priority level {spec.default_level}, expected 1 to {self.level_count}")
    self.default_level = spec.default_level - 1
    self.levels = <Level *>calloc(self.level_count, sizeof(Level))
    self.segments = <Segment *>calloc(2 * self.level_count, sizeof(Segment))
    if self.levels == NULL or self.segments == NULL:
        levels_clear(self)
        raise MemoryError
    for i in range(self.level_count):
        level_init(&self.levels[i], spec.levels[i])
    return 0


cdef void levels_clear(Levels *self) noexcept nogil:
    free(self.levels)
    free(self.segments)
    self.levels = NULL
    self.segments = NULL


cdef inline void unlink(Levels *self, Request *request) noexcept nogil:
    cdef Segment *segment = &self.segments[request.place]
    assert_that(segment.count > 0)
    assert_that(self.first == request if request.previous == NULL else request.previous.next == request)
    segment.count -= 1
    if segment.last == request:
        segment.last = request.previous  # of the same segment, if that has any left
    if request.previous == NULL:
        self.first = request.next
    else:
        request.previous.next = request.next
    if request.next != NULL:
        request.next.previous = request.previous
    request.previous = NULL
    request.next = NULL


cdef void levels_remove(Levels *self, Request *request) noexcept nogil:
    assert_that(self.count > 0 and self.rows >= request.rows)
    unlink(self, request)
    request_move(request, REQUEST_QUEUED, REQUEST_TAKEN)
    self.count -= 1
    self.rows -= request.rows


cdef void levels_yield(Levels *self, Request *request) noexcept nogil:
    cdef uint32_t segment = request.place | 1
    unlink(self, request)
    segment_append(self, request, segment)


cdef void insert(Levels *self, Request *request, uint32_t segment) noexcept nogil:
    # by its arrival among the requests of the segment
    cdef uint32_t left = self.segments[segment].count
    cdef Request *later = self.segments[segment].last if left else NULL
    cdef Request *before = NULL
    while left and later.queued_ns > request.queued_ns:
        before = later
        later = later.previous
        left -= 1
    if before == NULL:
        segment_append(self, request, segment)
        return
    request.previous = before.previous
    request.next = before
    if before.previous != NULL:
        before.previous.next = request
    else:
        self.first = request
    before.previous = request
    request.place = segment
    self.segments[segment].count += 1


cdef void levels_move(Levels *self, Request *request, uint32_t level) noexcept nogil:
    cdef uint32_t now_at = level_at(request)
    if level == now_at and request.place == 2 * level:
        return
    if level != now_at and level_is_full(self, level):
        return
    unlink(self, request)
    if level < now_at:
        segment_append(self, request, 2 * level)
    else:
        insert(self, request, 2 * level)
