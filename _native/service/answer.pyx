"""Encodes ModelInferResponse and ModelStreamInferResponse messages.

The head is written; tensors are referenced in the model's memory, unless they are small.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strlen

from inferd._native.protobuf.codec cimport PARAMETER_BOOL, Parameter
from inferd._native.protobuf.encoding cimport (
    ResponseHead,
    ResponseOutput,
    raw_prefix_size,
    raw_prefix_write,
    response_head_size,
    response_head_write,
)
from inferd._native.protobuf.wire cimport varint_size, write_varint
from inferd._native.request.request cimport OutputData, Request, Response
from inferd._native.transport.outgoing cimport PREFIX, Outgoing, outgoing_add, outgoing_new, write_message_prefix

cdef enum:
    COPY_BELOW = 8192        # responses smaller than this are written as one piece
    REFERENCE_FROM = 4096    # outputs from this size on are sent by reference
    FEW_OUTPUTS = 16
    FEW_PARAMETERS = 8
    STREAM_ERROR_MESSAGE = 1 << 3 | 2     # tags of ModelStreamInferResponse
    STREAM_INFER_RESPONSE = 2 << 3 | 2

cdef Parameter FINAL_RESPONSE
memset(&FINAL_RESPONSE, 0, sizeof(Parameter))
FINAL_RESPONSE.key.data = "triton_final_response"
FINAL_RESPONSE.key.size = 21
FINAL_RESPONSE.kind = PARAMETER_BOOL
FINAL_RESPONSE.integer = 1

cdef struct Answer:
    # the parts of an encoded ModelInferResponse and their sizes
    ResponseHead head
    ResponseOutput few_outputs[FEW_OUTPUTS]
    ResponseOutput *outputs
    Parameter few_parameters[FEW_PARAMETERS]
    Parameter *parameters
    size_t head_size
    size_t size              # of the whole message


cdef struct ErrorAnswer:
    # the parts of a ModelStreamInferResponse with an error
    ResponseHead head        # names the request, and its model if that is known
    Parameter final          # whether no response follows
    size_t head_size
    size_t text_size
    size_t size              # of the whole message


cdef inline void answer_done(Answer *answer) noexcept nogil:
    if answer.outputs != answer.few_outputs:
        free(answer.outputs)
    if answer.parameters != answer.few_parameters:
        free(answer.parameters)


cdef bint answer_measure(Answer *answer, const Response *response, bint streamed) noexcept nogil:
    # `streamed`: with the parameter that marks the last response of a stream
    cdef const Request *request = response.request
    cdef const OutputData *out
    cdef ResponseOutput *described
    cdef uint32_t i
    memset(&answer.head, 0, sizeof(ResponseHead))
    answer.outputs = answer.few_outputs
    answer.parameters = answer.few_parameters
    if request.signature.output_count > FEW_OUTPUTS:
        answer.outputs = <ResponseOutput *>malloc(request.signature.output_count * sizeof(ResponseOutput))
    if response.parameter_count + 1 > FEW_PARAMETERS:
        answer.parameters = <Parameter *>malloc((response.parameter_count + 1) * sizeof(Parameter))
    if answer.outputs == NULL or answer.parameters == NULL:
        answer_done(answer)
        return False
    answer.head.model_name = request.signature.name
    answer.head.model_version = request.signature.version_text
    answer.head.id = request.id
    answer.head.outputs = answer.outputs
    if response.parameter_count:
        memcpy(answer.parameters, response.parameters, response.parameter_count * sizeof(Parameter))
    answer.head.parameters = answer.parameters
    answer.head.parameter_count = response.parameter_count
    if streamed:
        answer.parameters[response.parameter_count] = FINAL_RESPONSE
        answer.parameters[response.parameter_count].integer = response.final
        answer.head.parameter_count += 1
    answer.size = 0
    if not response.empty:
        for i in range(request.signature.output_count):
            out = &response.outputs[i]
            if not out.wanted:
                continue
            described = &answer.outputs[answer.head.output_count]
            described.name = request.signature.outputs[i].name
            described.datatype = out.datatype
            described.shape = &out.shape[0]
            described.rank = out.rank
            answer.head.output_count += 1
            answer.size += raw_prefix_size(out.size) + out.size
    answer.head_size = response_head_size(&answer.head)
    answer.size += answer.head_size
    return True


cdef inline uint32_t output_count(const Response *response) noexcept nogil:
    return 0 if response.empty else response.request.signature.output_count


cdef uint8_t *answer_write(const Answer *answer, const Response *response, uint8_t *at) noexcept nogil:
    # the whole message in one run
    cdef const OutputData *out
    cdef uint32_t i
    at = response_head_write(&answer.head, at)
    for i in range(output_count(response)):
        out = &response.outputs[i]
        if out.wanted:
            at = raw_prefix_write(out.size, at)
            if out.size:  # else `data` may be NULL, which memcpy forbids
                memcpy(at, out.data, out.size)
            at += out.size
    return at


cdef inline size_t wrapping_size(const Answer *answer, bint streamed) noexcept nogil:
    # bytes in front of the response in a ModelStreamInferResponse
    return 1 + varint_size(answer.size) if streamed else 0


cdef inline uint8_t *wrapping_write(const Answer *answer, bint streamed, uint8_t *at) noexcept nogil:
    if not streamed:
        return at
    at[0] = STREAM_INFER_RESPONSE
    return write_varint(at + 1, answer.size)


cdef inline uint8_t *front_write(const Answer *answer, bint streamed, uint8_t *at) noexcept nogil:
    # the gRPC prefix of the message, and the wrapping
    write_message_prefix(at, wrapping_size(answer, streamed) + answer.size)
    return wrapping_write(answer, streamed, at + PREFIX)


cdef Outgoing *answer_by_reference(const Answer *answer, const Response *response, bint streamed) noexcept nogil:
    # header and small outputs copied, large outputs referenced where the model left them
    cdef Outgoing *message
    cdef const OutputData *out
    cdef uint8_t *start
    cdef uint8_t *at
    cdef size_t room = PREFIX + wrapping_size(answer, streamed) + answer.head_size
    cdef uint32_t i
    for i in range(output_count(response)):
        out = &response.outputs[i]
        if out.wanted:
            room += raw_prefix_size(out.size) + (out.size if out.size < REFERENCE_FROM else 0)
    message = outgoing_new(2 * answer.head.output_count + 1, room)
    if message == NULL:
        return NULL
    start = message.room
    at = response_head_write(&answer.head, front_write(answer, streamed, start))
    for i in range(output_count(response)):
        out = &response.outputs[i]
        if not out.wanted:
            continue
        at = raw_prefix_write(out.size, at)
        if out.size < REFERENCE_FROM:
            if out.size:
                memcpy(at, out.data, out.size)
            at += out.size
        else:
            outgoing_add(message, message.home, start, <size_t>(at - start))
            outgoing_add(message, out.block, out.data, out.size)
            start = at
    if at != start:
        outgoing_add(message, message.home, start, <size_t>(at - start))
    return message


cdef Outgoing *answer_outgoing(const Response *response, bint streamed) noexcept nogil:
    cdef Answer answer
    cdef Outgoing *message
    cdef size_t size
    if not answer_measure(&answer, response, streamed):
        return NULL
    size = PREFIX + wrapping_size(&answer, streamed) + answer.size
    if (size - PREFIX) >> 32:  # the length of a gRPC message has four bytes
        message = NULL
    elif answer.size >= COPY_BELOW:
        message = answer_by_reference(&answer, response, streamed)
    else:
        message = outgoing_new(1, size)
        if message != NULL:
            answer_write(&answer, response, front_write(&answer, streamed, message.room))
            outgoing_add(message, message.home, message.room, size)
    answer_done(&answer)
    return message


cdef Outgoing *answer_error_outgoing(const Request *request, bint final, const char *details) noexcept nogil:
    cdef ErrorAnswer answer
    cdef Outgoing *message
    error_measure(&answer, request, final, details)
    message = outgoing_new(1, PREFIX + answer.size)
    if message == NULL:
        return NULL
    write_message_prefix(message.room, answer.size)
    error_write(&answer, details, message.room + PREFIX)
    outgoing_add(message, message.home, message.room, PREFIX + answer.size)
    return message


cdef void error_measure(ErrorAnswer *answer, const Request *request, bint final, const char *details) noexcept nogil:
    memset(&answer.head, 0, sizeof(ResponseHead))
    answer.head.id = request.id
    if request.signature != NULL:
        answer.head.model_name = request.signature.name
        answer.head.model_version = request.signature.version_text
    answer.final = FINAL_RESPONSE
    answer.final.integer = final
    answer.head.parameters = &answer.final
    answer.head.parameter_count = 1
    answer.head_size = response_head_size(&answer.head)
    answer.text_size = strlen(details)
    answer.size = (2 + varint_size(answer.text_size) + answer.text_size + varint_size(answer.head_size)
                   + answer.head_size)


cdef void error_write(const ErrorAnswer *answer, const char *details, uint8_t *at) noexcept nogil:
    at[0] = STREAM_ERROR_MESSAGE
    at = write_varint(at + 1, answer.text_size)
    memcpy(at, details, answer.text_size)
    at += answer.text_size
    at[0] = STREAM_INFER_RESPONSE
    response_head_write(&answer.head, write_varint(at + 1, answer.head_size))


cdef size_t answer_size(const Response *response) noexcept nogil:
    cdef Answer answer
    if not answer_measure(&answer, response, False):
        return 0
    answer_done(&answer)
    return answer.size


cdef void answer_write_to(const Response *response, uint8_t *out) noexcept nogil:
    cdef Answer answer
    if answer_measure(&answer, response, False):
        answer_write(&answer, response, out)
        answer_done(&answer)


cdef bytes answer_bytes(const Response *response):
    cdef Answer answer
    cdef bytes out
    if not answer_measure(&answer, response, False):
        raise MemoryError
    try:
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>answer.size)
        answer_write(&answer, response, <uint8_t *>PyBytes_AS_STRING(out))
    finally:
        answer_done(&answer)
    return out


cdef bytes answer_streamed(const Response *response):
    cdef Answer answer
    cdef bytes out
    if not answer_measure(&answer, response, True):
        raise MemoryError
    try:
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(wrapping_size(&answer, True) + answer.size))
        answer_write(&answer, response, wrapping_write(&answer, True, <uint8_t *>PyBytes_AS_STRING(out)))
    finally:
        answer_done(&answer)
    return out


cdef bytes answer_stream_error(const Request *request, bint final, const char *details):
    cdef ErrorAnswer answer
    cdef bytes out
    error_measure(&answer, request, final, details)
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>answer.size)
    error_write(&answer, details, <uint8_t *>PyBytes_AS_STRING(out))
    return out
