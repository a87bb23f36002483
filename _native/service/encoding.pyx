"""Encodes ModelInferResponse and ModelStreamInferResponse messages.

The head is written into new memory. Large tensors are not copied: a message refers to the blocks where they are.
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

cdef struct Layout:
    # the parts of an encoded ModelInferResponse and their sizes
    ResponseHead head
    ResponseOutput few_outputs[FEW_OUTPUTS]
    ResponseOutput *outputs
    Parameter few_parameters[FEW_PARAMETERS]
    Parameter *parameters
    size_t head_size
    size_t size              # of the whole message


cdef struct ErrorLayout:
    # the parts of a ModelStreamInferResponse with an error
    ResponseHead head        # names the request, and its model if that is known
    Parameter final          # whether no response follows
    size_t head_size
    size_t text_size
    size_t size              # of the whole message


cdef inline void layout_free(Layout *layout) noexcept nogil:
    if layout.outputs != layout.few_outputs:
        free(layout.outputs)
    if layout.parameters != layout.few_parameters:
        free(layout.parameters)


cdef bint layout_measure(Layout *layout, const Response *response, bint streamed) noexcept nogil:
    # `streamed`: with the parameter that marks the last response of a stream
    cdef const Request *request = response.request
    cdef const OutputData *out
    cdef ResponseOutput *described
    cdef uint32_t i
    memset(&layout.head, 0, sizeof(ResponseHead))
    layout.outputs = layout.few_outputs
    layout.parameters = layout.few_parameters
    if request.signature.output_count > FEW_OUTPUTS:
        layout.outputs = <ResponseOutput *>malloc(request.signature.output_count * sizeof(ResponseOutput))
    if response.parameter_count + 1 > FEW_PARAMETERS:
        layout.parameters = <Parameter *>malloc((response.parameter_count + 1) * sizeof(Parameter))
    if layout.outputs == NULL or layout.parameters == NULL:
        layout_free(layout)
        return False
    layout.head.model_name = request.signature.name
    layout.head.model_version = request.signature.version_text
    layout.head.id = request.id
    layout.head.outputs = layout.outputs
    if response.parameter_count:
        memcpy(layout.parameters, response.parameters, response.parameter_count * sizeof(Parameter))
    layout.head.parameters = layout.parameters
    layout.head.parameter_count = response.parameter_count
    if streamed:
        layout.parameters[response.parameter_count] = FINAL_RESPONSE
        layout.parameters[response.parameter_count].integer = response.final
        layout.head.parameter_count += 1
    layout.size = 0
    if not response.empty:
        for i in range(request.signature.output_count):
            out = &response.outputs[i]
            if not out.wanted:
                continue
            described = &layout.outputs[layout.head.output_count]
            described.name = request.signature.outputs[i].name
            described.datatype = out.datatype
            described.shape = &out.shape[0]
            described.rank = out.rank
            layout.head.output_count += 1
            layout.size += raw_prefix_size(out.size) + out.size
    layout.head_size = response_head_size(&layout.head)
    layout.size += layout.head_size
    return True


cdef inline uint32_t output_count(const Response *response) noexcept nogil:
    return 0 if response.empty else response.request.signature.output_count


cdef uint8_t *layout_write(const Layout *layout, const Response *response, uint8_t *at) noexcept nogil:
    # the whole message in one run
    cdef const OutputData *out
    cdef uint32_t i
    at = response_head_write(&layout.head, at)
    for i in range(output_count(response)):
        out = &response.outputs[i]
        if out.wanted:
            at = raw_prefix_write(out.size, at)
            if out.size:  # else `data` may be NULL, which memcpy forbids
                memcpy(at, out.data, out.size)
            at += out.size
    return at


cdef inline size_t wrapping_size(const Layout *layout, bint streamed) noexcept nogil:
    # bytes in front of the response in a ModelStreamInferResponse
    return 1 + varint_size(layout.size) if streamed else 0


cdef inline uint8_t *wrapping_write(const Layout *layout, bint streamed, uint8_t *at) noexcept nogil:
    if not streamed:
        return at
    at[0] = STREAM_INFER_RESPONSE
    return write_varint(at + 1, layout.size)


cdef inline uint8_t *front_write(const Layout *layout, bint streamed, uint8_t *at) noexcept nogil:
    # the gRPC prefix of the message, and the wrapping
    write_message_prefix(at, wrapping_size(layout, streamed) + layout.size)
    return wrapping_write(layout, streamed, at + PREFIX)


cdef Outgoing *layout_by_reference(const Layout *layout, const Response *response, bint streamed) noexcept nogil:
    # header and small outputs copied, large outputs referenced where the model left them
    cdef Outgoing *message
    cdef const OutputData *out
    cdef uint8_t *start
    cdef uint8_t *at
    cdef size_t room = PREFIX + wrapping_size(layout, streamed) + layout.head_size
    cdef uint32_t i
    for i in range(output_count(response)):
        out = &response.outputs[i]
        if out.wanted:
            room += raw_prefix_size(out.size) + (out.size if out.size < REFERENCE_FROM else 0)
    message = outgoing_new(2 * layout.head.output_count + 1, room)
    if message == NULL:
        return NULL
    start = message.room
    at = response_head_write(&layout.head, front_write(layout, streamed, start))
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


cdef Outgoing *response_outgoing(const Response *response, bint streamed) noexcept nogil:
    cdef Layout layout
    cdef Outgoing *message
    cdef size_t size
    if not layout_measure(&layout, response, streamed):
        return NULL
    size = PREFIX + wrapping_size(&layout, streamed) + layout.size
    if (size - PREFIX) >> 32:  # the length of a gRPC message has four bytes
        message = NULL
    elif layout.size >= COPY_BELOW:
        message = layout_by_reference(&layout, response, streamed)
    else:
        message = outgoing_new(1, size)
        if message != NULL:
            layout_write(&layout, response, front_write(&layout, streamed, message.room))
            outgoing_add(message, message.home, message.room, size)
    layout_free(&layout)
    return message


cdef Outgoing *error_outgoing(const Request *request, bint final, const char *details) noexcept nogil:
    cdef ErrorLayout layout
    cdef Outgoing *message
    error_measure(&layout, request, final, details)
    message = outgoing_new(1, PREFIX + layout.size)
    if message == NULL:
        return NULL
    write_message_prefix(message.room, layout.size)
    error_write(&layout, details, message.room + PREFIX)
    outgoing_add(message, message.home, message.room, PREFIX + layout.size)
    return message


cdef void error_measure(ErrorLayout *layout, const Request *request, bint final, const char *details) noexcept nogil:
    memset(&layout.head, 0, sizeof(ResponseHead))
    layout.head.id = request.id
    if request.signature != NULL:
        layout.head.model_name = request.signature.name
        layout.head.model_version = request.signature.version_text
    layout.final = FINAL_RESPONSE
    layout.final.integer = final
    layout.head.parameters = &layout.final
    layout.head.parameter_count = 1
    layout.head_size = response_head_size(&layout.head)
    layout.text_size = strlen(details)
    layout.size = (2 + varint_size(layout.text_size) + layout.text_size + varint_size(layout.head_size)
                   + layout.head_size)


cdef void error_write(const ErrorLayout *layout, const char *details, uint8_t *at) noexcept nogil:
    at[0] = STREAM_ERROR_MESSAGE
    at = write_varint(at + 1, layout.text_size)
    memcpy(at, details, layout.text_size)
    at += layout.text_size
    at[0] = STREAM_INFER_RESPONSE
    response_head_write(&layout.head, write_varint(at + 1, layout.head_size))


cdef size_t encoded_size(const Response *response) noexcept nogil:
    cdef Layout layout
    if not layout_measure(&layout, response, False):
        return 0
    layout_free(&layout)
    return layout.size


cdef void encoded_write(const Response *response, uint8_t *out) noexcept nogil:
    cdef Layout layout
    if layout_measure(&layout, response, False):
        layout_write(&layout, response, out)
        layout_free(&layout)


cdef bytes response_bytes(const Response *response):
    cdef Layout layout
    cdef bytes out
    if not layout_measure(&layout, response, False):
        raise MemoryError
    try:
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>layout.size)
        layout_write(&layout, response, <uint8_t *>PyBytes_AS_STRING(out))
    finally:
        layout_free(&layout)
    return out


cdef bytes response_streamed(const Response *response):
    cdef Layout layout
    cdef bytes out
    if not layout_measure(&layout, response, True):
        raise MemoryError
    try:
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(wrapping_size(&layout, True) + layout.size))
        layout_write(&layout, response, wrapping_write(&layout, True, <uint8_t *>PyBytes_AS_STRING(out)))
    finally:
        layout_free(&layout)
    return out


cdef bytes error_streamed(const Request *request, bint final, const char *details):
    cdef ErrorLayout layout
    cdef bytes out
    error_measure(&layout, request, final, details)
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>layout.size)
    error_write(&layout, details, <uint8_t *>PyBytes_AS_STRING(out))
    return out
