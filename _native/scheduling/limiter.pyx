"""The rate limiter: instances that execute only while they hold the resources that they need.

A resource is a name and a number: what an operator says may be used at a time, per device or (global) over all. An
instance needs some of several, and holds them while it executes a batch. It waits for them while the requests are still
in the queue, so these can time out, be cancelled, or go to another instance meanwhile.

Of those that wait, the one with the smallest product of executions and priority goes first, as in Triton. One whose
resources are not free is passed over, so it never keeps those back that need others. One that needs much of a resource
can therefore wait long while others share it; its priority does not change that.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from _native.list cimport list_append, list_remove
from _native.threads cimport (
    condition_destroy,
    condition_init,
    lock,
    mutex_destroy,
    mutex_init,
    notify_one,
    unlock,
    wait,
)


# ---------------------------------------------------------------------------------------------------------------------
# Claims, with the limiter's guard held

cdef bint is_free(const Claim *claim) noexcept nogil:
    cdef uint32_t i
    for i in range(claim.need_count):
        if claim.needs[i].pool.free < claim.needs[i].count:
            return False
    return True


cdef void move(Claim *claim, int64_t sign) noexcept nogil:
    # resources out of the pools to the claim, or back
    cdef uint32_t i
    for i in range(claim.need_count):
        claim.needs[i].pool.free -= sign * claim.needs[i].count
    claim.held = sign > 0


cdef inline uint64_t weight(const Claim *claim) noexcept nogil:
    return claim.executions * claim.priority


cdef Claim *take_best(Limiter *limiter) noexcept nogil:
    # the claim that is to be granted next, out of those that wait; NULL when none can be
    cdef Claim *claim = limiter.waiting.first
    cdef Claim *best = NULL
    while claim != NULL:
        if is_free(claim) and (best == NULL or weight(claim) < weight(best)):
            best = claim
        claim = claim.next
    if best != NULL:
        list_remove(&limiter.waiting, best)
    return best


cdef void grant(Limiter *limiter) noexcept nogil:
    # to all that can be served, the most deserving first
    cdef Claim *claim = take_best(limiter)
    while claim != NULL:
        move(claim, 1)
        notify_one(&claim.granted)
        claim = take_best(limiter)


cdef void claim_acquire(Claim *claim) noexcept nogil:
    cdef Limiter *limiter = claim.limiter
    lock(&limiter.guard)
    if not claim.held:
        list_append(&limiter.waiting, claim)
        grant(limiter)
        while not claim.held:
            wait(&claim.granted, &limiter.guard)
        claim.executions += 1
    unlock(&limiter.guard)


cdef void claim_release(Claim *claim) noexcept nogil:
    cdef Limiter *limiter = claim.limiter
    lock(&limiter.guard)
    if claim.held:
        move(claim, -1)
        grant(limiter)
    unlock(&limiter.guard)


# ---------------------------------------------------------------------------------------------------------------------
# For Python

cdef class Resource:
    """So much of something on one device, or everywhere."""

    cdef Pool pool
    cdef readonly str name

    def __init__(self, name: str, total: int):
        self.name = name
        self.pool.total = self.pool.free = total

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def free(self) -> int:
        """What no instance holds now."""
        return self.pool.free


cdef class RateLimiter:
    """Grants claims."""

    def __cinit__(self):
        mutex_init(&self.limiter.guard, NULL)

    def __dealloc__(self):
        mutex_destroy(&self.limiter.guard)

    def resize(self, Resource resource not None, total: int) -> None:
        """Have more or less of a resource. What is held stays held."""
        lock(&self.limiter.guard)
        resource.pool.free += total - resource.pool.total
        resource.pool.total = total
        grant(&self.limiter)
        unlock(&self.limiter.guard)

    @property
    def waiting(self) -> int:
        """Instances that wait for resources."""
        cdef Claim *claim
        count = 0
        lock(&self.limiter.guard)
        claim = self.limiter.waiting.first
        while claim != NULL:
            count += 1
            claim = claim.next
        unlock(&self.limiter.guard)
        return count


cdef class ClaimHandle:
    """The claim of one instance.

    Args:
        limiter: who grants it.
        needs: pairs of a Resource and how much of it.
        priority: the weight of an execution; 1 is the highest.
    """

    def __cinit__(self, RateLimiter limiter not None, needs, priority: int = 1):
        cdef Resource resource
        self.limiter = limiter
        self.resources = [resource for resource, _ in needs]
        self.claim.limiter = &limiter.limiter
        self.claim.priority = max(1, priority)
        condition_init(&self.claim.granted)
        self.claim.needs = <Need *>calloc(max(1, len(self.resources)), sizeof(Need))
        if self.claim.needs == NULL:
            raise MemoryError
        for resource, count in needs:
            self.claim.needs[self.claim.need_count].pool = &resource.pool
            self.claim.needs[self.claim.need_count].count = count
            self.claim.need_count += 1

    def __dealloc__(self):
        if self.claim.held:
            claim_release(&self.claim)
        free(self.claim.needs)
        condition_destroy(&self.claim.granted)

    @property
    def held(self) -> bool:
        """Whether its instance holds the resources now."""
        return self.claim.held

    def acquire(self) -> None:
        """Wait for the resources."""
        with nogil:
            claim_acquire(&self.claim)

    def release(self) -> None:
        """Give them back."""
        with nogil:
            claim_release(&self.claim)
