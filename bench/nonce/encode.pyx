"""Writing a ModelInferRequest."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove, strlen

from bench.nonce.plan cimport (
    EXCESS_PAYLOAD, SHORT_PAYLOAD, UNKNOWN_DATATYPE, UNKNOWN_INPUT, UNKNOWN_MODEL, Part, Plan, Tensor,
)


cdef inline uint8_t *put_varint(uint8_t *out, uint64_t value) noexcept nogil:
    while value >= 0x80:
        out[0] = <uint8_t> (value | 0x80)
        out += 1
        value >>= 7
    out[0] = <uint8_t> value
    return out + 1


cdef uint8_t *put_bytes(uint8_t *out, uint32_t field, const void *data, size_t size) noexcept nogil:
    out = put_varint(put_varint(out, field << 3 | 2), size)
    memcpy(out, data, size)
    return out + size


cdef uint8_t *put_text(uint8_t *out, uint32_t field, const char *text) noexcept nogil:
    return put_bytes(out, field, text, strlen(text))


cdef uint8_t *put_name(uint8_t *out, uint32_t field, const char *name, const char *wrong, bint fault) noexcept nogil:
    return put_text(out, field, wrong if fault else name)


cdef uint8_t *close_nested(uint8_t *start, uint8_t *end, uint32_t field) noexcept nogil:
    """Insert tag and length before the bytes written at `start`."""
    cdef uint8_t head[16]
    cdef size_t size = end - start
    cdef size_t head_size = put_varint(put_varint(head, field << 3 | 2), size) - head
    memmove(start + head_size, start, size)
    memcpy(start, head, head_size)
    return end + head_size


cdef uint8_t *put_typed(uint8_t *out, const Tensor *tensor, const Part *part) noexcept nogil:
    """Write the elements as the field of InferTensorContents for their datatype."""
    cdef uint8_t *start = out
    cdef const uint8_t *raw = part.raw
    cdef uint64_t i, _i, value
    cdef uint32_t size = tensor.element_size
    if size == 0:
        for _i in range(part.elements):
            memcpy(&size, raw, 4)
            out = put_bytes(out, tensor.contents_field, raw + 4, size)
            raw += 4 + size
        return out
    if tensor.packed_fixed:
        return put_bytes(out, tensor.contents_field, raw, part.size)
    for i in range(part.elements):
        value = 0
        memcpy(&value, raw + i * size, size)
        if tensor.is_signed and size < 8 and value >> (8 * size - 1):
            value |= ~<uint64_t> 0 << (8 * size)
        out = put_varint(out, value)
    return close_nested(start, out, tensor.contents_field)


cdef uint8_t *put_shape(uint8_t *out, const Part *part) noexcept nogil:
    cdef uint8_t *start = out
    cdef uint32_t i
    for i in range(part.rank):
        out = put_varint(out, <uint64_t> part.shape[i])
    return close_nested(start, out, 3)


cdef uint8_t *put_input(uint8_t *out, const Plan *plan, uint32_t i) noexcept nogil:
    cdef uint8_t *start = out
    cdef uint8_t *contents
    cdef const Tensor *tensor = &plan.model.tensors[i]
    out = put_name(out, 1, tensor.input, b"NOSUCH", plan.fault == UNKNOWN_INPUT and i == 0)
    out = put_name(out, 2, tensor.datatype, b"FP99", plan.fault == UNKNOWN_DATATYPE and i == 0)
    out = put_shape(out, &plan.parts[i])
    if plan.typed:
        contents = out
        out = close_nested(contents, put_typed(contents, tensor, &plan.parts[i]), 5)
    return close_nested(start, out, 5)


cdef uint8_t *put_request(uint8_t *out, const Plan *plan) noexcept nogil:
    cdef uint32_t i
    cdef size_t size
    out = put_name(out, 1, plan.model.name, b"nosuch", plan.fault == UNKNOWN_MODEL)
    if plan.versioned:
        out = put_text(out, 2, b"1")
    if plan.id_size:
        out = put_bytes(out, 3, plan.id, plan.id_size)
    for i in range(plan.model.tensor_count):
        out = put_input(out, plan, i)
    if plan.any_named:
        for i in range(plan.model.tensor_count):
            if plan.parts[i].named:
                out = close_nested(out, put_text(out, 1, plan.model.tensors[i].output), 6)
    if not plan.typed:
        for i in range(plan.model.tensor_count):
            size = plan.parts[i].size
            if i == 0 and plan.fault == SHORT_PAYLOAD:
                size -= 1
            elif i == 0 and plan.fault == EXCESS_PAYLOAD:
                size += 1
            out = put_bytes(out, 7, plan.parts[i].raw, size)
    return out
