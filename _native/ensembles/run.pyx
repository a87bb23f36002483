"""Runs: one request of an ensemble, from its tensors to its last response.

A step of a run starts when all tensors that it reads are known. Its request enters its model's lane like any other, so
each model queues and batches by its own policy. Tensors pass from step to step by reference. Only steps that the wanted
outputs need are executed.

Each response of a decoupled step begins a frame (`inferd._native.ensembles.frame`), in which the steps behind it are
executed again. The ensemble responds once for each frame, in the order of their beginnings.

Everything happens in the front, without a lock. A run ends once, by `finish`: with its last response, with the
first error of a step, or when no client waits for it. Steps that still run are then abandoned.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from inferd._native.assertion cimport assert_that
from inferd._native.clock cimport now_ns
from inferd._native.ensembles.frame cimport (
    CALL_AWAITING,
    CALL_OVER,
    CALL_RUNNING,
    CALL_WAITING,
    VALUE_MISSING,
    VALUE_PRESENT,
    Frame,
    Needs,
    Run,
    Sequence,
    StepCall,
    Value,
    frame_free,
    frame_is_complete,
    frame_new,
    frame_resolve,
    frame_to_send,
    frame_value,
    frames_end,
    sequence_copy,
    value_release,
)
from inferd._native.ensembles.plan cimport EnsemblePlan, PlanStep, plan_encloses, plan_needs
from inferd._native.ensembles.response cimport ensemble_response
from inferd._native.ensembles.step cimport (
    step_accept,
    step_lane,
    step_leave,
    step_request,
    step_sequence,
    step_should_run,
)
from inferd._native.list cimport list_append, list_remove
from inferd._native.memory.resource cimport block_share
from inferd._native.protobuf.codec cimport Str
from inferd._native.refusal cimport REFUSAL_NONE, Refusal, refusal_usual
from inferd._native.request.accounting cimport account_failed, execution_add
from inferd._native.request.bridge cimport bridge_abandon, bridge_deliver, bridge_return
from inferd._native.request.lane cimport Lane
from inferd._native.request.life cimport request_reconsider
from inferd._native.request.record cimport Record
from inferd._native.request.request cimport (
    InputData,
    Request,
    Response,
    Terms,
    request_fail,
    response_free,
    response_new,
)
from inferd._native.request.statistics cimport FAILURE_BACKEND, Execution, Statistics, statistics_executed
from inferd._native.service.model_waits cimport (
    ModelWait,
    model_ask_end,
    model_waits_add,
    model_waits_for,
    model_waits_remove,
)
from inferd._native.service.submission cimport Submission, submit_request
from inferd._native.status cimport (
    STATUS_INVALID_ARGUMENT,
    STATUS_NOT_FOUND,
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAVAILABLE,
)
from inferd._native.text cimport clip, format_text, text_or_no_memory


cdef inline Ensemble *ensemble_of(const Run *run) noexcept nogil:
    return <Ensemble *>run.ensemble


# ---------------------------------------------------------------------------------------------------------------------
# The beginning of a run

cdef void find_needs(const EnsemblePlan *plan, const Request *request, uint8_t *flags, Needs *needs) noexcept nogil:
    # the tensors and steps that the wanted outputs need; `flags` has room for outputs, scopes, tensors and steps
    cdef uint8_t *outputs = flags
    cdef uint8_t *sends = outputs + plan.output_count
    cdef uint8_t *tensors = sends + plan.scope_count
    cdef uint8_t *steps = tensors + plan.tensor_count
    cdef uint32_t i, scope
    needs.plan = plan
    needs.outputs = outputs
    needs.sends = sends
    needs.tensors = tensors
    needs.steps = steps
    memset(sends, 0, plan.scope_count)
    for i in range(plan.output_count):
        outputs[i] = request.response.outputs[i].wanted
        if outputs[i]:
            sends[plan.tensors[plan.outputs[i]].scope] = 1
    # the outputs of an outer scope are sent with those of the inner one
    for scope in range(plan.scope_count):
        for i in range(plan.scope_count):
            if i != scope and sends[i] and plan_encloses(plan, scope, i):
                sends[scope] = 0
    plan_needs(plan, outputs, tensors, steps)


cdef Run *run_new(Ensemble *ensemble, Request *request) noexcept nogil:
    cdef const EnsemblePlan *plan = &ensemble.plan
    cdef uint32_t flags = plan.output_count + plan.scope_count + plan.tensor_count + plan.step_count
    cdef Run *run = <Run *>malloc(sizeof(Run) + flags)
    if run == NULL:
        return NULL
    memset(run, 0, sizeof(Run))
    run.ensemble = ensemble
    run.request = request
    find_needs(plan, request, <uint8_t *>(run + 1), &run.needs)
    if frame_new(run, 0, NULL) == NULL:
        free(run)
        return NULL
    run.first.sequence.correlation = request.correlation
    run.first.sequence.start = request.sequence_start
    run.first.sequence.end = request.sequence_end
    if request.block != NULL:
        run.first.sequence.block = block_share(request.block)
    return run


cdef void give_inputs(Run *run) noexcept nogil:
    # set the tensors of the request
    cdef Ensemble *ensemble = ensemble_of(run)
    cdef const InputData *input
    cdef Value *value
    cdef uint32_t i
    for i in range(ensemble.plan.input_count):
        input = &run.request.inputs[i]
        if not input.present:
            frame_resolve(run.first, ensemble.plan.inputs[i], VALUE_MISSING)
            continue
        value = frame_value(run.first, ensemble.plan.inputs[i])
        value.datatype = ensemble.lane.signature.inputs[i].datatype
        value.data = input.data
        value.size = input.size
        value.block = block_share(input.block)
        value.rank = input.rank
        memcpy(value.shape, input.shape, input.rank * sizeof(int64_t))
        frame_resolve(run.first, ensemble.plan.inputs[i], VALUE_PRESENT)


cdef void run_start(Run *run) noexcept nogil:
    give_inputs(run)
    proceed(run)


# ---------------------------------------------------------------------------------------------------------------------
# Steps

cdef void fail(Run *run, int status, Refusal refusal, const char *details) noexcept nogil:
    # end the run with this error of a step, if it is the first one
    cdef Ensemble *ensemble = ensemble_of(run)
    if run.status != STATUS_OK:
        return
    run.status = status
    run.refusal = refusal
    run.details = format_text("in ensemble '%s', %s", ensemble.lane.signature.name.data, text_or_no_memory(details))


cdef void release_reads(StepCall *call) noexcept nogil:
    cdef const PlanStep *step = &call.frame.run.needs.plan.steps[call.step]
    cdef uint32_t i
    for i in range(step.read_count):
        value_release(frame_value(call.frame, step.reads[i]))


cdef void close_call(StepCall *call) noexcept nogil:
    call.state = CALL_OVER
    call.frame.open_calls -= 1


cdef void find_sequence(StepCall *call) noexcept nogil:
    # the sequence of the step's request: that of a step before it, otherwise that of the ensemble's request
    cdef Run *run = call.frame.run
    cdef const PlanStep *step = &run.needs.plan.steps[call.step]
    cdef const Sequence *found = &run.first.sequence
    cdef const Sequence *sequence
    cdef uint32_t i
    for i in range(step.input_count):
        sequence = frame_value(call.frame, step.inputs[i].tensor).sequence
        if sequence != NULL and sequence.changed:
            found = sequence
            break
    sequence_copy(&call.sequence, found)


cdef void give_up(StepCall *call, int status, const char *details) noexcept nogil:
    # the request of the call was not submitted, so the run fails; where it lacks a model, that is a refusal
    cdef Run *run = call.frame.run
    cdef bint refused = status == STATUS_UNAVAILABLE or status == STATUS_NOT_FOUND
    run.active -= 1
    close_call(call)
    fail(run, status, refusal_usual(status) if refused else REFUSAL_NONE, details)


cdef bint await_model(StepCall *call, char **details) noexcept nogil:
    # Have the call wait until its model is loaded. False: models are not loaded on demand, or this call cannot wait.
    cdef Run *run = call.frame.run
    cdef Ensemble *ensemble = ensemble_of(run)
    cdef Submission *submission = ensemble.submission
    if submission.missed == NULL or run.request.is_warmup:  # the load that warms up holds the locks of the steps
        return False
    call.wait.model = run.needs.plan.steps[call.step].model
    call.wait.ask = submission.missed(submission.missed_context, call, must_not_wait, call.wait.model, False,
                                      submission.asked_by)
    if call.wait.ask == NULL:
        return False
    free(details[0])
    details[0] = NULL
    call.wait.owner = call
    call.wait.resume = model_came
    call.state = CALL_AWAITING
    ensemble.step_limits[call.step].running += 1
    model_waits_add(&submission.model_waits, &call.wait)
    return True


cdef void must_not_wait(void *waiter, int status, char *reason) noexcept nogil:
    cdef StepCall *call = <StepCall *>waiter
    model_waits_remove(&call.wait)
    model_came(&call.wait, status, text_or_no_memory(reason))
    free(reason)


cdef void model_came(ModelWait *wait, int status, const char *details) noexcept nogil:
    cdef StepCall *call = <StepCall *>wait.owner
    cdef Run *run = call.frame.run
    cdef Ensemble *ensemble = ensemble_of(run)
    model_ask_end(wait.ask)
    wait.ask = NULL
    assert_that(ensemble.step_limits[call.step].running > 0)
    ensemble.step_limits[call.step].running -= 1
    if status != STATUS_OK:
        give_up(call, status, details)
    else:
        launch(call, False)
    if run.status != STATUS_OK:
        run.delivering = False  # no response to one of its calls is being delivered
        proceed(run)
    begin_waiting(ensemble)


cdef bint waits_behind(StepCall *call) noexcept nogil:
    # Whether an earlier request of its sequence may still wait for the model.
    cdef Submission *submission = ensemble_of(call.frame.run).submission
    if submission.model_waits.first == NULL or not call.sequence.correlation.given:
        return False
    return model_waits_for(&submission.model_waits, &call.frame.run.needs.plan.steps[call.step].model)


cdef void launch(StepCall *call, bint may_wait) noexcept nogil:
    # submit the step's request; if that fails, the run fails
    cdef Run *run = call.frame.run
    cdef Ensemble *ensemble = ensemble_of(run)
    cdef int status = STATUS_RESOURCE_EXHAUSTED
    cdef char *details = NULL
    cdef Lane *lane
    cdef Request *request = NULL
    find_sequence(call)
    if may_wait and waits_behind(call) and await_model(call, &details):
        return
    free(details)
    details = NULL
    lane = step_lane(ensemble.submission.table, call, &status, &details)
    if lane == NULL and may_wait and status == STATUS_UNAVAILABLE and await_model(call, &details):
        return
    if lane != NULL:
        request = step_request(lane, call, &status, &details)
    if request == NULL:
        give_up(call, status, details)
        free(details)
        return
    release_reads(call)
    ensemble.step_limits[call.step].running += 1
    call.state = CALL_RUNNING
    call.request = request
    request.single = run.needs.plan.steps[call.step].opens < 0
    request.deliver = deliver_step
    request.sink = call
    submit_request(ensemble.submission, request)


cdef void start(StepCall *call) noexcept nogil:
    # all tensors that the call reads are known
    cdef Run *run = call.frame.run
    cdef Ensemble *ensemble = ensemble_of(run)
    cdef StepLimit *limit = &ensemble.step_limits[call.step]
    cdef int status = STATUS_OK
    cdef char *details = NULL
    if not step_should_run(call, &status, &details):
        close_call(call)
        release_reads(call)
        if status != STATUS_OK:
            fail(run, status, REFUSAL_NONE, details)
            free(details)
        elif run.needs.plan.steps[call.step].opens < 0:
            step_leave(call.frame, &run.needs.plan.steps[call.step], True)
        return
    run.active += 1
    if ensemble.max_inflight == 0 or (limit.running < ensemble.max_inflight and limit.first == NULL):
        launch(call, True)
        return
    call.state = CALL_WAITING
    list_append(limit, call)


cdef void begin_waiting(Ensemble *ensemble) noexcept nogil:
    # Launch calls that wait, up to the limits of their steps. Calls that end meanwhile make room, which this loop sees.
    cdef StepCall *call
    cdef StepLimit *limit
    cdef Run *run
    cdef uint32_t i = 0
    if ensemble.max_inflight == 0 or ensemble.beginning:
        return
    ensemble.beginning = True
    while i < ensemble.plan.step_count:
        limit = &ensemble.step_limits[i]
        if limit.first == NULL or limit.running >= ensemble.max_inflight:
            i += 1
            continue
        call = limit.first
        run = call.frame.run
        list_remove(limit, call)
        launch(call, True)
        if run.status != STATUS_OK:
            run.delivering = False  # no response to one of its calls is being delivered
            proceed(run)
            i = 0
    ensemble.beginning = False


# ---------------------------------------------------------------------------------------------------------------------
# Responses of steps

cdef void deliver_step(void *sink, Response *response, int status, const char *details) noexcept nogil:
    cdef StepCall *call = <StepCall *>sink
    cdef Run *run = call.frame.run
    cdef Ensemble *ensemble = ensemble_of(run)
    cdef bint final = response == NULL or response.final
    if final:
        add_phases(run, call.request)
        assert_that(ensemble.step_limits[call.step].running > 0 and run.active > 0)
        ensemble.step_limits[call.step].running -= 1
        run.active -= 1
        call.request = NULL
        close_call(call)
    if status != STATUS_OK:
        fail(run, status, response.refusal if response != NULL else REFUSAL_NONE, details)
    else:
        if not response.empty:
            accept(call, response)
        if final:
            end_call(call)
    run.delivering = True
    proceed(run)
    begin_waiting(ensemble)


cdef void add_phases(Run *run, const Request *request) noexcept nogil:
    run.request.phases.queue += request.phases.queue
    run.request.phases.input += request.phases.input
    run.request.phases.infer += request.phases.infer
    run.request.phases.output += request.phases.output


cdef void accept(StepCall *call, Response *response) noexcept nogil:
    # use a response that has outputs
    cdef Run *run = call.frame.run
    cdef PlanStep *step = &ensemble_of(run).plan.steps[call.step]
    cdef Frame *frame = call.frame
    cdef Sequence *sequence = &call.sequence
    cdef char *details = NULL
    call.answered = True
    if step.opens >= 0:
        frame = frame_new(run, <uint32_t>step.opens, frame)
        if frame == NULL:
            fail(run, STATUS_RESOURCE_EXHAUSTED, REFUSAL_NONE, NULL)
            return
        sequence_copy(&frame.sequence, sequence)
        sequence = &frame.sequence
        if response.ack != NULL:
            frame.ack = block_share(response.ack)
    if not step_sequence(response, sequence, &details):
        fail(run, STATUS_INVALID_ARGUMENT if details != NULL else STATUS_RESOURCE_EXHAUSTED, REFUSAL_NONE, details)
        free(details)
        return
    step_accept(frame, step, response, sequence)


cdef void end_call(StepCall *call) noexcept nogil:
    # The model has sent its last response. If it sent none, steps that depend on this one never start: a decoupled
    # model may do that; for another model it is an error, which `proceed` finds.
    cdef const PlanStep *step = &call.frame.run.needs.plan.steps[call.step]
    if call.answered and step.opens < 0:
        step_leave(call.frame, step, False)


# ---------------------------------------------------------------------------------------------------------------------
# Progress

cdef bint send(Run *run, Frame *frame) noexcept nogil:
    # send one of several responses; False: the run has failed
    cdef Response *response = response_new(run.request)
    if response == NULL:
        fail(run, STATUS_RESOURCE_EXHAUSTED, REFUSAL_NONE, NULL)
        return False
    frame.sent = True
    if not ensemble_response(response, run, frame):
        fail(run, response.status, REFUSAL_NONE, response.details)
        response_free(response)
        return False
    bridge_return(ensemble_of(run).submission.bridge, response, response)
    return True


cdef void proceed(Run *run) noexcept nogil:
    """Start the steps whose inputs are known, send responses, end the run. This may free the run."""
    cdef Frame *frame
    cdef Frame *following
    cdef StepCall *call
    while run.ready != NULL and run.status == STATUS_OK:
        call = run.ready
        run.ready = call.next
        start(call)
    if run.status != STATUS_OK:
        finish_failed(run)
        return
    if run.needs.sends[0]:
        if frame_is_complete(run.first):
            finish_with(run, run.first)
        elif run.active == 0:
            fail_deadlocked(run)
        return
    frame = frame_to_send(run, run.first)
    while frame != NULL:
        following = frame_to_send(run, frame.next)
        if following == NULL and run.active == 0:
            finish_with(run, frame)
            return
        if not send(run, frame):
            finish_failed(run)
            return
        frame = following
    if run.active == 0:
        finish_with(run, NULL)
    else:
        frames_end(run)


# ---------------------------------------------------------------------------------------------------------------------
# The end of a run

cdef void finish_with(Run *run, Frame *frame) noexcept nogil:
    # with `frame` as the last response; NULL: without a further response
    cdef Response *response = &run.request.response
    if frame == NULL:
        response.empty = True
    elif not ensemble_response(response, run, frame):
        fail(run, response.status, response.refusal, response.details)
        finish_failed(run)
        return
    finish(run)


cdef void finish_failed(Run *run) noexcept nogil:
    request_fail(run.request, run.status, run.details)
    run.request.response.refusal = run.refusal
    run.details = NULL
    finish(run)


cdef void fail_deadlocked(Run *run) noexcept nogil:
    cdef Str id = run.request.id if run.request.id.size else Str("<id_unknown>", 12)
    cdef char *text = format_text(
        "[request id: %.*s] unexpected deadlock, at least one output is not set while no more ensemble steps can be "
        "made",
        clip(id), id.data)
    fail(run, STATUS_INVALID_ARGUMENT, REFUSAL_NONE, text)
    free(text)
    finish_failed(run)


cdef void drop_call(StepCall *call) noexcept nogil:
    cdef StepLimit *limit = &ensemble_of(call.frame.run).step_limits[call.step]
    if call.state == CALL_WAITING:
        list_remove(limit, call)
    elif call.state == CALL_AWAITING:
        limit.running -= 1
        model_waits_remove(&call.wait)
        model_ask_end(call.wait.ask)
        call.wait.ask = NULL
    elif call.state == CALL_RUNNING:
        limit.running -= 1
        bridge_abandon(call.request)


cdef void free_run(Run *run) noexcept nogil:
    # also abandons the steps that still run
    cdef Frame *frame = run.last
    cdef Frame *before
    cdef uint32_t i
    while frame != NULL:
        before = frame.previous
        for i in range(run.needs.plan.scopes[frame.scope].step_count):
            drop_call(&frame.calls[i])
        frame_free(frame)
        frame = before
    free(run.details)
    free(run)


cdef void account(const Ensemble *ensemble, const Request *request) noexcept nogil:
    cdef Execution execution
    cdef int64_t end = now_ns()
    if request.response.status != STATUS_OK:
        account_failed(request, end, FAILURE_BACKEND)
        return
    if request.is_warmup:
        return
    memset(&execution, 0, sizeof(Execution))
    execution.end_ns = end
    execution_add(&execution, request, request.queued_ns + <int64_t>request.phases.queue)
    execution.rows = request.rows
    execution.input_ns = request.phases.input
    execution.infer_ns = request.phases.infer
    execution.output_ns = request.phases.output
    statistics_executed(<Statistics *>&ensemble.lane.statistics, &execution)


cdef void finish(Run *run) noexcept nogil:
    # the final response has been set
    cdef Ensemble *ensemble = ensemble_of(run)
    cdef Request *request = run.request
    # Without earlier responses, which may still be on the bridge, the final response can be delivered now.
    cdef bint at_once = run.delivering and run.needs.sends[0]
    request.run = NULL
    if request.record != NULL:
        (<Record *>request.record).stepped = True
    free_run(run)
    account(ensemble, request)
    ensemble.requests -= 1
    if at_once:
        bridge_deliver(ensemble.submission.bridge, &request.response)
    else:
        bridge_return(ensemble.submission.bridge, &request.response, &request.response)
    begin_waiting(ensemble)


cdef void run_reconsider(Run *run) noexcept nogil:
    cdef Frame *frame = run.last
    cdef StepCall *call
    cdef Terms terms
    cdef uint32_t i
    while frame != NULL:
        for i in range(run.needs.plan.scopes[frame.scope].step_count):
            call = &frame.calls[i]
            if call.state == CALL_RUNNING:
                terms = run.request.terms
                terms.executable_ns = call.request.terms.executable_ns
                request_reconsider(call.request, &terms)
        frame = frame.previous


cdef void run_end(Run *run) noexcept nogil:
    run.delivering = False  # no response to one of its calls is being delivered
    finish(run)
