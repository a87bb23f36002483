# What clients have waiting in a queue that is full: how many requests each has on each level of priority. Without
# clock, lock or thread.

from libc.stdint cimport uint32_t, uint64_t

cdef struct Share:
    uint64_t client
    uint32_t level
    uint32_t count           # requests that wait
    bint taken               # the entry is somebody's, also when nothing waits

cdef struct Shares:
    Share *table             # open addressing; NULL: nothing is counted
    uint32_t capacity        # a power of two
    uint32_t used            # entries that are taken
    uint32_t bound           # no share is larger
    uint64_t credit          # steps of a search that are paid for

# Begin to count; False: no memory.
cdef bint shares_begin(Shares *self) noexcept nogil
# Count no more.
cdef void shares_end(Shares *self) noexcept nogil
# One more waits. False: no memory, and nothing is counted any more.
cdef bint shares_add(Shares *self, uint64_t client, uint32_t level) noexcept nogil
# One less does.
cdef void shares_subtract(Shares *self, uint64_t client, uint32_t level) noexcept nogil
# A client wants to have one more on the level `first` of a queue that has no room on the levels from there to `last`:
# whose requests on which of them make room. NULL: nobody's, all have about as many as the client would then have.
# `most`: so many of them may go without the two changing places. `waiting`: requests in the queue. Where there are
# thousands of small shares it also answers NULL most of the time, so that a request does not cost a search.
cdef const Share *shares_yielding(Shares *self, uint64_t client, uint32_t first, uint32_t last, uint32_t waiting,
                                  uint32_t *most) noexcept nogil
