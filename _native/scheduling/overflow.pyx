"""Full queues: requests of the client with most of the queue make room for those of other clients.

While a queue is full, and until it is half empty again, it counts how many requests of each client wait at each level
(`inferd._native.shares`).
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from inferd._native.clock cimport now_ns
from inferd._native.refusal cimport REFUSAL_QUEUE_FULL
from inferd._native.request.accounting cimport account_failed
from inferd._native.request.bridge cimport Bridge, bridge_return
from inferd._native.request.request cimport Request, request_refuse
from inferd._native.request.statistics cimport FAILURE_OTHER
from inferd._native.scheduling.levels cimport Levels, level_at, level_is_full, levels_last, levels_remove
from inferd._native.shares cimport Share, Shares, shares_add, shares_begin, shares_subtract, shares_yielding
from inferd._native.text cimport format_text

cdef enum:
    OUSTED = 32              # the part of a full queue that makes room at a time


cdef bint count_shares(const Levels *levels, Shares *shares) noexcept nogil:
    # count the requests that wait, by client and level; False: no memory
    cdef const Request *request = levels.first
    if shares.buckets != NULL:
        return True
    if not shares_begin(shares):
        return False
    while request != NULL:
        if not shares_add(shares, request.origin.client, level_at(request)):
            return False
        request = request.next
    return True


cdef Request *oust(Levels *levels, Shares *shares, const Request *coming, uint32_t level) noexcept nogil:
    # Several requests go at a time, so that the queue is not searched for each.
    cdef uint32_t last = level if level_is_full(levels, level) else levels.level_count - 1
    cdef uint32_t most = 0
    cdef const Share *share
    cdef Request *request
    cdef Request *previous
    cdef Request *chain = NULL
    cdef uint64_t client
    if not count_shares(levels, shares):
        return NULL
    share = shares_yielding(shares, coming.origin.client, level, last, levels.count, &most)
    if share == NULL:
        return NULL
    client = share.client
    last = share.level
    most = min(most, max(levels.count // OUSTED, <uint32_t>1))
    request = levels_last(levels, last)
    while request != NULL and most and level_at(request) == last:
        previous = request.previous
        if request.origin.client == client:
            shares_subtract(shares, client, last)
            levels_remove(levels, request)
            request.next = chain
            chain = request
            most -= 1
        request = previous
    return chain


cdef void refuse_ousted(Request *chain) noexcept nogil:
    cdef int64_t now = now_ns()
    cdef Request *following
    while chain != NULL:
        following = chain.next
        request_refuse(chain, REFUSAL_QUEUE_FULL, format_text(
            "Exceeds maximum queue size: the queue of model '%s' version %s is full, and this client has the most "
            "requests waiting in it: those of such a client are refused first, so that other clients are served",
            chain.signature.name.data, chain.signature.version_text.data))
        account_failed(chain, now, FAILURE_OTHER)
        bridge_return(<Bridge *>chain.bridge, &chain.response, &chain.response)
        chain = following
