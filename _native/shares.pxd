# Shares: what each client has, in one place where clients compete. Without clock, lock or thread. There are two
# questions. Who makes room: a place that is full removes items of the client with most of them (a lane's queue). Whose
# turn is it: each client gets as much as any other that wants as much (compression, calls that Python handles).
#
# Turns go by virtual time (start-time fair queueing). A client's next turn begins where its last one ended, and no
# earlier than the latest turn of anybody began; the earliest goes first. So a client that has had less goes before one
# that has had more, one that comes anew goes before all that have been served since, and nobody waits for ever. What
# was taken from the list is charged afterwards, when its cost is known.

from libc.stdint cimport uint32_t, uint64_t

cdef struct Waiting:
    # the first member of what waits for its turn
    Waiting *previous        # in Share.items
    Waiting *next
    Share *share             # from shares_put until shares_leave; NULL: neither waits nor is served

cdef struct Items:
    # see _native.list
    Waiting *first
    Waiting *last

cdef struct Share:
    uint64_t client
    uint32_t level           # of a queue with priorities
    uint32_t count           # items that wait
    uint32_t served          # items that were taken and have not left
    uint32_t place           # in Shares.order; UNORDERED
    uint64_t start           # the virtual time at which its next turn begins
    Items items              # if they are put; those that are only added are the owner's
    Share *following         # in its bucket

cdef enum:
    UNORDERED = 0xffffffff

cdef struct Shares:
    Share **buckets          # NULL: not counting
    uint32_t capacity        # buckets, a power of two
    uint32_t used            # shares
    uint32_t bound           # no share is larger; kept for `shares_yielding`
    uint64_t credit          # steps of a search that are paid for
    Share **order            # a heap of those whose items wait, or who have had more than their part
    uint32_t ordered
    uint64_t now             # the virtual time: the start of the latest turn

# Begin to count; False: no memory.
cdef bint shares_begin(Shares *self) noexcept nogil
# Stop counting. Nothing may wait or be served.
cdef void shares_end(Shares *self) noexcept nogil

# --- who makes room

# Count one more waiting item. False: no memory; counting has stopped.
cdef bint shares_add(Shares *self, uint64_t client, uint32_t level) noexcept nogil
# Count one less.
cdef void shares_subtract(Shares *self, uint64_t client, uint32_t level) noexcept nogil
# A client has an item for the level `first` of a queue without room on the levels from there to `last`. The share
# that must yield; NULL: none, because no share is clearly larger than the client's would then be. `most`: so many of
# its items may be removed before it is the smaller one. `waiting`: items in the queue. With thousands of small
# shares the function usually returns NULL, so that requests do not pay for searches.
cdef const Share *shares_yielding(Shares *self, uint64_t client, uint32_t first, uint32_t last, uint32_t waiting,
                                  uint32_t *most) noexcept nogil

# --- whose turn it is

# The item waits, behind others of its client. False: no memory.
cdef bint shares_put(Shares *self, Waiting *item, uint64_t client) noexcept nogil
# The item whose turn is next; NULL: none waits. Then either put it back in front, because only a part of it was served,
# or leave.
cdef Waiting *shares_take(Shares *self) noexcept nogil
cdef void shares_put_back(Shares *self, Waiting *item) noexcept nogil
# It has been served, or does not wait any more.
cdef void shares_leave(Shares *self, Waiting *item) noexcept nogil
# What the turn of an item that was taken has cost, in any unit.
cdef void shares_charge(Shares *self, Waiting *item, uint64_t cost) noexcept nogil


cdef class Turns:
    # objects of Python that wait for their turn
    cdef Shares shares
    cdef readonly int waiting
    cdef object let_go(self, Waiting *item)
