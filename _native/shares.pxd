# Shares: what each client has, where clients compete for something. Without clock, lock or thread. They answer two
# questions. Who makes room: a full queue removes items of the client that has most of them (a lane's queue). Whose turn
# is next: each client gets as much as any other that wants as much (compression, calls that Python handles).
#
# Turns go by virtual time (start-time fair queueing). A client's next turn begins where its last one ended, and no
# earlier than the latest turn of any client began; the earliest goes first. So a client that has had less goes before
# one that has had more, a new client goes before those that have just been served, and no client waits for ever. An
# item is charged after it was taken, when its cost is known.

from libc.stdint cimport uint32_t, uint64_t

cdef struct Waiting:
    # the first member of an item that waits for its turn
    Waiting *previous        # in Share.items
    Waiting *next
    Share *share             # from shares_put until shares_leave; NULL: neither waits nor is served

cdef struct Items:
    # see inferd._native.list
    Waiting *first
    Waiting *last

cdef struct Share:
    uint64_t client
    uint32_t level           # of a queue with priorities
    uint32_t count           # items that wait
    uint32_t served          # items that were taken and have not left
    uint32_t place           # in Shares.order; UNORDERED
    uint64_t start           # the virtual time at which its next turn begins
    Items items              # those of shares_put; items that are only counted (shares_add) belong to the owner
    Share *following         # in its bucket

cdef enum:
    UNORDERED = 0xffffffff

cdef struct Shares:
    Share **buckets          # NULL: not counting
    uint32_t capacity        # buckets, a power of two
    uint32_t used            # shares
    uint32_t bound           # no share is larger; kept for `shares_yielding`
    uint64_t credit          # steps of a search that are paid for
    Share **order            # a heap of shares whose items wait, or that have had more than their part
    uint32_t ordered
    uint64_t now             # the virtual time: the start of the latest turn

# Begin to count; False: no memory.
cdef bint shares_begin(Shares *self) noexcept nogil
# Stop counting. Nothing may wait or be served.
cdef void shares_end(Shares *self) noexcept nogil

# --- making room

# Count one more waiting item. False: no memory; counting has stopped.
cdef bint shares_add(Shares *self, uint64_t client, uint32_t level) noexcept nogil
# Count one less.
cdef void shares_subtract(Shares *self, uint64_t client, uint32_t level) noexcept nogil
# A client has an item for the level `first` of a queue that is full on the levels `first` to `last`. Returns the share
# that must yield; NULL if no share is clearly larger than the client's would then be. `most`: how many of its items may
# be removed before it is the smaller one. `waiting`: items in the queue. With thousands of small shares the function
# usually returns NULL, so that requests do not pay for searches.
cdef const Share *shares_yielding(Shares *self, uint64_t client, uint32_t first, uint32_t last, uint32_t waiting,
                                  uint32_t *most) noexcept nogil

# --- turns

# Append an item to those of its client. False: no memory.
cdef bint shares_put(Shares *self, Waiting *item, uint64_t client) noexcept nogil
# The item whose turn is next; NULL: none waits. Then the caller puts it back in front, if only a part of it was served,
# or calls shares_leave.
cdef Waiting *shares_take(Shares *self) noexcept nogil
cdef void shares_put_back(Shares *self, Waiting *item) noexcept nogil
# The item has been served, or waits no longer.
cdef void shares_leave(Shares *self, Waiting *item) noexcept nogil
# Charge the client for the turn of an item that was taken, in any unit.
cdef void shares_charge(Shares *self, Waiting *item, uint64_t cost) noexcept nogil


cdef class Turns:
    # objects of Python that wait for their turn
    cdef Shares shares
    cdef readonly int waiting
    cdef object let_go(self, Waiting *item)
