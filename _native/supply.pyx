"""Inputs that the batch provides and no request carries: what a model is told about sequences.

A signature lists them behind the inputs of requests. Gathering a batch fills them, so that backends see all inputs
alike. Controls have one element for each row, in the shape (rows, 1), or (1,) for a model without batch dimension, as
Triton gives them ("Sequence Batcher" in its user guide, "architecture.md").
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from _native.datatype cimport DT_BYTES, datatype_size
from _native.memory cimport block_take
from _native.request cimport Correlation, Request
from _native.signature cimport (
    SUPPLY_CORRELATION,
    SUPPLY_END,
    SUPPLY_END_REASON,
    SUPPLY_START,
    Signature,
    Supplied,
    SupplyKind,
)

cdef extern from *:
    """
    #include <inttypes.h>
    #include <stdio.h>
    static inline unsigned inferd_decimal(char *out, uint64_t number) {
        return (unsigned)snprintf(out, 24, "%" PRIu64, number);
    }
    """
    uint32_t decimal "inferd_decimal"(char *out, uint64_t number) noexcept nogil


cdef inline bint says_yes(const Request *request, SupplyKind kind) noexcept nogil:
    if request.null:
        return False
    if kind == SUPPLY_START:
        return request.sequence_start
    if kind == SUPPLY_END:
        return request.sequence_end
    return True  # READY


# ---------------------------------------------------------------------------------------------------------------------
# Elements

cdef uint32_t correlation_text(const Correlation *correlation, char *number, const char **text) noexcept nogil:
    # the id as text; `number` has room for 24 characters
    if not correlation.given:
        return 0
    if correlation.text.data != NULL:
        text[0] = correlation.text.data
        return correlation.text.size
    text[0] = number
    return decimal(number, correlation.number)


cdef size_t element_size(const Signature *signature, uint32_t index, const Request *request) noexcept nogil:
    cdef uint32_t size = datatype_size(signature.inputs[signature.input_count + index].datatype)
    cdef char number[24]
    cdef const char *text = NULL
    if size:
        return size
    return 4 + <size_t>correlation_text(&request.correlation, number, &text)


cdef void put_element(const Signature *signature, uint32_t index, const Request *request, uint8_t *at,
                      size_t size) noexcept nogil:
    cdef const Supplied *supplied = &signature.supplied[index]
    cdef char number[24]
    cdef const char *text = NULL
    cdef uint32_t length
    if supplied.kind == SUPPLY_END_REASON:
        memcpy(at, &request.end_reason, sizeof(int32_t))
    elif supplied.kind != SUPPLY_CORRELATION:
        memcpy(at, supplied.values[says_yes(request, supplied.kind)], size)
    elif signature.inputs[signature.input_count + index].datatype != DT_BYTES:
        memcpy(at, &request.correlation.number, size)  # its low bytes: the width of the control
    else:
        length = correlation_text(&request.correlation, number, &text)
        memcpy(at, &length, 4)
        memcpy(at + 4, text, length)


cdef bint supply(const Signature *signature, uint32_t index, Request *const *requests, uint32_t count, uint32_t rows,
                 GatheredInput *out) noexcept nogil:
    cdef size_t total = 0
    cdef size_t size
    cdef uint8_t *at
    cdef uint32_t i, _
    for i in range(count):
        total += element_size(signature, index, requests[i]) * requests[i].rows
    out.present = True
    out.block = block_take(total)
    if out.block == NULL:
        return False
    at = out.block.data
    for i in range(count):
        size = element_size(signature, index, requests[i])
        for _ in range(requests[i].rows):
            put_element(signature, index, requests[i], at, size)
            at += size
    out.data = out.block.data
    out.size = total
    out.rank = 0
    if signature.max_batch_size > 0:
        out.shape[0] = rows
        out.rank = 1
    out.shape[out.rank] = 1
    out.rank += 1
    return True
