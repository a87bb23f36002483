# The rate limiter: instances that execute only while they hold the resources that they need.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from _native.threads cimport Condition, Mutex

cdef struct Pool:
    # one resource on one device, or everywhere
    int64_t total
    int64_t free

cdef struct Need:
    Pool *pool
    int64_t count

cdef struct Claim:
    # of one instance to all that it needs at once
    Claim *previous          # in Limiter.waiting
    Claim *next
    Limiter *limiter
    Need *needs
    uint32_t need_count
    uint64_t priority        # the weight of an execution: 1 is the highest
    uint64_t executions
    bint held
    Condition granted

cdef struct Claims:
    # a list of them; see _native.list
    Claim *first
    Claim *last

cdef struct Limiter:
    Mutex guard              # guards all, and the claims
    Claims waiting           # the oldest first

# Wait until the instance may execute, if it does not hold its resources already. On its thread.
cdef void claim_acquire(Claim *claim) noexcept nogil
# Give the resources back, if it holds them.
cdef void claim_release(Claim *claim) noexcept nogil


cdef class RateLimiter:
    cdef Limiter limiter


cdef class ClaimHandle:
    # owns a Claim for Python
    cdef Claim claim
    cdef RateLimiter limiter
    cdef list resources
