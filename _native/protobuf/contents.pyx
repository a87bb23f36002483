"""Typed contents: the elements of InferTensorContents as the bytes that raw contents have."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from inferd._native.protobuf.codec cimport InputHead
from inferd._native.protobuf.datatype cimport (
    DT_BOOL,
    DT_BYTES,
    DT_FP32,
    DT_FP64,
    DT_INT8,
    DT_INT16,
    DT_INT32,
    DT_INT64,
    DT_UINT8,
    DT_UINT16,
    DT_UINT32,
    DT_UINT64,
    Datatype,
    datatype_size,
)
from inferd._native.protobuf.tags cimport (
    CONTENTS_BOOL,
    CONTENTS_BYTES,
    CONTENTS_FP32,
    CONTENTS_FP64,
    CONTENTS_INT,
    CONTENTS_INT64,
    CONTENTS_UINT,
    CONTENTS_UINT64,
    TENSOR_CONTENTS,
    contents_wire_type,
)
from inferd._native.protobuf.wire cimport WIRE_LEN, read_size, read_tag, read_varint, skip_field


cdef uint32_t contents_field(Datatype datatype) noexcept nogil:
    if datatype == DT_BOOL:
        return CONTENTS_BOOL
    if datatype == DT_INT8 or datatype == DT_INT16 or datatype == DT_INT32:
        return CONTENTS_INT
    if datatype == DT_INT64:
        return CONTENTS_INT64
    if datatype == DT_UINT8 or datatype == DT_UINT16 or datatype == DT_UINT32:
        return CONTENTS_UINT
    if datatype == DT_UINT64:
        return CONTENTS_UINT64
    if datatype == DT_FP32:
        return CONTENTS_FP32
    if datatype == DT_FP64:
        return CONTENTS_FP64
    return CONTENTS_BYTES if datatype == DT_BYTES else 0


cdef uint64_t contents_size(const InputHead *head, Datatype datatype) noexcept nogil:
    if datatype == DT_BYTES:
        return head.contents_bytes + 4 * head.contents_count
    return head.contents_count * datatype_size(datatype)


cdef inline uint8_t *write_bytes_element(uint8_t *out, const uint8_t *data, uint32_t size) noexcept nogil:
    memcpy(out, &size, 4)
    memcpy(out + 4, data, size)
    return out + 4 + size


cdef inline uint8_t *write_narrowed(uint8_t *out, uint64_t value, Datatype datatype, uint32_t width) noexcept nogil:
    """The low `width` bytes of a varint's value; for BOOL 0 or 1."""
    if datatype == DT_BOOL:
        out[0] = value != 0
    elif width == 8:
        memcpy(out, &value, 8)
    elif width == 4:
        memcpy(out, &value, 4)
    elif width == 2:
        memcpy(out, &value, 2)
    else:
        out[0] = <uint8_t>value
    return out + width


cdef uint8_t *copy_varints(const uint8_t *p, const uint8_t *end, Datatype datatype, uint8_t *out) noexcept nogil:
    cdef uint32_t width = datatype_size(datatype)
    cdef uint64_t value
    while p < end:
        p = read_varint(p, end, &value)
        if p == NULL:
            return out
        out = write_narrowed(out, value, datatype, width)
    return out


cdef uint8_t *copy_field(const uint8_t *p, uint32_t size, Datatype datatype, uint8_t *out) noexcept nogil:
    """Write the content of a length-delimited field of the datatype's number: packed elements, or one of BYTES."""
    if datatype == DT_BYTES:
        return write_bytes_element(out, p, size)
    if datatype == DT_FP32 or datatype == DT_FP64:
        memcpy(out, p, size)
        return out + size
    return copy_varints(p, p + size, datatype, out)


cdef uint8_t *copy_contents(const uint8_t *p, const uint8_t *end, Datatype datatype, uint8_t *out) noexcept nogil:
    """Write the elements of one InferTensorContents; the end of what was written."""
    cdef uint32_t field = contents_field(datatype)
    cdef uint32_t unpacked = field << 3 | contents_wire_type(field)
    cdef uint32_t packed = field << 3 | WIRE_LEN
    cdef const uint8_t *value
    cdef uint32_t tag, size
    while p < end:
        value = read_tag(p, end, &tag)
        if value == NULL:
            return out
        if tag == packed:
            p = read_size(value, end, &size)
            if p == NULL:
                return out
            out = copy_field(p, size, datatype, out)
            p += size
            continue
        p = skip_field(value, end, tag, 2)
        if p == NULL:
            return out
        if tag == unpacked and datatype != DT_FP32 and datatype != DT_FP64:
            out = copy_varints(value, p, datatype, out)
        elif tag == unpacked:
            memcpy(out, value, p - value)
            out += p - value
    return out


cdef void contents_copy(const InputHead *head, Datatype datatype, uint8_t *out) noexcept nogil:
    # infer_decode has checked these bytes: the tests for NULL below and in copy_contents never hold, they only keep
    # a caller that broke the contract from reading elsewhere.
    cdef const uint8_t *p = <const uint8_t *>head.body.data
    cdef const uint8_t *end = p + head.body.size
    cdef uint32_t tag, size
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL:
            return
        if tag != TENSOR_CONTENTS:
            p = skip_field(p, end, tag, 1)
            if p == NULL:
                return
            continue
        p = read_size(p, end, &size)
        if p == NULL:
            return
        out = copy_contents(p, p + size, datatype, out)
        p += size
