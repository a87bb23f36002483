"""The rate limiter: instances execute only while they hold the resources that they need.

A resource is a name and a number: how much of it may be used at a time, on each device or (global) over all. An
instance needs amounts of several resources, and holds them from when it is given a batch until it asks for the next
one. Requests wait for resources in the queue, so they can time out, be cancelled, or be taken by another instance.

All lanes whose instances need resources share the dispatcher of their limiter (`inferd._native.scheduling.dispatcher`),
which decides who goes first.
"""

from libc.stdlib cimport calloc, free

from inferd._native.clock cimport now_ns
from inferd._native.scheduling.dispatcher cimport (
    Line,
    Need,
    ResourcePool,
    claim_give,
    dispatcher_clear,
    dispatcher_init,
)
from inferd._native.scheduling.waking cimport lines_look
from inferd._native.threads cimport lock, unlock


cdef class Resource:
    """An amount of something, on one device or over all."""

    cdef ResourcePool pool
    cdef readonly str name

    def __init__(self, name: str, total: int):
        self.name = name
        self.pool.total = self.pool.free = total

    @property
    def total(self) -> int:
        return self.pool.total

    @property
    def free(self) -> int:
        """The amount that no instance holds now."""
        return self.pool.free


cdef class RateLimiter:
    """Grants resources to instances."""

    def __cinit__(self):
        dispatcher_init(&self.dispatcher, True)

    def __dealloc__(self):
        dispatcher_clear(&self.dispatcher)

    def resize(self, Resource resource not None, total: int) -> None:
        """Change the total of a resource. Instances keep what they hold."""
        lock(&self.dispatcher.guard)
        resource.pool.free += total - resource.pool.total
        resource.pool.total = total
        lines_look(&self.dispatcher, now_ns())
        unlock(&self.dispatcher.guard)

    @property
    def waiting(self) -> int:
        """Instances that wait for resources, although there are requests for them."""
        cdef const Line *line
        count = 0
        lock(&self.dispatcher.guard)
        line = self.dispatcher.lacking.first
        while line != NULL:
            count += line.idle_count
            line = line.next
        unlock(&self.dispatcher.guard)
        return count


cdef class ClaimHandle:
    """The resources that one instance needs to execute, all at once.

    Args:
        limiter: grants the resources.
        needs: pairs of a Resource and how much of it.
        priority: the weight of an execution; 1 is the highest.
    """

    def __cinit__(self, RateLimiter limiter not None, needs, priority: int = 1):
        cdef Resource resource
        self.limiter = limiter
        self.resources = [resource for resource, _ in needs]
        self.claim.dispatcher = &limiter.dispatcher
        self.claim.priority = max(1, priority)
        self.claim.needs = <Need *>calloc(max(1, len(self.resources)), sizeof(Need))
        if self.claim.needs == NULL:
            raise MemoryError
        for resource, count in needs:
            self.claim.needs[self.claim.need_count].pool = &resource.pool
            self.claim.needs[self.claim.need_count].count = count
            self.claim.need_count += 1

    def __dealloc__(self):
        if self.claim.held:
            lock(&self.limiter.dispatcher.guard)
            claim_give(&self.claim)
            lines_look(&self.limiter.dispatcher, now_ns())
            unlock(&self.limiter.dispatcher.guard)
        free(self.claim.needs)

    @property
    def held(self) -> bool:
        """Whether its instance holds the resources now."""
        return self.claim.held
