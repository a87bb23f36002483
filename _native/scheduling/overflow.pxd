# Full queues: which requests make room for others.

from libc.stdint cimport uint32_t

from inferd._native.request.request cimport Request
from inferd._native.scheduling.levels cimport Levels
from inferd._native.shares cimport Shares

# A queue, or this level of it, is full: remove the latest requests of the client with most of the queue, as a chain
# for refuse_ousted. Levels above that of the arriving request are left alone. Begins the shares if they have not begun.
# NULL: no client has more of the queue than the client of the arriving request, or there is no memory. With the
# dispatcher's lock held.
cdef Request *oust(Levels *levels, Shares *shares, const Request *coming, uint32_t level) noexcept nogil
# Refuse the requests of this chain. Without the lock.
cdef void refuse_ousted(Request *chain) noexcept nogil
