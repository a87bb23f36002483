"""Ensembles: the lane of requests that several models answer together, step by step (see
`inferd._native.ensembles.run`).

The queue policy of an ensemble counts requests from their arrival to their response, because none waits for an instance
of the ensemble.
"""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free

from inferd._native.atomic cimport load32, store32
from inferd._native.ensembles.frame cimport Run
from inferd._native.ensembles.plan cimport plan_build, plan_clear
from inferd._native.ensembles.run cimport Ensemble, StepLimit, run_end, run_new, run_reconsider, run_start
from inferd._native.refusal cimport REFUSAL_QUEUE_FULL, REFUSAL_QUEUE_TIMEOUT
from inferd._native.request.lane cimport (
    LANE_CLOSED,
    LANE_REFUSED,
    PUSHED,
    Lane,
    LaneHandle,
    Pushed,
    Scheduler,
    lane_free,
    lane_new,
    stricter,
)
from inferd._native.request.life cimport request_move
from inferd._native.request.request cimport REQUEST_NEW, REQUEST_TAKEN, Request, Terms, request_fail, request_refuse
from inferd._native.scheduling.dispatcher cimport Consumer, Line
from inferd._native.scheduling.levels cimport level_init, time_allowed
from inferd._native.scheduling.waking cimport BatchScheduler
from inferd._native.service.submission cimport Submission
from inferd._native.status cimport STATUS_CANCELLED, STATUS_RESOURCE_EXHAUSTED
from inferd._native.text cimport format_text


cdef Pushed push(Lane *lane, Request *request) noexcept nogil:
    cdef Ensemble *ensemble = <Ensemble *>lane
    cdef Run *run
    if load32(&ensemble.closed):
        return LANE_CLOSED
    if lane.max_queue and ensemble.requests >= lane.max_queue:
        request_refuse(request, REFUSAL_QUEUE_FULL, format_text(
            "Exceeds maximum queue size: ensemble '%s' version %s has %u requests in it, which is its limit",
            lane.signature.name.data, lane.signature.version_text.data, ensemble.requests))
        return LANE_REFUSED
    run = run_new(ensemble, request)
    if run == NULL:
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        return LANE_REFUSED
    request_move(request, REQUEST_NEW, REQUEST_TAKEN)
    request.run = run
    if not request.shared:
        limit(lane, request)
    ensemble.requests += 1
    run_start(run)
    return PUSHED


cdef void wake(Lane *lane) noexcept nogil:
    pass  # the lanes of the steps are woken on their own


cdef bint remove(Lane *lane, Request *request) noexcept nogil:
    # end the run, which abandons its steps; the request returns over the bridge, as after any response
    cdef Run *run = <Run *>request.run
    if run != NULL:
        request_fail(request, STATUS_CANCELLED, format_text("the request was cancelled"))
        run_end(run)
    return False


cdef bint expire(Lane *lane, Request *request) noexcept nogil:
    cdef Run *run = <Run *>request.run
    if run != NULL:
        request_refuse(request, REFUSAL_QUEUE_TIMEOUT, format_text(
            "Request timeout expired: ensemble '%s' version %s has held it for %lld us, its limit",
            lane.signature.name.data, lane.signature.version_text.data,
            <long long>(request.expires_ns - request.terms.executable_ns) // 1000))
        run_end(run)
    return False


cdef void limit(Lane *lane, Request *request) noexcept nogil:
    cdef int64_t allowed = time_allowed(&(<Ensemble *>lane).policy, request)
    if allowed:
        request.expires_ns = request.terms.executable_ns + allowed


cdef bint reconsider(Lane *lane, Request *request, const Terms *terms) noexcept nogil:
    # the steps of the request get its new terms, also the steps that begin later
    cdef Run *run = <Run *>request.run
    if run == NULL:
        return False
    request.terms = terms[0]
    run_reconsider(run)
    return True


cdef Line *line(Lane *lane, const Consumer *consumer) noexcept nogil:
    return NULL


cdef void close(Lane *lane) noexcept nogil:
    store32(&(<Ensemble *>lane).closed, 1)


cdef uint32_t pending(Lane *lane) noexcept nogil:
    return (<Ensemble *>lane).requests


cdef void ensemble_free(Lane *lane) noexcept nogil:
    cdef Ensemble *ensemble = <Ensemble *>lane
    plan_clear(&ensemble.plan)
    free(ensemble.step_limits)
    lane_free(lane)


cdef BatchScheduler ENSEMBLE = BatchScheduler(
    Scheduler(push, wake, remove, expire, limit, reconsider, close, pending, ensemble_free), line)


cdef Ensemble *ensemble_new(object spec, int64_t version) except NULL:
    cdef Ensemble *ensemble = <Ensemble *>lane_new(sizeof(Ensemble), &ENSEMBLE.requests, spec, version)
    ensemble.max_inflight = spec.ensemble.max_inflight
    try:
        level_init(&ensemble.policy, spec.queue.levels[0])
        plan_build(&ensemble.plan, spec)
        ensemble.step_limits = <StepLimit *>calloc(max(1, ensemble.plan.step_count), sizeof(StepLimit))
        if ensemble.step_limits == NULL:
            raise MemoryError
    except BaseException:
        ensemble_free(&ensemble.lane)
        raise
    return ensemble


cdef class EnsembleLane(LaneHandle):
    """The lane of an ensemble.

    Args:
        spec: the version's inferd.backends.api.ModelSpec, with an `ensemble`.
        version: its number.
        service: the inferd._native.service.infer.InferService through which the steps go.
        max_queue: requests that may be in it, unless its queue policy allows fewer; 0 for any number.
    """

    def __cinit__(self, spec, version: int, service, *, max_queue: int = 0):
        cdef Ensemble *ensemble
        entrance = service.entrance
        ensemble = ensemble_new(spec, version)
        self.lane = &ensemble.lane
        self.lane.max_queue = stricter(max_queue, spec.queue.levels[0].max_size)
        self.lane.may_lack = True
        self.service = service
        ensemble.submission = <Submission *>PyCapsule_GetPointer(entrance, "inferd.submission")
