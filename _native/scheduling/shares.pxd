# The shares of clients in a full queue: how many requests each of them has waiting on each priority level. Without
# clock, lock or thread.

from libc.stdint cimport uint32_t, uint64_t

cdef struct Share:
    uint64_t client
    uint32_t level
    uint32_t count           # waiting requests
    bint taken               # the entry is in use, even if no request waits

cdef struct Shares:
    Share *table             # open addressing; NULL: not counting
    uint32_t capacity        # a power of two
    uint32_t used            # entries in use
    uint32_t bound           # no share is larger
    uint64_t credit          # steps of a search that are paid for

# Begin to count; False: no memory.
cdef bint shares_begin(Shares *self) noexcept nogil
# Stop counting.
cdef void shares_end(Shares *self) noexcept nogil
# Count one more waiting request. False: no memory; counting has stopped.
cdef bint shares_add(Shares *self, uint64_t client, uint32_t level) noexcept nogil
# Count one less.
cdef void shares_subtract(Shares *self, uint64_t client, uint32_t level) noexcept nogil
# A client has a request for the level `first` of a queue without room on the levels from there to `last`. The share
# that must yield; NULL: none, because no share is clearly larger than the client's would then be. `most`: so many of
# its requests may be removed before it is the smaller one. `waiting`: requests in the queue. With thousands of small
# shares the function usually returns NULL, so that requests do not pay for searches.
cdef const Share *shares_yielding(Shares *self, uint64_t client, uint32_t first, uint32_t last, uint32_t waiting,
                                  uint32_t *most) noexcept nogil
