"""Encoding of ModelInferResponse; the contract is in encoding.pxd."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, strlen

from inferd._native.protobuf.codec cimport (
    PARAMETER_BOOL,
    PARAMETER_DOUBLE,
    PARAMETER_INT64,
    PARAMETER_STRING,
    PARAMETER_UINT64,
    Parameter,
    Str,
)
from inferd._native.protobuf.datatype cimport datatype_name
from inferd._native.protobuf.tags cimport (
    ENTRY_KEY,
    ENTRY_VALUE,
    RESPONSE_ID,
    RESPONSE_MODEL_NAME,
    RESPONSE_MODEL_VERSION,
    RESPONSE_OUTPUTS,
    RESPONSE_PARAMETERS,
    RESPONSE_RAW,
    TENSOR_DATATYPE,
    TENSOR_NAME,
    TENSOR_SHAPE,
    VALUE_BOOL,
    VALUE_DOUBLE,
    VALUE_INT64,
    VALUE_STRING,
    VALUE_UINT64,
)
from inferd._native.protobuf.wire cimport field_size, varint_size, write_prefix, write_varint


cdef inline size_t text_size(Str text) noexcept nogil:
    """A string field; as everywhere in proto3, an empty one is left out."""
    return field_size(text.size) if text.size else 0


cdef inline uint8_t *write_run(uint8_t *out, uint32_t tag, const char *data, uint32_t size) noexcept nogil:
    """A length-delimited field."""
    out = write_prefix(out, tag, size)
    memcpy(out, data, size)
    return out + size


cdef inline uint8_t *write_text(uint8_t *out, uint32_t tag, Str text) noexcept nogil:
    return write_run(out, tag, text.data, text.size) if text.size else out


cdef size_t value_size(const Parameter *parameter) noexcept nogil:
    """Body of an InferParameter. A oneof's member is written even when it has its default value."""
    if parameter.kind == PARAMETER_BOOL:
        return 2
    if parameter.kind == PARAMETER_INT64 or parameter.kind == PARAMETER_UINT64:
        return 1 + varint_size(<uint64_t>parameter.integer)
    if parameter.kind == PARAMETER_STRING:
        return field_size(parameter.text.size)
    return 9 if parameter.kind == PARAMETER_DOUBLE else 0


cdef uint8_t *write_value(uint8_t *out, const Parameter *parameter) noexcept nogil:
    if parameter.kind == PARAMETER_BOOL:
        out[0] = VALUE_BOOL
        out[1] = parameter.integer != 0
        return out + 2
    if parameter.kind == PARAMETER_INT64 or parameter.kind == PARAMETER_UINT64:
        out[0] = VALUE_INT64 if parameter.kind == PARAMETER_INT64 else VALUE_UINT64
        return write_varint(out + 1, <uint64_t>parameter.integer)
    if parameter.kind == PARAMETER_STRING:
        return write_run(out, VALUE_STRING, parameter.text.data, parameter.text.size)
    if parameter.kind == PARAMETER_DOUBLE:
        out[0] = VALUE_DOUBLE
        memcpy(out + 1, &parameter.real, 8)
        return out + 9
    return out


cdef inline size_t entry_size(const Parameter *parameter) noexcept nogil:
    """Body of a map entry; key and value are always written."""
    return field_size(parameter.key.size) + field_size(value_size(parameter))


cdef uint8_t *write_entry(uint8_t *out, const Parameter *parameter) noexcept nogil:
    out = write_prefix(out, RESPONSE_PARAMETERS, entry_size(parameter))
    out = write_run(out, ENTRY_KEY, parameter.key.data, parameter.key.size)
    out = write_prefix(out, ENTRY_VALUE, value_size(parameter))
    return write_value(out, parameter)


cdef size_t shape_size(const ResponseOutput *output) noexcept nogil:
    """Body of the packed shape field."""
    cdef size_t size = 0
    cdef uint32_t i
    for i in range(output.rank):
        size += varint_size(<uint64_t>output.shape[i])
    return size


cdef size_t output_size(const ResponseOutput *output) noexcept nogil:
    """Body of an InferOutputTensor."""
    cdef size_t size = text_size(output.name) + field_size(strlen(datatype_name(output.datatype)))
    return size + field_size(shape_size(output)) if output.rank else size


cdef uint8_t *write_output(uint8_t *out, const ResponseOutput *output) noexcept nogil:
    cdef const char *datatype = datatype_name(output.datatype)
    cdef uint32_t i
    out = write_prefix(out, RESPONSE_OUTPUTS, output_size(output))
    out = write_text(out, TENSOR_NAME, output.name)
    out = write_run(out, TENSOR_DATATYPE, datatype, <uint32_t>strlen(datatype))
    if output.rank:
        out = write_prefix(out, TENSOR_SHAPE, shape_size(output))
        for i in range(output.rank):
            out = write_varint(out, <uint64_t>output.shape[i])
    return out


cdef size_t response_head_size(const ResponseHead *head) noexcept nogil:
    cdef size_t size = text_size(head.model_name) + text_size(head.model_version) + text_size(head.id)
    cdef uint32_t i
    for i in range(head.parameter_count):
        size += field_size(entry_size(&head.parameters[i]))
    for i in range(head.output_count):
        size += field_size(output_size(&head.outputs[i]))
    return size


cdef uint8_t *response_head_write(const ResponseHead *head, uint8_t *out) noexcept nogil:
    cdef uint32_t i
    out = write_text(out, RESPONSE_MODEL_NAME, head.model_name)
    out = write_text(out, RESPONSE_MODEL_VERSION, head.model_version)
    out = write_text(out, RESPONSE_ID, head.id)
    for i in range(head.parameter_count):
        out = write_entry(out, &head.parameters[i])
    for i in range(head.output_count):
        out = write_output(out, &head.outputs[i])
    return out


cdef size_t raw_prefix_size(uint64_t size) noexcept nogil:
    return 1 + varint_size(size)


cdef uint8_t *raw_prefix_write(uint64_t size, uint8_t *out) noexcept nogil:
    return write_prefix(out, RESPONSE_RAW, size)
