"""Decoding of ModelInferRequest; the contract is in codec.pxd."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memset

from inferd._native.protobuf.tags cimport (
    CONTENTS_BOOL,
    CONTENTS_BYTES,
    CONTENTS_FP32,
    CONTENTS_FP64,
    ENTRY_KEY,
    ENTRY_VALUE,
    REQUESTED_NAME,
    REQUESTED_PARAMETERS,
    REQUEST_ID,
    REQUEST_INPUTS,
    REQUEST_MODEL_NAME,
    REQUEST_MODEL_VERSION,
    REQUEST_OUTPUTS,
    REQUEST_PARAMETERS,
    REQUEST_RAW,
    TENSOR_CONTENTS,
    TENSOR_DATATYPE,
    TENSOR_DIM,
    TENSOR_NAME,
    TENSOR_PARAMETERS,
    TENSOR_SHAPE,
    VALUE_BOOL,
    VALUE_DOUBLE,
    VALUE_INT64,
    VALUE_STRING,
    VALUE_UINT64,
    contents_wire_type,
)
from inferd._native.protobuf.wire cimport (
    WIRE_LEN,
    likely,
    packed_varint_count,
    read_fixed64,
    read_size,
    read_tag,
    read_text,
    read_varint,
    skip_field,
)

cdef enum:
    FIRST_CAPACITY = 8
    KEPT_CAPACITY = 256                 # infer_message_clear frees arrays larger than this
    MESSAGE_LIMIT = 0x7FFFFFFF          # official protobuf parses no message of 2 GiB or more


# ---------------------------------------------------------------------------------------------------------------------
# The growing arrays of an InferMessage

ctypedef fused Item:
    InputHead
    OutputHead
    Str
    Parameter
    int64_t


cdef DecodeResult grow(Item **items, uint32_t *capacity) noexcept nogil:
    cdef uint32_t wanted = capacity[0] * 2 if capacity[0] else FIRST_CAPACITY
    if wanted > DECODE_LIMIT:
        return DECODE_TOO_MANY
    cdef Item *grown = <Item *>realloc(items[0], wanted * sizeof(Item))
    if grown == NULL:
        return DECODE_NO_MEMORY
    items[0] = grown
    capacity[0] = wanted
    return DECODE_OK


cdef inline DecodeResult reserve(Item **items, uint32_t *capacity, uint32_t count) noexcept nogil:
    """Room for one item more than `count`."""
    return DECODE_OK if likely(count < capacity[0]) else grow(items, capacity)


cdef inline void release(Item **items, uint32_t *capacity, uint32_t kept) noexcept nogil:
    """Free the array if it is larger than `kept`."""
    if capacity[0] > kept:
        free(items[0])
        items[0] = NULL
        capacity[0] = 0


cdef inline void str_clear(Str *text) noexcept nogil:
    text.data = ""      # not NULL: an empty text may be given to memcmp and the like
    text.size = 0


cdef inline void message_reset(InferMessage *message, uint32_t kept) noexcept nogil:
    str_clear(&message.model_name)
    str_clear(&message.model_version)
    str_clear(&message.id)
    message.input_count = 0
    message.output_count = 0
    message.raw_count = 0
    message.parameter_count = 0
    message.tensor_parameter_count = 0
    message.dim_count = 0
    release(&message.inputs, &message.input_capacity, kept)
    release(&message.outputs, &message.output_capacity, kept)
    release(&message.raw, &message.raw_capacity, kept)
    release(&message.parameters, &message.parameter_capacity, kept)
    release(&message.tensor_parameters, &message.tensor_parameter_capacity, kept)
    release(&message.dims, &message.dim_capacity, kept)


cdef void infer_message_init(InferMessage *message) noexcept nogil:
    memset(message, 0, sizeof(InferMessage))
    message_reset(message, 0)


cdef void infer_message_clear(InferMessage *message) noexcept nogil:
    message_reset(message, KEPT_CAPACITY)


cdef void infer_message_free(InferMessage *message) noexcept nogil:
    message_reset(message, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Decoding
#
# Each function decodes one message type from its body p..end. `depth` is how many messages lie around the body,
# the request excluded; it only bounds unknown groups, since the known nesting is three deep.

cdef inline const uint8_t *read_str(const uint8_t *p, const uint8_t *end, Str *text) noexcept nogil:
    return read_text(p, end, &text.data, &text.size)


cdef DecodeResult decode_value(Parameter *parameter, const uint8_t *p, const uint8_t *end, int depth) noexcept nogil:
    """One InferParameter, merged into what `parameter` holds: of several choices the last one stays."""
    cdef uint32_t tag
    cdef uint64_t bits = 0
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL:
            return DECODE_MALFORMED
        if tag == VALUE_BOOL:
            p = read_varint(p, end, &bits)
            parameter.kind = PARAMETER_BOOL
            parameter.integer = bits != 0
        elif tag == VALUE_INT64 or tag == VALUE_UINT64:
            p = read_varint(p, end, &bits)
            parameter.kind = PARAMETER_INT64 if tag == VALUE_INT64 else PARAMETER_UINT64
            parameter.integer = <int64_t>bits
        elif tag == VALUE_STRING:
            p = read_str(p, end, &parameter.text)
            parameter.kind = PARAMETER_STRING
        elif tag == VALUE_DOUBLE:
            p = read_fixed64(p, end, &bits)
            parameter.kind = PARAMETER_DOUBLE
            memcpy(&parameter.real, &bits, 8)
        else:
            p = skip_field(p, end, tag, depth)
        if p == NULL:
            return DECODE_MALFORMED
    return DECODE_OK


cdef DecodeResult decode_entry(Parameter *parameter, const uint8_t *p, const uint8_t *end, int depth) noexcept nogil:
    """One map entry. Key and value may come in any order, be missing (empty, no choice), or repeat (last, merged)."""
    cdef uint32_t tag, size
    cdef DecodeResult result
    memset(parameter, 0, sizeof(Parameter))
    str_clear(&parameter.key)
    str_clear(&parameter.text)
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL:
            return DECODE_MALFORMED
        if tag == ENTRY_KEY:
            p = read_str(p, end, &parameter.key)
        elif tag == ENTRY_VALUE:
            p = read_size(p, end, &size)
            if p == NULL:
                return DECODE_MALFORMED
            result = decode_value(parameter, p, p + size, depth + 1)
            if result != DECODE_OK:
                return result
            p += size
        else:
            p = skip_field(p, end, tag, depth)
        if p == NULL:
            return DECODE_MALFORMED
    return DECODE_OK


cdef DecodeResult add_parameter(InferMessage *message, const uint8_t *p, const uint8_t *end) noexcept nogil:
    cdef DecodeResult result = reserve(&message.parameters, &message.parameter_capacity, message.parameter_count)
    if result != DECODE_OK:
        return result
    result = decode_entry(&message.parameters[message.parameter_count], p, end, 1)
    message.parameter_count += 1
    return result


cdef DecodeResult add_tensor_parameter(InferMessage *message, const uint8_t *p, const uint8_t *end) noexcept nogil:
    cdef DecodeResult result = reserve(&message.tensor_parameters, &message.tensor_parameter_capacity,
                                       message.tensor_parameter_count)
    if result != DECODE_OK:
        return result
    result = decode_entry(&message.tensor_parameters[message.tensor_parameter_count], p, end, 2)
    message.tensor_parameter_count += 1
    return result


cdef inline DecodeResult add_dim(InferMessage *message, uint64_t value) noexcept nogil:
    cdef DecodeResult result = reserve(&message.dims, &message.dim_capacity, message.dim_count)
    if result == DECODE_OK:
        message.dims[message.dim_count] = <int64_t>value
        message.dim_count += 1
    return result


cdef DecodeResult add_packed_dims(InferMessage *message, const uint8_t *p, const uint8_t *end) noexcept nogil:
    cdef uint64_t value
    cdef DecodeResult result
    while p < end:
        p = read_varint(p, end, &value)
        if p == NULL:
            return DECODE_MALFORMED
        result = add_dim(message, value)
        if result != DECODE_OK:
            return result
    return DECODE_OK


cdef inline int64_t packed_count(uint32_t field, const uint8_t *p, uint32_t size) noexcept nogil:
    """Elements in a packed body; -1 when it is malformed."""
    if field == CONTENTS_FP32:
        return size // 4 if size % 4 == 0 else -1
    if field == CONTENTS_FP64:
        return size // 8 if size % 8 == 0 else -1
    return packed_varint_count(p, p + size)


cdef DecodeResult decode_contents(InputHead *head, const uint8_t *p, const uint8_t *end) noexcept nogil:
    """One InferTensorContents, merged into what `head` has counted: check it, count its elements, keep none."""
    cdef uint32_t tag, field, wire_type, size
    cdef int64_t count
    cdef bint known
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL:
            return DECODE_MALFORMED
        field = tag >> 3
        wire_type = tag & 7
        known = CONTENTS_BOOL <= field <= CONTENTS_BYTES
        if known and wire_type == WIRE_LEN:
            p = read_size(p, end, &size)
            if p == NULL:
                return DECODE_MALFORMED
            if field == CONTENTS_BYTES:
                count = 1
                head.contents_bytes += size
            else:
                count = packed_count(field, p, size)
                if count < 0:
                    return DECODE_MALFORMED
            p += size
        else:
            count = known and wire_type == contents_wire_type(field)
            p = skip_field(p, end, tag, 2)
            if p == NULL:
                return DECODE_MALFORMED
        if count:
            head.contents_mask |= <uint32_t>1 << field
            head.contents_count += count
    return DECODE_OK


cdef DecodeResult decode_input(InferMessage *message, const uint8_t *p, const uint8_t *end) noexcept nogil:
    cdef uint32_t tag, size
    cdef uint64_t dim
    cdef DecodeResult result = reserve(&message.inputs, &message.input_capacity, message.input_count)
    if result != DECODE_OK:
        return result
    cdef InputHead *head = &message.inputs[message.input_count]
    message.input_count += 1
    memset(head, 0, sizeof(InputHead))
    str_clear(&head.name)
    str_clear(&head.datatype)
    head.body.data = <const char *>p
    head.body.size = <uint32_t>(end - p)
    head.first_dim = message.dim_count
    head.first_parameter = message.tensor_parameter_count
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL:
            return DECODE_MALFORMED
        if tag == TENSOR_NAME:
            p = read_str(p, end, &head.name)
        elif tag == TENSOR_DATATYPE:
            p = read_str(p, end, &head.datatype)
        elif tag == TENSOR_DIM:
            p = read_varint(p, end, &dim)
            result = add_dim(message, dim) if p != NULL else DECODE_MALFORMED
            if result != DECODE_OK:
                return result
        elif tag == TENSOR_SHAPE or tag == TENSOR_PARAMETERS or tag == TENSOR_CONTENTS:
            p = read_size(p, end, &size)
            if p == NULL:
                return DECODE_MALFORMED
            if tag == TENSOR_SHAPE:
                result = add_packed_dims(message, p, p + size)
            elif tag == TENSOR_PARAMETERS:
                result = add_tensor_parameter(message, p, p + size)
            else:
                head.has_contents = True
                result = decode_contents(head, p, p + size)
            if result != DECODE_OK:
                return result
            p += size
        else:
            p = skip_field(p, end, tag, 1)
        if p == NULL:
            return DECODE_MALFORMED
    head.rank = message.dim_count - head.first_dim
    head.parameter_count = message.tensor_parameter_count - head.first_parameter
    return DECODE_OK


cdef DecodeResult decode_output(InferMessage *message, const uint8_t *p, const uint8_t *end) noexcept nogil:
    cdef uint32_t tag, size
    cdef DecodeResult result = reserve(&message.outputs, &message.output_capacity, message.output_count)
    if result != DECODE_OK:
        return result
    cdef OutputHead *head = &message.outputs[message.output_count]
    message.output_count += 1
    str_clear(&head.name)
    head.first_parameter = message.tensor_parameter_count
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL:
            return DECODE_MALFORMED
        if tag == REQUESTED_NAME:
            p = read_str(p, end, &head.name)
        elif tag == REQUESTED_PARAMETERS:
            p = read_size(p, end, &size)
            if p == NULL:
                return DECODE_MALFORMED
            result = add_tensor_parameter(message, p, p + size)
            if result != DECODE_OK:
                return result
            p += size
        else:
            p = skip_field(p, end, tag, 1)
        if p == NULL:
            return DECODE_MALFORMED
    head.parameter_count = message.tensor_parameter_count - head.first_parameter
    return DECODE_OK


cdef DecodeResult add_raw(InferMessage *message, const uint8_t *data, uint32_t size) noexcept nogil:
    cdef DecodeResult result = reserve(&message.raw, &message.raw_capacity, message.raw_count)
    if result == DECODE_OK:
        message.raw[message.raw_count].data = <const char *>data
        message.raw[message.raw_count].size = size
        message.raw_count += 1
    return result


cdef DecodeResult decode_request(InferMessage *message, const uint8_t *p, const uint8_t *end) noexcept nogil:
    cdef uint32_t tag, size
    cdef DecodeResult result
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL:
            return DECODE_MALFORMED
        if tag == REQUEST_MODEL_NAME:
            p = read_str(p, end, &message.model_name)
        elif tag == REQUEST_MODEL_VERSION:
            p = read_str(p, end, &message.model_version)
        elif tag == REQUEST_ID:
            p = read_str(p, end, &message.id)
        elif (tag == REQUEST_PARAMETERS or tag == REQUEST_INPUTS or tag == REQUEST_OUTPUTS or tag == REQUEST_RAW):
            p = read_size(p, end, &size)
            if p == NULL:
                return DECODE_MALFORMED
            if tag == REQUEST_INPUTS:
                result = decode_input(message, p, p + size)
            elif tag == REQUEST_RAW:
                result = add_raw(message, p, size)
            elif tag == REQUEST_OUTPUTS:
                result = decode_output(message, p, p + size)
            else:
                result = add_parameter(message, p, p + size)
            if result != DECODE_OK:
                return result
            p += size
        else:
            p = skip_field(p, end, tag, 0)
        if p == NULL:
            return DECODE_MALFORMED
    return DECODE_OK


cdef DecodeResult infer_decode(const uint8_t *data, size_t size, InferMessage *message) noexcept nogil:
    cdef DecodeResult result = DECODE_MALFORMED
    infer_message_clear(message)
    if size <= MESSAGE_LIMIT:
        result = decode_request(message, data, data + size)
        if result != DECODE_OK:
            infer_message_clear(message)
    return result


cdef bint infer_message_copy_parameters(InferMessage *message, const InferMessage *other) noexcept nogil:
    message.parameter_count = 0
    return infer_message_add_parameters(message, other)


cdef bint infer_message_add_parameters(InferMessage *message, const InferMessage *other) noexcept nogil:
    cdef uint32_t count = message.parameter_count + other.parameter_count
    cdef Parameter *grown
    if count > message.parameter_capacity:
        grown = <Parameter *>realloc(message.parameters, count * sizeof(Parameter))
        if grown == NULL:
            return False
        message.parameters = grown
        message.parameter_capacity = count
    if other.parameter_count:
        memcpy(message.parameters + message.parameter_count, other.parameters,
               other.parameter_count * sizeof(Parameter))
    message.parameter_count = count
    return True


cdef const Parameter *parameter_find(const Parameter *first, uint32_t count, const char *key,
                                     size_t key_size) noexcept nogil:
    cdef const Parameter *parameter = first + count
    while parameter != first:
        parameter -= 1
        if parameter.key.size == key_size and memcmp(parameter.key.data, key, key_size) == 0:
            return parameter
    return NULL
