"""The coalescer: identical requests in flight are executed once, and the response cache keeps responses for later ones.

The first request with a key makes a memo, which has a request of its own (`work`) that goes to the model. All requests
with the key, the first one too, wait at the memo. Each has its own deadline and its own time in the queue, and may
leave; when the last one leaves, the work is cancelled. While the work is queued, its terms combine those of all waiting
requests: the best priority, the latest deadline, the most lenient timeout. A delay ends in time for the earliest
deadline. All waiting requests get the response by reference. An instance may drop the work as late just after a request
with more time has joined it: the requests with time left then get a new memo.

With a cache the memo stays, and its work with it, which holds the key for comparisons and the response. A response
leaves the cache by last use when the cache exceeds its limit, when it is too old, and when its model version ends.

With a store outside of the server, the memo first waits for the lookup in the store, and the work is pushed only if the
store does not have the key. Requests with the same key that come meanwhile share the result, be it a response from the
store or an execution.

Everything happens in the front. `inferd._native.caching.cache_key` defines which requests are identical.
"""

from libc.stdint cimport UINT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport strlen

from inferd._native.atomic cimport fetch_add32
from inferd._native.caching.cache_key cimport KEY_PARAMETERS, Digest, key_digest, key_same
from inferd._native.caching.compaction cimport work_compact, work_held
from inferd._native.clock cimport now_ns
from inferd._native.list cimport list_append, list_remove
from inferd._native.memory.resource cimport block_give, block_share
from inferd._native.refusal cimport REFUSAL_NONE, REFUSAL_QUEUE_TIMEOUT
from inferd._native.request.accounting cimport account_answered, account_failed
from inferd._native.request.bridge cimport Bridge, bridge_abandon, bridge_deliver, bridge_return, bridge_watch
from inferd._native.request.lane cimport lane_discard
from inferd._native.request.life cimport (
    request_keep,
    request_move,
    request_reconsider,
    request_stop_waiting,
    request_wait,
)
from inferd._native.request.record cimport record_inner, record_looked_up, record_shares
from inferd._native.request.request cimport (
    REQUEST_NEW,
    REQUEST_TAKEN,
    OutputData,
    RequestState,
    Response,
    Terms,
    Wait,
    request_free,
    request_twin,
    response_fail,
)
from inferd._native.request.statistics cimport (
    FAILURE_BACKEND,
    FAILURE_CANCELED,
    FAILURE_OTHER,
    Failure,
    statistics_cache_hit,
    statistics_cache_missed,
    statistics_shared,
)
from inferd._native.status cimport STATUS_DEADLINE_EXCEEDED, STATUS_OK
from inferd._native.tensors.completion cimport response_lacks
from inferd._native.text cimport format_text

cdef enum:
    FIRST_BUCKETS = 256
    IN_TIME = 0              # Request.place of one that waits
    LATE = 1                 # its time in the queue is over, and it goes behind others


# ---------------------------------------------------------------------------------------------------------------------
# Memos by cache key

cdef inline bint is_current(const Memo *memo) noexcept nogil:
    # Whether nothing has been forgotten since the memo was made. Otherwise its response may come from a replaced
    # version, for example from an old step of an ensemble: only requests that wait already get it.
    return memo.era == memo.home.era


cdef inline bint counts(const Memo *memo) noexcept nogil:
    # whether further requests may get its response
    if memo.answered:
        return memo.era >= (<const Lane *>memo.work.lane).kept_since
    return is_current(memo)


