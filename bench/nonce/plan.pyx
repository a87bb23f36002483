"""The plan of a request, made from its nonce: model, rows, shapes, payload, id, intended errors."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from inferd_client.driver.splitmix cimport draw

cdef enum:
    TYPED_LIMIT = 4096        # raw bytes of a tensor up to which it may travel in typed contents
    COMMON_DIM = 16           # half of all requests have it in every dimension, so that they share batches


cdef int64_t draw_dim(uint64_t *state) noexcept nogil:
    """A small dimension from 1 to 40; some sizes are frequent."""
    cdef uint64_t value = draw(state)
    return <int64_t> (1 << (value % 6)) if value & 0x300 else 1 + <int64_t> ((value >> 32) % 40)


cdef void draw_shape(Catalogue *catalogue, const Tensor *tensor, Part *part, bint common, int64_t rows,
                     uint64_t *state) noexcept nogil:
    cdef uint32_t i
    cdef int64_t dim
    part.rank = 0
    part.elements = 1
    if rows > 0:
        part.shape[0] = rows
        part.rank = 1
        part.elements = rows
    for i in range(tensor.rank):
        dim = COMMON_DIM if common else draw_dim(state)
        if i == 0 and (draw(state) & 0xFFFF) < catalogue.large_share and not common:
            dim = 1 + <int64_t> (draw(state) % catalogue.large_elements)
        part.shape[part.rank] = dim
        part.rank += 1
        part.elements *= dim
    part.payload_seed = draw(state)


cdef void draw_id(Plan *plan, uint64_t nonce, uint64_t *state) noexcept nogil:
    """The nonce in hexadecimal with a tail of 0 to 23 letters; one request in sixteen has no id."""
    cdef uint64_t value = draw(state)
    cdef uint32_t i
    plan.id_size = 0
    if value & 15 == 0:
        return
    for i in range(16):
        plan.id[i] = b"0123456789abcdef"[(nonce >> (4 * i)) & 15]
    plan.id_size = 16 + <uint32_t> ((value >> 8) % 24)
    for i in range(16, plan.id_size):
        plan.id[i] = <char> (97 + (value >> i) % 26)


cdef bint may_be_typed(const Plan *plan) noexcept nogil:
    """Typed contents are all or nothing; a payload of the wrong size needs raw contents."""
    cdef uint32_t i
    if plan.fault == SHORT_PAYLOAD or plan.fault == EXCESS_PAYLOAD:
        return False
    for i in range(plan.model.tensor_count):
        if plan.model.tensors[i].contents_field == 0:
            return False
        if payload_bound(&plan.model.tensors[i], &plan.parts[i]) > TYPED_LIMIT:
            return False
    return True


cdef void plan_draw(Catalogue *catalogue, uint64_t nonce, Plan *plan) noexcept nogil:
    cdef uint64_t state = nonce
    cdef uint64_t value = draw(&state)
    cdef uint32_t i
    cdef int64_t rows
    cdef bint common = value & 1
    plan.model = &catalogue.models[(value >> 8) % catalogue.model_count]
    plan.typed = (value >> 32) & 7 == 0
    plan.versioned = (value >> 40) & 3 == 0
    plan.any_named = (value >> 48) & 1
    value = draw(&state)
    plan.fault = NO_FAULT
    if (value & 0xFFFF) < catalogue.fault_share:
        plan.fault = <Fault> (1 + (value >> 16) % (<int> FAULT_COUNT - 1))
    rows = 1 + <int64_t> ((value >> 32) % min(plan.model.max_rows, 8)) if plan.model.max_rows else 0
    for i in range(plan.model.tensor_count):
        draw_shape(catalogue, &plan.model.tensors[i], &plan.parts[i], common, rows, &state)
        # at least the first output is requested
        plan.parts[i].named = not plan.any_named or i == 0 or draw(&state) & 1
    draw_id(plan, nonce, &state)
    plan.typed = plan.typed and may_be_typed(plan)


cdef uint64_t payload_bound(const Tensor *tensor, const Part *part) noexcept nogil:
    return (part.elements * (tensor.element_size if tensor.element_size else 4 + 32) + 8) & ~<uint64_t> 7


cdef size_t fill_strings(uint64_t elements, uint64_t seed, uint8_t *out) noexcept nogil:
    """Write elements of 0 to 31 random bytes, each after its length; return the bytes written."""
    cdef uint8_t *start = out
    cdef uint64_t value, _i
    cdef uint32_t size
    for _i in range(elements):
        value = draw(&seed)
        size = value & 31
        memcpy(out, &size, 4)
        out += 4
        while size > 0:
            value = draw(&seed)
            memcpy(out, &value, min(size, 8))
            out += min(size, 8)
            size -= min(size, 8)
    return out - start


cdef size_t payload_fill(const Tensor *tensor, const Part *part, uint8_t *out) noexcept nogil:
    cdef uint64_t seed = part.payload_seed
    cdef uint64_t value, i
    cdef size_t size = part.elements * tensor.element_size
    if tensor.element_size == 0:
        return fill_strings(part.elements, seed, out)
    for i in range((size + 7) // 8):
        value = draw(&seed)
        if tensor.is_bool:
            value &= <uint64_t> 0x0101010101010101
        memcpy(out + 8 * i, &value, 8)
    return size
