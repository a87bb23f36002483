"""Between a step of an ensemble and its model: makes the request from tensors, and takes tensors from responses."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, strlen

from inferd._native.atomic cimport fetch_add32
from inferd._native.ensembles.frame cimport (
    VALUE_MISSING,
    VALUE_OPEN,
    VALUE_PRESENT,
    VALUE_SKIPPED,
    Frame,
    Sequence,
    StepCall,
    Value,
    frame_resolve,
    frame_value,
    value_shape,
)
from inferd._native.ensembles.plan cimport PlanEdge, PlanStep
from inferd._native.memory.resource cimport Block, block_give, block_share, block_wrap
from inferd._native.protobuf.codec cimport (
    PARAMETER_BOOL,
    PARAMETER_INT64,
    PARAMETER_STRING,
    Parameter,
    Str,
)
from inferd._native.protobuf.datatype cimport DT_BOOL, datatype_name
from inferd._native.request.lane cimport Lane, lane_discard
from inferd._native.request.record cimport record_inner
from inferd._native.request.request cimport (
    InputData,
    OutputData,
    Request,
    Response,
    request_inherit,
    request_new,
    request_reserve,
)
from inferd._native.request.signature cimport Signature, TensorSignature, input_find, output_find
from inferd._native.service.table cimport Table, table_find, table_route
from inferd._native.status cimport (
    STATUS_INVALID_ARGUMENT,
    STATUS_NOT_FOUND,
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAVAILABLE,
)
from inferd._native.tensors.binding cimport request_check
from inferd._native.tensors.refusals cimport refuse_invalid
from inferd._native.text cimport format_text


# ---------------------------------------------------------------------------------------------------------------------
# Whether a step runs

cdef bint any_is(const Value *gate, bint wanted) noexcept nogil:
    cdef size_t i
    for i in range(gate.size):
        if (gate.data[i] != 0) == wanted:
            return True
    return False


cdef bint step_should_run(StepCall *call, int *status, char **details) noexcept nogil:
    cdef Frame *frame = call.frame
    cdef const PlanStep *step = &frame.run.needs.plan.steps[call.step]
    cdef const Value *gate
    cdef uint32_t i
    if step.gate >= 0:
        gate = frame_value(frame, <uint32_t>step.gate)
        if gate.state != VALUE_PRESENT:
            return False
        if gate.datatype != DT_BOOL:
            status[0] = STATUS_INVALID_ARGUMENT
            details[0] = format_text("the gate '%s' of step %u, model '%s', is %s and not BOOL",
                                     frame.run.needs.plan.tensors[step.gate].name.data, call.step, step.model.data,
                                     datatype_name(gate.datatype))
            return False
        # A batch is not split: the step runs if it is to run for any element.
        if not any_is(gate, not step.inverted):
            return False
        # If another step writes the same tensor for the other elements, the first to end would decide for all.
        if step.either and any_is(gate, step.inverted):
            status[0] = STATUS_INVALID_ARGUMENT
            details[0] = format_text(
                "the gate '%s' is true and false within one request, but steps of which only one may run, one of "
                "them of model '%s', write the same tensor: ask for the rows of each kind on their own",
                frame.run.needs.plan.tensors[step.gate].name.data, step.model.data)
            return False
    for i in range(step.input_count):
        if not step.inputs[i].optional and frame_value(frame, step.inputs[i].tensor).state == VALUE_SKIPPED:
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# The request

cdef inline bint is_at(const PlanEdge *edge, const TensorSignature *tensors, uint32_t count) noexcept nogil:
    # whether the tensor is where the last request found it in the model, as nearly always
    return edge.place < count and tensors[edge.place].name.size == edge.name.size and memcmp(
        tensors[edge.place].name.data, edge.name.data, edge.name.size) == 0


cdef inline int place_of_input(PlanEdge *edge, const Signature *signature) noexcept nogil:
    # -1: requests carry no such input
    cdef int place
    if not is_at(edge, signature.inputs, signature.input_count):
        place = input_find(signature, edge.name)
        if place < 0 or <uint32_t>place >= signature.input_count:
            return -1
        edge.place = <uint32_t>place
    return <int>edge.place


cdef inline int place_of_output(PlanEdge *edge, const Signature *signature) noexcept nogil:
    cdef int place
    if not is_at(edge, signature.outputs, signature.output_count):
        place = output_find(signature, edge.name)
        if place < 0 or <uint32_t>place >= signature.output_count:
            return -1
        edge.place = <uint32_t>place
    return <int>edge.place


cdef char *fill_input(Request *request, PlanEdge *edge, const Value *value) noexcept nogil:
    # NULL, or why the model cannot take it
    cdef const TensorSignature *tensor
    cdef InputData *input
    cdef int place = place_of_input(edge, request.signature)
    if place < 0:
        return format_text("unexpected inference input '%s' for model '%s'", edge.name.data,
                           request.signature.name.data)
    tensor = &request.signature.inputs[place]
    if tensor.datatype != value.datatype:
        return format_text("inference input '%s' data-type is '%s', but model '%s' expects '%s'", edge.name.data,
                           datatype_name(value.datatype), request.signature.name.data,
                           datatype_name(tensor.datatype))
    input = &request.inputs[place]
    input.present = True
    input.data = value.data
    input.size = value.size
    input.block = block_share(value.block)
    # the shape may have one dimension more than the tensor; there is always room for one more than values have
    input.rank = value_shape(value, tensor, request.signature.max_batch_size > 0, input.shape)
    return NULL


cdef char *fill_inputs(Request *request, StepCall *call, PlanStep *step) noexcept nogil:
    cdef Value *value
    cdef char *wrong
    cdef uint32_t i
    for i in range(step.input_count):
        value = frame_value(call.frame, step.inputs[i].tensor)
        if value.state == VALUE_PRESENT:
            wrong = fill_input(request, &step.inputs[i], value)
            if wrong != NULL:
                return wrong
    return NULL


cdef char *ask_outputs(Request *request, StepCall *call, PlanStep *step) noexcept nogil:
    cdef int place
    cdef uint32_t i
    for i in range(step.output_count):
        if not call.frame.run.needs.tensors[step.outputs[i].tensor]:
            continue
        place = place_of_output(&step.outputs[i], request.signature)
        if place < 0:
            return format_text("unexpected inference output '%s' for model '%s'", step.outputs[i].name.data,
                               request.signature.name.data)
        request.response.outputs[place].wanted = True
    return NULL


cdef void join_sequence(Request *request, const Sequence *sequence) noexcept nogil:
    if sequence.block != NULL:
        request.block = block_share(sequence.block)
    request.correlation = sequence.correlation
    request.sequence_start = sequence.start
    request.sequence_end = sequence.end


cdef bint fill(Request *request, StepCall *call, PlanStep *step, int *status, char **details) noexcept nogil:
    cdef char *wrong = fill_inputs(request, call, step)
    if wrong == NULL:
        wrong = ask_outputs(request, call, step)
    if wrong != NULL:
        refuse_invalid(request, wrong)
    if wrong != NULL or not request_check(request):
        status[0] = request.response.status
        details[0] = request.response.details
        request.response.details = NULL
        return False
    return True


cdef Lane *step_lane(Table *table, StepCall *call, int *status, char **details) noexcept nogil:
    cdef const PlanStep *step = &call.frame.run.needs.plan.steps[call.step]
    cdef Lane *lane = table_find(table, step.model, step.version, status, details)
    if lane == NULL and status[0] == STATUS_OK:
        lane = table_route(table, step.model, step.version, &call.sequence.correlation, call.sequence.start, status,
                           details)
    if lane == NULL and status[0] == STATUS_NOT_FOUND:
        status[0] = STATUS_UNAVAILABLE  # the client asked for the ensemble, which is available
    return lane


cdef Request *step_request(Lane *lane, StepCall *call, int *status, char **details) noexcept nogil:
    cdef PlanStep *step = &call.frame.run.needs.plan.steps[call.step]
    cdef Request *request = request_new()
    if request == NULL:
        fetch_add32(&lane.in_flight, -1)
        status[0] = STATUS_RESOURCE_EXHAUSTED
        return NULL
    request.lane = lane
    join_sequence(request, &call.sequence)
    if not (request_reserve(request, &lane.signature) and request_inherit(request, call.frame.run.request)):
        lane_discard(request)
        status[0] = STATUS_RESOURCE_EXHAUSTED
        return NULL
    request.is_step = True
    record_inner(request, call.frame.run.request)
    if not fill(request, call, step, status, details):
        lane_discard(request)
        return NULL
    return request


# ---------------------------------------------------------------------------------------------------------------------
# The response

cdef void take_value(Value *value, const OutputData *output, const Sequence *sequence) noexcept nogil:
    value.datatype = output.datatype
    value.data = output.data
    value.size = output.size
    value.block = block_share(output.block)
    value.rank = output.rank
    memcpy(value.shape, output.shape, output.rank * sizeof(output.shape[0]))
    value.sequence = sequence


cdef Value *awaited(Frame *frame, const PlanEdge *edge) noexcept nogil:
    # the tensor of an output that is needed and not yet known; NULL: it is not
    cdef Value *value
    if not frame.run.needs.tensors[edge.tensor]:
        return NULL
    value = frame_value(frame, edge.tensor)
    return value if value.state == VALUE_OPEN else NULL


cdef void step_accept(Frame *frame, PlanStep *step, Response *response, const Sequence *sequence) noexcept nogil:
    cdef Request *request = response.request
    cdef OutputData *output
    cdef Value *value
    cdef uint32_t i
    cdef int place
    for i in range(step.output_count):
        value = awaited(frame, &step.outputs[i])
        if value == NULL:
            continue
        place = place_of_output(&step.outputs[i], request.signature)
        output = &response.outputs[place] if place >= 0 else NULL
        if output == NULL or output.block == NULL:
            frame_resolve(frame, step.outputs[i].tensor, VALUE_MISSING)
        else:
            take_value(value, output, sequence)
            frame_resolve(frame, step.outputs[i].tensor, VALUE_PRESENT)


cdef void step_leave(Frame *frame, const PlanStep *step, bint skipped) noexcept nogil:
    cdef Value *value
    cdef uint32_t i
    for i in range(step.output_count):
        value = awaited(frame, &step.outputs[i])
        if value == NULL:
            continue
        value.writers -= 1
        if value.writers == 0:
            frame_resolve(frame, step.outputs[i].tensor, VALUE_SKIPPED if skipped else VALUE_MISSING)


# ---------------------------------------------------------------------------------------------------------------------
# Sequences: a response may say to which sequence the steps behind it belong

cdef struct Both:
    # two blocks that one reference keeps
    Block *one
    Block *other


cdef void both_give(void *owner) noexcept nogil:
    cdef Both *both = <Both *>owner
    block_give(both.one)
    block_give(both.other)
    free(both)


cdef Block *keep_both(Block *one, Block *other) noexcept nogil:
    # a block that keeps the two; takes the reference to `one`, shares the other
    cdef Both *both
    cdef Block *block
    if other == NULL:
        return one
    both = <Both *>malloc(sizeof(Both))
    if both == NULL:
        return NULL
    both.one = one
    both.other = block_share(other)
    block = block_wrap(NULL, 0, both_give, both)
    if block == NULL:
        block_give(both.other)
        free(both)
    return block


cdef inline bint is_key(const Parameter *parameter, const char *key) noexcept nogil:
    return parameter.key.size == strlen(key) and memcmp(parameter.key.data, key, parameter.key.size) == 0


cdef bint is_sequence_key(const Parameter *parameter) noexcept nogil:
    return is_key(parameter, "sequence_id") or is_key(parameter, "sequence_start") or is_key(parameter, "sequence_end")


cdef bint step_sequence(const Response *response, Sequence *sequence, char **details) noexcept nogil:
    cdef const Parameter *parameter
    cdef Block *block
    cdef bint first = True
    cdef uint32_t i
    details[0] = NULL
    for i in range(response.parameter_count):
        parameter = &response.parameters[i]
        if not is_sequence_key(parameter):
            continue
        if first:
            # what the response says replaces both flags
            first = False
            block = keep_both(sequence.block, response.parameter_block)
            if block == NULL and response.parameter_block != NULL:
                return False
            sequence.block = block
            sequence.start = sequence.end = False
            sequence.changed = True
        if not is_key(parameter, "sequence_id"):
            if parameter.kind != PARAMETER_BOOL:
                details[0] = format_text("expect parameter '%.*s' to be TRITONSERVER_PARAMETER_BOOL",
                                         <int>parameter.key.size, parameter.key.data)
                return False
            if is_key(parameter, "sequence_start"):
                sequence.start = parameter.integer != 0
            else:
                sequence.end = parameter.integer != 0
        elif not take_correlation(sequence, parameter):
            details[0] = format_text("expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or "
                                     "TRITONSERVER_PARAMETER_STRING")
            return False
    return True


cdef bint take_correlation(Sequence *sequence, const Parameter *parameter) noexcept nogil:
    cdef bint is_text = parameter.kind == PARAMETER_STRING
    if not is_text and parameter.kind != PARAMETER_INT64:
        return False
    sequence.correlation.text = parameter.text if is_text else Str(NULL, 0)
    sequence.correlation.number = 0 if is_text else <uint64_t>parameter.integer
    sequence.correlation.given = sequence.correlation.number != 0 or sequence.correlation.text.size > 0
    return True
