"""Reads a ModelInferResponse, and compares it with the request."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, strlen

from inferd_client.driver.workload cimport (
    CORRECT, MALFORMED, WRONG_BYTES, WRONG_ID, WRONG_MODEL, WRONG_OUTPUTS, WRONG_SHAPE, Verdict,
)
from bench.nonce.plan cimport MAX_TENSORS, Model, Part, Plan

cdef struct Reader:
    const uint8_t *at
    const uint8_t *end
    bint failed

cdef struct Field:
    uint32_t number
    uint64_t value            # wire type 0
    const uint8_t *data       # wire type 2
    size_t size


cdef uint64_t take_varint(Reader *reader) noexcept nogil:
    cdef uint64_t value = 0
    cdef uint8_t byte
    cdef int shift = 0
    while reader.at < reader.end and shift < 64:
        byte = reader.at[0]
        reader.at += 1
        value |= <uint64_t> (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    reader.failed = True
    return 0


cdef bint take_field(Reader *reader, Field *field) noexcept nogil:
    """Read the next field; False at the end or when the message is malformed. Down to the depth read here, a
    ModelInferResponse has only varint and length-delimited fields."""
    cdef uint64_t tag
    if reader.at == reader.end or reader.failed:
        return False
    tag = take_varint(reader)
    field.number = <uint32_t> (tag >> 3)
    field.value = take_varint(reader)
    field.data = NULL
    field.size = 0
    if tag & 7 == 2:
        field.data = reader.at
        field.size = field.value
        if field.value > <uint64_t> (reader.end - reader.at):
            reader.failed = True
        else:
            reader.at += field.value
    elif tag & 7 != 0:
        reader.failed = True
    return not reader.failed


cdef bint equals(const Field *field, const char *text) noexcept nogil:
    return field.size == strlen(text) and memcmp(field.data, text, field.size) == 0


cdef Verdict verify_shape(const Field *packed, const Part *part) noexcept nogil:
    cdef Reader reader = Reader(packed.data, packed.data + packed.size, False)
    cdef uint32_t i
    for i in range(part.rank):
        if reader.at == reader.end or <int64_t> take_varint(&reader) != part.shape[i]:
            return WRONG_SHAPE
    return CORRECT if reader.at == reader.end and not reader.failed else WRONG_SHAPE


cdef int find_output(const Model *model, const Field *name) noexcept nogil:
    cdef uint32_t i
    for i in range(model.tensor_count):
        if equals(name, model.tensors[i].output):
            return <int> i
    return -1


cdef Verdict verify_output(const Field *encoded, const Plan *plan, int *which) noexcept nogil:
    """Check one InferOutputTensor; `which` becomes its index in the model."""
    cdef Reader reader = Reader(encoded.data, encoded.data + encoded.size, False)
    cdef Field field
    cdef Field datatype = Field(0, 0, NULL, 0), shape = Field(0, 0, NULL, 0)
    which[0] = -1
    while take_field(&reader, &field):
        if field.number == 1:
            which[0] = find_output(plan.model, &field)
        elif field.number == 2:
            datatype = field
        elif field.number == 3:
            shape = field
    if reader.failed:
        return MALFORMED
    if which[0] < 0 or not plan.parts[which[0]].named:
        return WRONG_OUTPUTS
    if not equals(&datatype, plan.model.tensors[which[0]].datatype):
        return WRONG_OUTPUTS
    return verify_shape(&shape, &plan.parts[which[0]])


cdef Verdict verify_response(const uint8_t *data, size_t size, const Plan *plan) noexcept nogil:
    cdef Reader reader = Reader(data, data + size, False)
    cdef int order[MAX_TENSORS]
    cdef uint32_t outputs = 0, raws = 0, i, seen = 0, wanted = 0
    cdef bint named_model = False, same_id = plan.id_size == 0
    cdef const Part *part
    cdef Verdict verdict
    cdef Field field
    while take_field(&reader, &field):
        if field.number == 1:
            named_model = equals(&field, plan.model.name)
        elif field.number == 3:
            same_id = field.size == plan.id_size and memcmp(field.data, plan.id, plan.id_size) == 0
        elif field.number == 5:
            if outputs == plan.model.tensor_count:
                return WRONG_OUTPUTS
            verdict = verify_output(&field, plan, &order[outputs])
            if verdict != CORRECT:
                return verdict
            seen |= <uint32_t> 1 << order[outputs]
            outputs += 1
        elif field.number == 6:
            # the schema's order puts every output before the raw contents
            if raws >= outputs:
                return WRONG_OUTPUTS
            part = &plan.parts[order[raws]]
            if field.size != part.size or memcmp(field.data, part.raw, part.size) != 0:
                return WRONG_BYTES
            raws += 1
    if reader.failed:
        return MALFORMED
    if not named_model:
        return WRONG_MODEL
    if not same_id:
        return WRONG_ID
    for i in range(plan.model.tensor_count):
        wanted |= <uint32_t> plan.parts[i].named << i
    return CORRECT if seen == wanted and raws == outputs else WRONG_OUTPUTS
