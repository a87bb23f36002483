"""The coalescer: identical requests in flight are executed once, and the response cache keeps responses for later ones.

The first request with a key makes a memo, which has a request of its own (`work`) that goes to the model. All requests
with the key, the first one too, wait at the memo. Each has its own deadline, and may leave; when the last one leaves,
the work is cancelled. All waiting requests get the response by reference. With a cache the memo stays, and its work
with it, which holds the key for comparisons and the response. A response leaves the cache by last use when the cache
exceeds its limit, when it is too old, and when its model version ends.

With a store outside of the server, the memo first waits for the lookup in the store, and the work is pushed only if the
store does not have the key. Requests with the same key that come meanwhile share the result, be it a response from the
store or an execution.

Everything happens on the loop. `_native.caching.cache_key` defines which requests are identical.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport strlen

from _native.atomic cimport fetch_add32
from _native.caching.cache_key cimport KEY_PARAMETERS, Digest, key_digest, key_same
from _native.caching.compaction cimport work_compact, work_held
from _native.clock cimport now_ns
from _native.list cimport list_append, list_remove
from _native.memory.resource cimport block_give, block_share
from _native.request.accounting cimport account_failed, failure_of
from _native.request.bridge cimport Bridge, bridge_abandon, bridge_deliver, bridge_return
from _native.request.lane cimport lane_discard
from _native.request.record cimport record_inner, record_looked_up, record_shares
from _native.request.request cimport (
    REQUEST_TAKEN,
    REQUEST_WAITING,
    OutputData,
    Response,
    request_free,
    request_twin,
    response_fail,
)
from _native.request.statistics cimport (
    FAILURE_BACKEND,
    FAILURE_CANCELED,
    statistics_cache_hit,
    statistics_cache_missed,
    statistics_failed,
    statistics_shared,
)
from _native.status cimport STATUS_OK
from _native.tensors.completion cimport response_lacks
from _native.text cimport format_text

cdef enum:
    FIRST_BUCKETS = 256


# ---------------------------------------------------------------------------------------------------------------------
# Memos by cache key

cdef inline bint is_current(const Memo *memo) noexcept nogil:
    # Whether nothing has been forgotten since the memo was made. Otherwise its response may come from a replaced
    # version, for example from an old step of an ensemble: only requests that wait already get it.
    return memo.era == memo.home.era


cdef Memo *find(const Coalescer *self, Digest digest, const Request *request) noexcept nogil:
    cdef Memo *memo
    if self.bucket_count == 0:
        return NULL
    memo = self.buckets[digest.low & (self.bucket_count - 1)]
    while memo != NULL:
        if (memo.digest.low == digest.low and memo.digest.high == digest.high and (memo.answered or is_current(memo))
                and key_same(memo.work, request, self.compares)):
            return memo
        memo = memo.in_bucket
    return NULL


cdef bint make_room(Coalescer *self) noexcept nogil:
    # make room for one more memo
    cdef uint32_t count = max(<uint32_t>FIRST_BUCKETS, self.bucket_count * 2)
    cdef Memo **buckets
    cdef Memo *memo
    cdef Memo *following
    cdef uint32_t i
    if self.count < self.bucket_count:
        return True
    buckets = <Memo **>calloc(count, sizeof(Memo *))
    if buckets == NULL:
        return self.bucket_count > 0
    for i in range(self.bucket_count):
        memo = self.buckets[i]
        while memo != NULL:
            following = memo.in_bucket
            memo.in_bucket = buckets[memo.digest.low & (count - 1)]
            buckets[memo.digest.low & (count - 1)] = memo
            memo = following
    free(self.buckets)
    self.buckets = buckets
    self.bucket_count = count
    return True


cdef void unlist(Memo *memo) noexcept nogil:
    cdef Coalescer *self = memo.home
    cdef Memo **link = &self.buckets[memo.digest.low & (self.bucket_count - 1)]
    while link[0] != memo:
        link = &link[0].in_bucket
    link[0] = memo.in_bucket
    self.count -= 1


cdef Memo *memo_new(Coalescer *self, Digest digest, const Request *request) noexcept nogil:
    cdef Memo *memo
    cdef Memo **bucket
    if not make_room(self):
        return NULL
    memo = <Memo *>calloc(1, sizeof(Memo))
    if memo == NULL:
        return NULL
    memo.work = request_twin(request)
    if memo.work == NULL:
        free(memo)
        return NULL
    fetch_add32(&(<Lane *>memo.work.lane).in_flight, 1)
    memo.work.deliver = answered
    memo.work.sink = memo
    memo.work.single = True
    memo.work.is_step = True  # so an output may be missing; whether the waiting requests allow that, `give` decides
    memo.output_count = wanted_outputs(memo.work)
    memo.home = self
    memo.era = self.era
    memo.digest = digest
    bucket = &self.buckets[digest.low & (self.bucket_count - 1)]
    memo.in_bucket = bucket[0]
    bucket[0] = memo
    self.count += 1
    return memo


cdef void memo_free(Memo *memo) noexcept nogil:
    # its work is not freed
    unlist(memo)
    if memo.lookup != NULL:
        memo.home.store.forget(memo.lookup)
    free(memo)


# ---------------------------------------------------------------------------------------------------------------------
# Waiting requests

cdef void join(Memo *memo, Request *request) noexcept nogil:
    request.state = REQUEST_WAITING
    request.leave = leave
    request.awaited = memo
    list_append(&memo.waiting, request)


cdef void detach(Memo *memo, Request *request) noexcept nogil:
    list_remove(&memo.waiting, request)
    request.state = REQUEST_TAKEN
    request.leave = NULL
    request.awaited = NULL


cdef void leave(Request *request) noexcept nogil:
    cdef Memo *memo = <Memo *>request.awaited
    cdef Request *work = memo.work
    cdef bint counts = True
    detach(memo, request)
    if memo.waiting.first == NULL and not memo.delivering:
        if memo.asking:
            lane_discard(memo.work)
            memo_free(memo)
        else:
            memo_free(memo)
            bridge_abandon(work)  # it counts the request
            counts = False
    if counts:
        account_failed(request, now_ns(), FAILURE_CANCELED)


cdef void give(Request *request, const Response *source) noexcept nogil:
    # Both requests want the same outputs, so these are shared. An output that the model left out is an error, except
    # for steps of ensembles.
    cdef Response *to = &request.response
    cdef uint32_t i
    cdef OutputData *out
    cdef bint lacks
    for i in range(request.signature.output_count):
        out = &to.outputs[i]
        lacks = out.wanted and not source.outputs[i].wanted
        block_give(out.block)
        out[0] = source.outputs[i]
        if out.block != NULL:
            block_share(out.block)
        if lacks and not request.is_step and to.status == STATUS_OK:
            response_lacks(to, i)
    to.parameters = source.parameters
    to.parameter_count = source.parameter_count
    if source.parameter_block != NULL:
        to.parameter_block = block_share(source.parameter_block)


cdef void answered(void *sink, Response *response, int status, const char *details) noexcept nogil:
    cdef Memo *memo = <Memo *>sink
    cdef Bridge *bridge = <Bridge *>memo.work.bridge
    cdef Lane *lane = <Lane *>memo.work.lane
    cdef Request *request
    cdef uint64_t followers = 0
    cdef uint64_t ns = 0
    cdef int64_t now = now_ns()
    memo.delivering = True
    while memo.waiting.first != NULL:  # a delivery may make others leave
        request = memo.waiting.first
        detach(memo, request)
        if followers:
            ns += <uint64_t>(now - request.arrived_ns)
        else:
            request.phases = memo.work.phases
        followers += 1
        if status == STATUS_OK:
            give(request, response)
        else:
            response_fail(&request.response, status, format_text("%.*s", <int>strlen(details), details))
            request.response.reason = response.reason if response != NULL else NULL
        bridge_deliver(bridge, &request.response)
    memo.delivering = False
    if followers > 1:  # the first one has been counted by its batch
        if status == STATUS_OK:
            statistics_shared(&lane.statistics, followers - 1, ns)
        else:
            statistics_failed(&lane.statistics, failure_of(memo.work, FAILURE_BACKEND), followers - 1, ns)
    if status != STATUS_OK or not lane.caches or not is_current(memo) or not keep(memo):
        memo_free(memo)


# ---------------------------------------------------------------------------------------------------------------------
# The cache

cdef uint32_t wanted_outputs(const Request *request) noexcept nogil:
    cdef uint32_t count = 0
    cdef uint32_t i
    for i in range(request.signature.output_count):
        count += request.response.outputs[i].wanted
    return count


cdef bint keep(Memo *memo) noexcept nogil:
    # keep a memo with its response; False: it is not kept
    cdef Coalescer *self = memo.home
    cdef Request *work = memo.work
    cdef int64_t begin = now_ns()
    if wanted_outputs(work) < memo.output_count:
        return False  # some outputs are missing, so it is no response for this key
    if memo.lookup != NULL:
        self.store.keep(memo.lookup, &work.response)
        statistics_cache_missed(&(<Lane *>work.lane).statistics, 0, <uint64_t>(now_ns() - begin))
        return False
    if self.limit == 0 or not work_compact(work, self.compares):
        return False
    memo.size = sizeof(Memo) + work_held(work)
    if memo.size > self.largest:
        return False
    work.kept = True
    work.sink = NULL
    memo.answered = True
    memo.expires_ns = begin + self.ttl_ns if self.ttl_ns else 0
    self.size += memo.size
    self.entries += 1
    list_append(&self.kept, memo)
    while self.size > self.limit:
        self.evictions += 1
        drop(self.kept.first)
    statistics_cache_missed(&(<Lane *>work.lane).statistics, 0, <uint64_t>(now_ns() - begin))
    return True


cdef void drop(Memo *memo) noexcept nogil:
    # a memo that is kept
    list_remove(&memo.home.kept, memo)
    memo.home.size -= memo.size
    memo.home.entries -= 1
    request_free(memo.work)
    memo_free(memo)


cdef void return_hit(const Memo *memo, Request *request, int64_t begin) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    cdef int64_t now
    give(request, &memo.work.response)
    now = now_ns()
    memo.home.hits += 1
    statistics_cache_hit(&lane.statistics, now, <uint64_t>(now - begin))
    statistics_shared(&lane.statistics, 1, <uint64_t>(now - request.arrived_ns))
    if request.record != NULL:
        record_looked_up(request, begin, now, True)
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


cdef void hit(Memo *memo, Request *request, int64_t begin) noexcept nogil:
    list_remove(&memo.home.kept, memo)
    list_append(&memo.home.kept, memo)
    request.state = REQUEST_TAKEN
    return_hit(memo, request, begin)


# ---------------------------------------------------------------------------------------------------------------------
# Entering and leaving

cdef bint may_be_kept(const Coalescer *self, const Lane *lane) noexcept nogil:
    return lane.caches and (self.limit > 0 or self.store.owner != NULL)


cdef bint ask_store(Coalescer *self, Memo *memo, int64_t now) noexcept nogil:
    # begin a lookup; False: there is no store, or it cannot be asked
    if self.store.owner == NULL or not (<Lane *>memo.work.lane).caches or not self.store.look(self.store.owner, memo):
        return False
    memo.asking = True
    memo.asked_ns = now
    return True


cdef Request *coalescer_enter(Coalescer *self, Request *request) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    cdef int64_t begin
    cdef Digest digest
    cdef Memo *memo
    if (request.correlation.given or request.message.parameter_count > KEY_PARAMETERS
            or not (lane.coalesces or may_be_kept(self, lane))):
        return request
    begin = now_ns()
    digest = key_digest(request)
    memo = find(self, digest, request)
    if memo != NULL and memo.answered and 0 < memo.expires_ns <= begin:
        drop(memo)
        memo = NULL
    if memo != NULL and memo.answered:
        hit(memo, request, begin)
        return NULL
    if memo != NULL and (memo.asking or lane.coalesces):
        join_others(self, memo, request, begin)
        return NULL
    if memo == NULL:
        memo = memo_new(self, digest, request)
        if memo != NULL:
            join(memo, request)
            record_inner(memo.work, request)
            if ask_store(self, memo, begin):
                return NULL
            count_miss(self, request, begin)
            return memo.work
    count_miss(self, request, begin)
    return request


cdef void join_others(Coalescer *self, Memo *memo, Request *request, int64_t begin) noexcept nogil:
    self.followers += 1
    join(memo, request)
    if request.record != NULL:
        record_shares(request, memo.work)
    if not memo.asking:
        count_miss(self, request, begin)


cdef void count_miss(Coalescer *self, Request *request, int64_t begin) noexcept nogil:
    cdef Lane *lane = <Lane *>request.lane
    cdef int64_t now
    if may_be_kept(self, lane):
        now = now_ns()
        self.misses += 1
        statistics_cache_missed(&lane.statistics, 1, <uint64_t>(now - begin))
        if request.record != NULL:
            record_looked_up(request, begin, now, False)


cdef void coalescer_found(Memo *memo) noexcept nogil:
    cdef Request *request
    while memo.waiting.first != NULL:
        request = memo.waiting.first
        detach(memo, request)
        return_hit(memo, request, memo.asked_ns)
    lane_discard(memo.work)
    memo_free(memo)


cdef Request *coalescer_missing(Memo *memo) noexcept nogil:
    cdef Request *request = memo.waiting.first
    memo.asking = False
    while request != NULL:
        count_miss(memo.home, request, memo.asked_ns)
        request = request.next
    return memo.work


cdef void coalescer_forget(Coalescer *self, const Lane *lane) noexcept nogil:
    cdef Memo *memo = self.kept.first
    cdef Memo *newer
    self.era += 1
    while memo != NULL:
        newer = memo.next
        if lane == NULL or memo.work.lane == lane:
            drop(memo)
        memo = newer


cdef void coalescer_clear(Coalescer *self) noexcept nogil:
    free(self.buckets)
    self.buckets = NULL
    self.bucket_count = 0
