"""Shares: which requests are removed from a full queue to make room for others.

The client that holds most of the queue is refused first: the waiting requests of one client never prevent a client with
fewer from having one. Nothing is counted while there is room; counting begins when a request finds the queue full.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

cdef enum:
    FIRST_CAPACITY = 64
    STEPS = 256              # of a search, that one request pays for

cdef uint64_t SPREAD = 0x9E3779B97F4A7C15


cdef inline Share *entry(Share *table, uint32_t capacity, uint64_t client, uint32_t level) noexcept nogil:
    # that of a client, or the free one that would be; there is one
    cdef uint32_t at = <uint32_t>(((client ^ (<uint64_t>level << 56)) * SPREAD) >> 32) & (capacity - 1)
    while table[at].taken and (table[at].client != client or table[at].level != level):
        at = (at + 1) & (capacity - 1)
    return &table[at]


cdef bint shares_begin(Shares *self) noexcept nogil:
    self.table = <Share *>calloc(FIRST_CAPACITY, sizeof(Share))
    self.capacity = FIRST_CAPACITY if self.table != NULL else 0
    self.used = 0
    self.bound = 0
    self.credit = 0
    return self.table != NULL


cdef void shares_end(Shares *self) noexcept nogil:
    free(self.table)
    self.table = NULL
    self.capacity = 0


cdef bint make_room(Shares *self) noexcept nogil:
    # a table without those who have nothing any more, half of it free at least; False: no memory
    cdef uint32_t live = 0
    cdef uint32_t capacity = FIRST_CAPACITY
    cdef uint32_t i
    cdef Share *table
    for i in range(self.capacity):
        live += self.table[i].count > 0
    while capacity < 4 * live:
        capacity *= 2
    table = <Share *>calloc(capacity, sizeof(Share))
    if table == NULL:
        return False
    for i in range(self.capacity):
        if self.table[i].count:
            entry(table, capacity, self.table[i].client, self.table[i].level)[0] = self.table[i]
    free(self.table)
    self.table = table
    self.capacity = capacity
    self.used = live
    return True


cdef bint shares_add(Shares *self, uint64_t client, uint32_t level) noexcept nogil:
    cdef Share *share = entry(self.table, self.capacity, client, level)
    if not share.taken:
        if self.used >= self.capacity // 2:
            if not make_room(self):
                shares_end(self)
                return False
            share = entry(self.table, self.capacity, client, level)
        share.taken = True
        share.client = client
        share.level = level
        self.used += 1
    share.count += 1
    self.bound = max(self.bound, share.count)
    return True


cdef void shares_subtract(Shares *self, uint64_t client, uint32_t level) noexcept nogil:
    cdef Share *share = entry(self.table, self.capacity, client, level)
    if share.taken and share.count:
        share.count -= 1


cdef bint is_worth_searching(Shares *self, uint32_t own, uint32_t waiting) noexcept nogil:
    # A search visits every share and, for the requests that go, the queue. Each request that comes pays for some steps
    # of it, and so does each that will go at most: where many have little, room is not made for every one of them.
    self.credit += STEPS
    if self.credit + <uint64_t>((self.bound - own) // 2) * STEPS < <uint64_t>self.capacity + waiting:
        return False
    self.credit = 0
    return True


cdef const Share *shares_yielding(Shares *self, uint64_t client, uint32_t first, uint32_t last, uint32_t waiting,
                                  uint32_t *most) noexcept nogil:
    cdef uint32_t own = entry(self.table, self.capacity, client, first).count
    cdef const Share *found = NULL
    cdef const Share *share
    cdef uint32_t largest = 0
    cdef uint32_t i
    if self.bound <= own + 1 or not is_worth_searching(self, own, waiting):
        return NULL
    for i in range(self.capacity):
        share = &self.table[i]
        largest = max(largest, share.count)
        if share.count > own + 1 and first <= share.level <= last and (found == NULL or share.count > found.count):
            found = share
    self.bound = largest
    if found != NULL:
        most[0] = (found.count - own) // 2
    return found
