"""Supplied inputs, which the batch provides and no request contains: they describe sequences and ragged inputs.

A signature lists them behind the inputs of requests. Gathering a batch fills them, so for backends all inputs are
alike. Controls have one element for each row, in the shape (rows, 1), or (1,) for a model without batch dimension, as
Triton's core makes them (the "1-dimensional" of its guide does not count the batch dimension).
"""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from inferd._native.memory.resource cimport block_give, block_share, block_take
from inferd._native.protobuf.datatype cimport DT_BYTES, DT_FP32, datatype_size
from inferd._native.request.request cimport Correlation, InputData, Request
from inferd._native.request.signature cimport (
    SUPPLY_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO,
    SUPPLY_CORRELATION,
    SUPPLY_ELEMENT_COUNT,
    SUPPLY_END,
    SUPPLY_END_REASON,
    SUPPLY_ITEM_SHAPE,
    SUPPLY_ITEM_SHAPE_FLATTEN,
    SUPPLY_MAX_ELEMENT_COUNT_AS_SHAPE,
    SUPPLY_START,
    SUPPLY_STATE,
    Signature,
    Supplied,
    SupplyKind,
)
from inferd._native.shape cimport elements_of

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
    if request.sequenced.null:
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
        memcpy(at, &request.sequenced.end_reason, sizeof(int32_t))
    elif supplied.kind != SUPPLY_CORRELATION:
        memcpy(at, supplied.values[says_yes(request, supplied.kind)], size)
    elif signature.inputs[signature.input_count + index].datatype != DT_BYTES:
        memcpy(at, &request.correlation.number, size)  # its low bytes: the width of the control
    else:
        length = correlation_text(&request.correlation, number, &text)
        memcpy(at, &length, 4)
        memcpy(at + 4, text, length)


# ---------------------------------------------------------------------------------------------------------------------
# About ragged inputs ("Ragged Batching" in Triton's user guide)

cdef inline void put_number(GatheredInput *out, size_t index, bint real, int64_t value) noexcept nogil:
    # INT32 or FP32
    if real:
        (<float *>out.block.data)[index] = <float>value
    else:
        (<int32_t *>out.block.data)[index] = <int32_t>value


cdef inline int64_t count_of(const InputData *data) noexcept nogil:
    return elements_of(data.shape, data.rank) if data.present else 0


cdef void set_ragged_shape(const Signature *signature, const Supplied *supplied, Request *const *requests,
                           uint32_t count, uint32_t rows, GatheredInput *out) noexcept nogil:
    cdef uint32_t rank = signature.inputs[supplied.source].rank
    cdef uint32_t i
    out.rank = 1
    out.shape[0] = count
    if supplied.kind == SUPPLY_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
        out.shape[0] = count + 1
    elif supplied.kind == SUPPLY_MAX_ELEMENT_COUNT_AS_SHAPE:
        out.shape[0] = 0
        for i in range(count):
            out.shape[0] = max(out.shape[0], count_of(&requests[i].inputs[supplied.source]))
    elif supplied.kind == SUPPLY_ITEM_SHAPE:
        out.rank = 2
        out.shape[0] = rows
        out.shape[1] = rank
    elif supplied.kind == SUPPLY_ITEM_SHAPE_FLATTEN:
        out.shape[0] = <int64_t>rows * rank


cdef void put_shapes(const Supplied *supplied, Request *const *requests, uint32_t count, bint real, uint32_t rank,
                     bint batches, GatheredInput *out) noexcept nogil:
    cdef const InputData *data
    cdef size_t at = 0
    cdef uint32_t i, k, _
    for i in range(count):
        data = &requests[i].inputs[supplied.source]
        for _ in range(requests[i].rows):
            for k in range(rank):
                put_number(out, at, real, data.shape[k + batches] if data.present else 0)
                at += 1


cdef void put_counts(const Supplied *supplied, Request *const *requests, uint32_t count, bint real,
                     GatheredInput *out) noexcept nogil:
    cdef int64_t sum = 0
    cdef uint32_t first = 0
    cdef uint32_t i
    if supplied.kind == SUPPLY_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
        put_number(out, 0, real, 0)
        first = 1
    for i in range(count):
        if supplied.kind == SUPPLY_ELEMENT_COUNT:
            sum = 0
        sum += count_of(&requests[i].inputs[supplied.source])
        put_number(out, first + i, real, sum)


cdef bint supply_ragged(const Signature *signature, uint32_t index, Request *const *requests, uint32_t count,
                        uint32_t rows, GatheredInput *out) noexcept nogil:
    cdef const Supplied *supplied = &signature.supplied[index]
    cdef bint real = signature.inputs[signature.input_count + index].datatype == DT_FP32
    set_ragged_shape(signature, supplied, requests, count, rows, out)
    out.size = 4 * <size_t>elements_of(out.shape, out.rank)
    out.present = True
    out.block = block_take(out.size)
    if out.block == NULL:
        return False
    out.data = out.block.data
    if supplied.kind == SUPPLY_MAX_ELEMENT_COUNT_AS_SHAPE:
        memset(out.block.data, 0, out.size)  # only its shape matters
    elif supplied.kind == SUPPLY_ITEM_SHAPE or supplied.kind == SUPPLY_ITEM_SHAPE_FLATTEN:
        put_shapes(supplied, requests, count, real, signature.inputs[supplied.source].rank,
                   signature.max_batch_size > 0, out)
    else:
        put_counts(supplied, requests, count, real, out)
    return True


# ---------------------------------------------------------------------------------------------------------------------

cdef bint supply(const Signature *signature, uint32_t index, Request *const *requests, uint32_t count, uint32_t rows,
                 GatheredInput *out) noexcept nogil:
    if signature.supplied[index].kind >= SUPPLY_ELEMENT_COUNT:
        return supply_ragged(signature, index, requests, count, rows, out)
    return supply_control(signature, index, requests, count, rows, out)


cdef bint supply_control(const Signature *signature, uint32_t index, Request *const *requests, uint32_t count,
                         uint32_t rows, GatheredInput *out) noexcept nogil:
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


# ---------------------------------------------------------------------------------------------------------------------
# For each request

cdef bint supply_one(const Signature *signature, uint32_t index, Request *const *request,
                     InputData *out) noexcept nogil:
    cdef GatheredInput made
    if signature.supplied[index].kind == SUPPLY_STATE:
        out[0] = request[0].sequenced.states[signature.supplied[index].source]
        if out.block != NULL:
            block_share(out.block)
        return True
    if not supply(signature, index, request, 1, request[0].rows, &made):
        return False
    out.present = True
    out.data = made.data
    out.size = made.size
    out.block = made.block
    out.rank = made.rank
    memcpy(out.shape, made.shape, made.rank * sizeof(int64_t))
    return True


cdef InputData *supply_each(const Signature *signature, Request *const *requests, uint32_t count) noexcept nogil:
    cdef uint32_t each = signature.supplied_count
    cdef InputData *supplied = <InputData *>calloc(max(<uint32_t>1, count * each), sizeof(InputData)) if each else NULL
    cdef uint32_t i
    for i in range(count * each if supplied != NULL else 0):
        if not supply_one(signature, i % each, &requests[i // each], &supplied[i]):
            supply_free(signature, supplied, count)
            return NULL
    return supplied


cdef void supply_free(const Signature *signature, InputData *supplied, uint32_t count) noexcept nogil:
    cdef uint32_t i
    for i in range(count * signature.supplied_count if supplied != NULL else 0):
        block_give(supplied[i].block)
    free(supplied)
