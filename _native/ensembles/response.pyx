"""The response of an ensemble, made of the tensors of a frame and of those around it."""

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy, memset

from inferd._native.ensembles.frame cimport (
    VALUE_PRESENT,
    Frame,
    Run,
    Sequence,
    Value,
    frame_value,
    value_release,
    value_shape,
)
from inferd._native.ensembles.plan cimport EnsemblePlan
from inferd._native.memory.resource cimport block_give, block_share, block_take
from inferd._native.protobuf.codec cimport PARAMETER_BOOL, PARAMETER_INT64, PARAMETER_STRING, Parameter, Str
from inferd._native.request.request cimport OutputData, Response, response_fail
from inferd._native.request.signature cimport Signature
from inferd._native.status cimport STATUS_RESOURCE_EXHAUSTED
from inferd._native.tensors.completion cimport response_complete


cdef void fill_output(Response *response, const Run *run, Frame *frame, uint32_t output) noexcept nogil:
    cdef const Signature *signature = run.request.signature
    cdef OutputData *out = &response.outputs[output]
    cdef Value *value
    if not out.wanted:
        return
    value = frame_value(frame, run.needs.plan.outputs[output])
    if value == NULL or value.state != VALUE_PRESENT:
        out.wanted = False
        return
    out.datatype = value.datatype
    out.data = value.data
    out.size = value.size
    out.block = block_share(value.block)
    out.rank = value_shape(value, &signature.outputs[output], signature.max_batch_size > 0, out.shape)
    value_release(value)


cdef bint tell_sequence(Response *response, const Sequence *sequence) noexcept nogil:
    # Set the parameters of the sequence, also if there is none: Triton has them in every response with a tensor that a
    # step made. False: no memory.
    cdef uint32_t text_size = sequence.correlation.text.size
    cdef Parameter *parameters
    if response.parameter_count:
        return True
    response.parameter_block = block_take(3 * sizeof(Parameter) + text_size)
    if response.parameter_block == NULL:
        return False
    parameters = <Parameter *>response.parameter_block.data
    memset(parameters, 0, 3 * sizeof(Parameter))
    parameters[0].key = Str("sequence_id", 11)
    parameters[1].key = Str("sequence_start", 14)
    parameters[2].key = Str("sequence_end", 12)
    if sequence.correlation.text.data != NULL:
        memcpy(parameters + 3, sequence.correlation.text.data, text_size)
        parameters[0].kind = PARAMETER_STRING
        parameters[0].text = Str(<const char *>(parameters + 3), text_size)
    else:
        parameters[0].kind = PARAMETER_INT64
        parameters[0].integer = <int64_t>sequence.correlation.number
    parameters[1].kind = parameters[2].kind = PARAMETER_BOOL
    parameters[1].integer = sequence.start
    parameters[2].integer = sequence.end
    response.parameters = parameters
    response.parameter_count = 3
    return True


cdef bint ensemble_response(Response *response, const Run *run, Frame *frame) noexcept nogil:
    # False: the response carries an error
    cdef const EnsemblePlan *plan = run.needs.plan
    cdef const Sequence *sequence
    cdef uint32_t i
    for i in range(plan.output_count):
        if run.needs.outputs[i] and frame_value(frame, plan.outputs[i]) != NULL:
            sequence = frame_value(frame, plan.outputs[i]).sequence
            if sequence != NULL and not tell_sequence(response, sequence):
                response_fail(response, STATUS_RESOURCE_EXHAUSTED, NULL)
                return False
        fill_output(response, run, frame, i)
    if frame.ack != NULL:
        # the step that began the frame may wait until the client has read what was made from its response
        block_give(response.ack)
        response.ack = block_share(frame.ack)
    return response_complete(response)
