"""Frames: the tensors and steps of a running ensemble.

A frame is one occurrence of a scope (see `inferd._native.ensembles.plan`). Its values refer to memory of a step or of
the client; nothing is copied. The memory is given back after its last use, at the latest when the frame ends.
"""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from inferd._native.assertion cimport assert_that
from inferd._native.ensembles.plan cimport PlanScope, PlanStep, PlanTensor
from inferd._native.list cimport list_append, list_remove
from inferd._native.memory.resource cimport block_give, block_share
from inferd._native.request.signature cimport TensorSignature


# ---------------------------------------------------------------------------------------------------------------------
# Values

cdef void value_release(Value *value) noexcept nogil:
    if value.uses == EVER:
        return
    assert_that(value.uses > 0)
    value.uses -= 1
    if value.uses == 0:
        block_give(value.block)
        value.block = NULL


cdef uint32_t value_shape(const Value *value, const TensorSignature *tensor, bint batches,
                          int64_t *shape) noexcept nogil:
    cdef uint32_t wanted = tensor.rank + batches
    if batches and value.rank + 1 == wanted:
        shape[0] = 1
        memcpy(shape + 1, value.shape, value.rank * sizeof(int64_t))
        return wanted
    if not batches and value.rank == wanted + 1 and value.shape[0] == 1:
        memcpy(shape, value.shape + 1, wanted * sizeof(int64_t))
        return wanted
    memcpy(shape, value.shape, value.rank * sizeof(int64_t))
    return value.rank


cdef void sequence_copy(Sequence *to, const Sequence *source) noexcept nogil:
    if source.block != NULL:
        block_share(source.block)
    block_give(to.block)
    to[0] = source[0]


# ---------------------------------------------------------------------------------------------------------------------
# Frames

cdef inline bint wants(const Needs *needs, const PlanTensor *tensor) noexcept nogil:
    return tensor.output >= 0 and needs.outputs[tensor.output]


cdef uint32_t uses_of(const Needs *needs, uint32_t number) noexcept nogil:
    cdef const PlanTensor *tensor = &needs.plan.tensors[number]
    cdef uint32_t uses = 0
    cdef uint32_t i
    if tensor.pinned or (wants(needs, tensor) and not needs.sends[tensor.scope]):
        return EVER
    for i in range(tensor.reader_count):
        uses += needs.steps[tensor.readers[i]]
    return uses + wants(needs, tensor)


cdef void open_values(Frame *frame) noexcept nogil:
    cdef const Needs *needs = &frame.run.needs
    cdef const PlanScope *scope = &needs.plan.scopes[frame.scope]
    cdef Value *value
    cdef uint32_t i
    for i in range(scope.tensor_count):
        value = &frame.values[i]
        value.state = VALUE_OPEN
        value.writers = needs.plan.tensors[scope.tensors[i]].writers
        value.uses = uses_of(needs, scope.tensors[i])
        value.sequence = NULL
        value.block = NULL
        frame.unresolved += wants(needs, &needs.plan.tensors[scope.tensors[i]])


cdef void open_calls(Frame *frame) noexcept nogil:
    cdef const Needs *needs = &frame.run.needs
    cdef const PlanScope *scope = &needs.plan.scopes[frame.scope]
    cdef const PlanStep *step
    cdef StepCall *call
    cdef uint32_t i, j
    memset(frame.calls, 0, scope.step_count * sizeof(StepCall))
    for i in range(scope.step_count):
        call = &frame.calls[i]
        call.frame = frame
        call.step = scope.steps[i]
        if not needs.steps[call.step]:
            call.state = CALL_OVER
            continue
        frame.open_calls += 1
        step = &needs.plan.steps[call.step]
        for j in range(step.read_count):
            call.unresolved += frame_value(frame, step.reads[j]).state == VALUE_OPEN


