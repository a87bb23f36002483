# The loans to a worker: the memory of the arena that it may use, and until when.
#
# There are three ways of lending. A *grant* is for data of the worker: for outputs of the batch that it executes (it
# ends with DONE), or for one packet of the side socket (it ends with that packet, or with FREE). A *message* is a
# BLS_RESPONSE in the arena; it ends with RELEASE. An *execution* is the memory of an EXECUTE; it ends with DONE, or, if
# the model keeps views of it, with RELEASE, whichever of the two sockets is read first.
#
# All functions are called with the channel's lock. They take blocks over and return them; callers give blocks back
# after they have released the lock.

from libc.stdint cimport uint32_t, uint64_t

from inferd._native.memory.resource cimport Block

cdef enum LoanKind:
    LOAN_OUTPUT              # grant for outputs of the batch
    LOAN_PACKET              # grant for a packet of the side socket
    LOAN_MESSAGE             # BLS_RESPONSE
    LOAN_KINDS

cdef enum:
    MOST_LOANS = 16384       # of each kind that a worker has at a time
    KEPT_BUCKETS = 256
    MOST_KEPT = 1 << 18      # executions of which a model keeps views

cdef struct Loan:
    uint64_t offset          # in the arena
    uint64_t size            # of the whole block
    Block *block
    LoanKind kind

cdef struct Kept:
    # an execution that has ended, and of whose memory the model keeps views
    uint64_t id
    Kept *next
    uint32_t count
    Block *blocks[1]         # as many as `count`

cdef struct Loans:
    Loan *by_offset          # ordered by offset; no two overlap
    uint32_t count
    uint32_t capacity
    uint32_t of_kind[<int>LOAN_KINDS]  # atomic: read without the lock, to see whether there are any
    uint64_t executions      # number of executions that have begun, and the id of the latest
    bint executing           # the latest is in progress
    bint released            # the RELEASE of the latest has come before its DONE
    Kept *kept[KEPT_BUCKETS]
    uint32_t kept_count

# Lend a block at this offset of the arena. False: the worker has the maximum of loans, or there is no memory; the
# block still belongs to the caller.
cdef bint loan_begin(Loans *loans, LoanKind kind, Block *block, uint64_t offset) noexcept nogil
# The loan of this kind that contains all of these bytes; NULL: none.
cdef Loan *loan_find(const Loans *loans, LoanKind kind, uint64_t offset, uint64_t size) noexcept nogil
# End a loan; its block belongs to the caller.
cdef Block *loan_end(Loans *loans, Loan *loan) noexcept nogil
# End any loan of this kind; NULL: there is none.
cdef Block *loan_end_one(Loans *loans, LoanKind kind) noexcept nogil
# End the last loan, of any kind; NULL: there is none.
cdef Block *loan_end_last(Loans *loans) noexcept nogil

# An EXECUTE is sent; returns its id.
cdef uint64_t execution_begin(Loans *loans) noexcept nogil
# The DONE of the execution has come. `kept`: the blocks of which the model keeps views, taken over; NULL: none. Returns
# the blocks to give back; NULL: none. Sets `rule` if the worker has broken one.
cdef Kept *execution_end(Loans *loans, Kept *kept, const char **rule) noexcept nogil
# RELEASE has come. Returns the blocks to give back, or NULL.
cdef Kept *execution_release(Loans *loans, uint64_t id, const char **rule) noexcept nogil
# The worker has ended: remove an execution that it kept; NULL: there is none.
cdef Kept *execution_forget(Loans *loans) noexcept nogil

# Without the lock.
cdef Kept *kept_new(uint32_t most) noexcept nogil
cdef void kept_give(Kept *kept) noexcept nogil
# When all loans have ended.
cdef void loans_free(Loans *loans) noexcept nogil