cdef Memo *find(const Coalescer *self, Digest digest, const Request *request) noexcept nogil:
    cdef Memo *memo
    if self.bucket_count == 0:
        return NULL
    memo = self.buckets[digest.low & (self.bucket_count - 1)]
    while memo != NULL:
        if (memo.digest.low == digest.low and memo.digest.high == digest.high and counts(memo)
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
    memo.work.bridge = request.bridge
    memo.work.single = True
    memo.work.shared = True
    memo.work.uncounted = True
    memo.work.is_step = True  # so that an output may be missing; `give` decides whether the waiting requests allow that
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
    # free the memo, but not its work
    unlist(memo)
    forget_stale(memo)
    if memo.lookup != NULL:
        memo.home.store.forget(memo.lookup)
    free(memo)


# ---------------------------------------------------------------------------------------------------------------------
# Waiting requests

cdef inline uint64_t level_of(const Lane *lane, uint64_t priority) noexcept nogil:
    # for comparison: the smallest goes first
    if lane.level_count:
        return priority if 1 <= priority <= lane.level_count else lane.default_level
    return priority if priority else UINT64_MAX  # of an ensemble, whose steps have different defaults


cdef void add_terms(Terms *terms, const Terms *other, const Lane *lane) noexcept nogil:
    # add the terms of one more waiting request
    terms.deadline_ns = max(terms.deadline_ns, other.deadline_ns) if terms.deadline_ns and other.deadline_ns else 0
    terms.timeout_us = max(terms.timeout_us, other.timeout_us) if terms.timeout_us and other.timeout_us else 0
    if other.due_ns and (terms.due_ns == 0 or other.due_ns < terms.due_ns):
        terms.due_ns = other.due_ns
    if level_of(lane, other.priority) < level_of(lane, terms.priority):
        terms.priority = other.priority


cdef inline bint are_same(const Terms *a, const Terms *b) noexcept nogil:
    return (a.deadline_ns == b.deadline_ns and a.timeout_us == b.timeout_us and a.due_ns == b.due_ns
            and a.priority == b.priority)


cdef void set_terms(Memo *memo, const Terms *terms) noexcept nogil:
    # set the terms of the work
    if memo.asking:
        memo.work.terms = terms[0]
    elif not memo.taken:
        memo.taken = not request_reconsider(memo.work, terms)


cdef void join(Memo *memo, Request *request) noexcept nogil:
    request_wait(request, &FOR_RESPONSE, memo)
    request.place = IN_TIME
    request.queued_ns = request.terms.executable_ns
    list_append(&memo.waiting, request)
    memo.count += 1


cdef void agree(Memo *memo, Request *request) noexcept nogil:
    # The request has joined others whose work may wait in a queue: let the work have its terms, too.
    cdef Lane *lane = <Lane *>memo.work.lane
    cdef Terms terms = memo.work.terms
    if memo.taken:
        return
    lane.scheduler.limit(lane, request)
    add_terms(&terms, &request.terms, lane)
    if memo.late or not are_same(&terms, &memo.work.terms):
        set_terms(memo, &terms)


cdef void detach(Memo *memo, Request *request, RequestState after) noexcept nogil:
    list_remove(&memo.waiting, request)
    memo.count -= 1
    memo.late -= request.place == LATE
    request_stop_waiting(request, after)


cdef void withdraw(Memo *memo, Request *request) noexcept nogil:
    # the request no longer waits; after the last one the work is cancelled
    cdef Request *work = memo.work
    detach(memo, request, REQUEST_TAKEN)
    if memo.delivering:
        return
    if memo.waiting.first == NULL:
        if memo.asking:
            memo_free(memo)
            lane_discard(work)
        else:
            memo_free(memo)
            bridge_abandon(work)
    elif not memo.stale and not memo.taken:
        memo.stale = True
        list_append(&memo.home.stale, memo)


cdef void leave_memo(Request *request) noexcept nogil:
    withdraw(<Memo *>request.awaited, request)
    account_failed(request, now_ns(), FAILURE_CANCELED)


cdef bint expire(Request *request) noexcept nogil:
    # The time of this request in the queue is over, that of others may not be. It counts only while the work is queued.
    cdef Memo *memo = <Memo *>request.awaited
    cdef Lane *lane = <Lane *>memo.work.lane
    cdef Terms terms = memo.work.terms
    set_terms(memo, &terms)  # finds out whether it is queued
    if memo.taken:
        request.expires_ns = 0
        return False
    if not request.yields:
        withdraw(memo, request)
        return True
    request.expires_ns = 0
    request.place = LATE
    memo.late += 1
    if memo.late == memo.count:
        memo.work.yields = True
        lane.scheduler.expire(lane, memo.work)
    return False


cdef Wait FOR_RESPONSE = Wait(leave_memo, expire, NULL)


cdef void settle(Memo *memo) noexcept nogil:
    cdef const Request *request = memo.waiting.first
    cdef Terms terms = memo.work.terms
    terms.deadline_ns = request.terms.deadline_ns
    terms.due_ns = request.terms.due_ns
    terms.timeout_us = request.terms.timeout_us
    terms.priority = request.terms.priority
    request = request.next
    while request != NULL:
        add_terms(&terms, &request.terms, <const Lane *>memo.work.lane)
        request = request.next
    if not are_same(&terms, &memo.work.terms):
        set_terms(memo, &terms)


cdef void forget_stale(Memo *memo) noexcept nogil:
    if memo.stale:
        memo.stale = False
        list_remove(&memo.home.stale, memo)


cdef void coalescer_settle(Coalescer *self) noexcept nogil:
    cdef Memo *memo
    while self.stale.first != NULL:
        memo = self.stale.first
        forget_stale(memo)
        settle(memo)


cdef void give(Request *request, const Response *source) noexcept nogil:
    # Both requests want the same outputs, so these are shared. An output that the model left out is an error, except
    # for steps of ensembles. An ensemble itself may lack any.
    cdef Response *to = &request.response
    cdef uint32_t i
    cdef OutputData *out
    cdef bint may_lack = request.is_step or (<Lane *>request.lane).may_lack
    cdef bint lacks
    for i in range(request.signature.output_count):
        out = &to.outputs[i]
        lacks = out.wanted and not source.outputs[i].wanted
        block_give(out.block)
        out[0] = source.outputs[i]
        if out.block != NULL:
            block_share(out.block)
        if lacks and not may_lack and to.status == STATUS_OK:
            response_lacks(to, i)
    to.parameters = source.parameters
    to.parameter_count = source.parameter_count
    if source.parameter_block != NULL:
        to.parameter_block = block_share(source.parameter_block)


cdef bint is_overdue(const Request *work, const Response *response, int status, int64_t now) noexcept nogil:
    # whether the work was not executed because its own time was over
    if status == STATUS_DEADLINE_EXCEEDED and 0 < work.terms.deadline_ns <= now:
        return True
    return 0 < work.expires_ns <= now and response != NULL and response.refusal == REFUSAL_QUEUE_TIMEOUT


cdef inline bint has_time(const Request *request, int64_t now) noexcept nogil:
    return ((request.terms.deadline_ns == 0 or request.terms.deadline_ns > now)
            and (request.expires_ns == 0 or request.yields or request.expires_ns > now))


cdef void start_over(Memo *overdue, int64_t now) noexcept nogil:
    # the waiting requests with time left get new work, with their time
    cdef Coalescer *self = overdue.home
    cdef Bridge *bridge = <Bridge *>overdue.work.bridge
    cdef Lane *lane = <Lane *>overdue.work.lane
    cdef Memo *memo = NULL
    cdef Request *request = overdue.waiting.first
    cdef Request *following
    while request != NULL:
        following = request.next
        lane.scheduler.limit(lane, request)
        if has_time(request, now):
            if memo == NULL:
                memo = memo_new(self, overdue.digest, request)
                if memo == NULL:
                    return  # there is no memory, so they get the error of the old work
                memo.era = overdue.era
                record_inner(memo.work, request)
            elif request.record != NULL:
                record_shares(request, memo.work)
            detach(overdue, request, REQUEST_NEW)
            join(memo, request)
            bridge_watch(bridge, request)
            add_terms(&memo.work.terms, &request.terms, lane)
        request = following
    if memo != NULL:
        self.push(self.push_context, memo.work)


cdef void answered(void *sink, Response *response, int status, const char *details) noexcept nogil:
    cdef Memo *memo = <Memo *>sink
    cdef Bridge *bridge = <Bridge *>memo.work.bridge
    cdef Lane *lane = <Lane *>memo.work.lane
    cdef Request *request
    cdef Failure otherwise = FAILURE_OTHER if memo.work.state == REQUEST_NEW else FAILURE_BACKEND
    cdef int64_t now = now_ns()
    forget_stale(memo)
    if status != STATUS_OK and is_overdue(memo.work, response, status, now):
        start_over(memo, now)
    memo.delivering = True
    while memo.waiting.first != NULL:  # a delivery may make other requests leave
        request = memo.waiting.first
        detach(memo, request, REQUEST_TAKEN)
        request.phases = memo.work.phases
        if status == STATUS_OK:
            give(request, response)
        else:
            response_fail(&request.response, status, format_text("%.*s", <int>strlen(details), details))
            request.response.refusal = response.refusal if response != NULL else REFUSAL_NONE
        if request.response.status == STATUS_OK:
            account_answered(request, now)
        else:
            account_failed(request, now, otherwise)
        bridge_deliver(bridge, &request.response)
    memo.delivering = False
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
    if self.limit == 0:
        return False
    memo.size = sizeof(Memo) + sizeof(Memo *) + work_held(work, self.compares)
    if memo.size > self.largest or not work_compact(work, self.compares):
        return False
    request_keep(work)
    work.sink = NULL
    memo.answered = True
    memo.expires_ns = begin + self.ttl_ns if self.ttl_ns else 0
    self.size += memo.size
    self.entries += 1
    list_append(&self.kept, memo)
    add_to_lane(memo)
    while self.size > self.limit:
        self.evictions += 1
        drop(self.kept.first)
    statistics_cache_missed(&(<Lane *>work.lane).statistics, 0, <uint64_t>(now_ns() - begin))
    return True


# The kept memos of a lane are also in a list of their own: the end of a version must not look at those of all others.

cdef void add_to_lane(Memo *memo) noexcept nogil:
    cdef Lane *lane = <Lane *>memo.work.lane
    memo.behind = <Memo *>lane.kept
    if memo.behind != NULL:
        memo.behind.before = memo
    lane.kept = memo


cdef void remove_from_lane(Memo *memo) noexcept nogil:
    if memo.before != NULL:
        memo.before.behind = memo.behind
    else:
        (<Lane *>memo.work.lane).kept = memo.behind
    if memo.behind != NULL:
        memo.behind.before = memo.before


cdef void drop(Memo *memo) noexcept nogil:
    # remove a kept memo
    list_remove(&memo.home.kept, memo)
    remove_from_lane(memo)
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
    if not request.uncounted:
        statistics_shared(&lane.statistics, <uint64_t>(now - request.arrived_ns))
    if request.record != NULL:
        record_looked_up(request, begin, now, True)
    bridge_return(<Bridge *>request.bridge, &request.response, &request.response)


cdef void hit(Memo *memo, Request *request, int64_t begin) noexcept nogil:
    list_remove(&memo.home.kept, memo)
    list_append(&memo.home.kept, memo)
    request_move(request, REQUEST_NEW, REQUEST_TAKEN)
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
            (<Lane *>request.lane).scheduler.limit(lane, request)
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
        agree(memo, request)
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


cdef inline int64_t looks_since(const Memo *memo, const Request *request) noexcept nogil:
    # a request may have joined a lookup that was under way
    return max(memo.asked_ns, request.arrived_ns)


cdef void coalescer_found(Memo *memo) noexcept nogil:
    cdef Request *request
    while memo.waiting.first != NULL:
        request = memo.waiting.first
        detach(memo, request, REQUEST_TAKEN)
        return_hit(memo, request, looks_since(memo, request))
    lane_discard(memo.work)
    memo_free(memo)


cdef Request *coalescer_missing(Memo *memo) noexcept nogil:
    # from now on they wait for an instance
    cdef Request *request = memo.waiting.first
    cdef Lane *lane = <Lane *>memo.work.lane
    cdef int64_t now = now_ns()
    memo.asking = False
    memo.work.terms.executable_ns = now
    while request != NULL:
        count_miss(memo.home, request, looks_since(memo, request))
        request.terms.executable_ns = now
        lane.scheduler.limit(lane, request)
        bridge_watch(<Bridge *>request.bridge, request)
        add_terms(&memo.work.terms, &request.terms, lane)
        request = request.next
    return memo.work


cdef void coalescer_forget(Coalescer *self, Lane *lane) noexcept nogil:
    self.era += 1
    lane.kept_since = self.era


cdef bint coalescer_drop(Coalescer *self, Lane *lane, uint32_t most) noexcept nogil:
    cdef uint32_t _
    for _ in range(most):
        if lane.kept == NULL:
            return False
        drop(<Memo *>lane.kept)
    return lane.kept != NULL


cdef void coalescer_clear(Coalescer *self) noexcept nogil:
    while self.kept.first != NULL:
        drop(self.kept.first)
    free(self.buckets)
    self.buckets = NULL
    self.bucket_count = 0