cdef Frame *frame_new(Run *run, uint32_t scope, Frame *parent) noexcept nogil:
    cdef const PlanScope *plan = &run.needs.plan.scopes[scope]
    cdef size_t values = plan.tensor_count * sizeof(Value)
    cdef Frame *frame = <Frame *>malloc(sizeof(Frame) + values + plan.step_count * sizeof(StepCall))
    if frame == NULL:
        return NULL
    memset(frame, 0, sizeof(Frame))
    frame.run = run
    frame.scope = scope
    frame.values = <Value *>(frame + 1)
    frame.calls = <StepCall *>(frame.values + plan.tensor_count)
    frame.parent = parent
    if parent != NULL:
        parent.children += 1
    list_append(run, frame)
    open_values(frame)
    open_calls(frame)
    return frame


cdef void frame_free(Frame *frame) noexcept nogil:
    cdef Run *run = frame.run
    cdef const PlanScope *plan = &run.needs.plan.scopes[frame.scope]
    cdef uint32_t i
    assert_that(frame.children == 0)  # they refer to it
    list_remove(run, frame)
    if frame.parent != NULL:
        frame.parent.children -= 1
    for i in range(plan.tensor_count):
        block_give(frame.values[i].block)
    for i in range(plan.step_count):
        block_give(frame.calls[i].sequence.block)
    block_give(frame.sequence.block)
    block_give(frame.ack)
    free(frame)


cdef Value *frame_value(Frame *frame, uint32_t tensor) noexcept nogil:
    cdef const PlanTensor *found = &frame.run.needs.plan.tensors[tensor]
    while frame != NULL:
        if frame.scope == found.scope:
            return &frame.values[found.place]
        frame = frame.parent
    return NULL


cdef inline bint is_around(const Frame *outer, const Frame *inner) noexcept nogil:
    while inner != NULL and inner != outer:
        inner = inner.parent
    return inner != NULL


cdef void tell(Frame *frame, uint32_t place) noexcept nogil:
    # this call of the frame waits for one tensor less
    cdef StepCall *call = &frame.calls[place]
    cdef Run *run = frame.run
    assert_that(call.unresolved > 0)
    call.unresolved -= 1
    if call.unresolved == 0:
        call.next = run.ready
        run.ready = call


cdef void frame_resolve(Frame *frame, uint32_t tensor, ValueState state) noexcept nogil:
    cdef const Needs *needs = &frame.run.needs
    cdef const PlanTensor *found = &needs.plan.tensors[tensor]
    cdef const PlanStep *step
    cdef Value *value = &frame.values[found.place]
    cdef Frame *inner
    cdef uint32_t i
    assert_that(value.state == VALUE_OPEN)
    value.state = state
    value.writers = 0
    if value.uses == 0:
        block_give(value.block)
        value.block = NULL
    frame.unresolved -= wants(needs, found)
    for i in range(found.reader_count):
        if not needs.steps[found.readers[i]]:
            continue
        step = &needs.plan.steps[found.readers[i]]
        if step.scope == found.scope:
            tell(frame, step.place)
            continue
        inner = frame.next  # the frames inside it began after it
        while inner != NULL:
            if inner.scope == step.scope and is_around(frame, inner):
                tell(inner, step.place)
            inner = inner.next


# ---------------------------------------------------------------------------------------------------------------------
# Responses, and the end of frames

cdef bint frame_is_complete(const Frame *frame) noexcept nogil:
    while frame != NULL:
        if frame.unresolved:
            return False
        frame = frame.parent
    return True


cdef Frame *frame_to_send(const Run *run, Frame *frame) noexcept nogil:
    while frame != NULL:
        if run.needs.sends[frame.scope] and not frame.sent:
            return frame if frame_is_complete(frame) else NULL
        frame = frame.next
    return NULL


cdef void frames_end(Run *run) noexcept nogil:
    # inner ones first; the first one stays
    cdef Frame *frame = run.last
    cdef Frame *before
    while frame != run.first:
        before = frame.previous
        if frame.open_calls == 0 and frame.children == 0 and (frame.sent or not run.needs.sends[frame.scope]):
            frame_free(frame)
        frame = before
