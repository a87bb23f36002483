"""The parameters of a request that the server interprets: sequence, priority, timeout, and the prefix `triton_`.

They are read in one pass. If one is malformed, a second pass finds, by a hash table of the keys, whether a later one
with the same key replaces it. Both take time in proportion to the message.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, strlen

from inferd._native.protobuf.codec cimport (
    PARAMETER_BOOL,
    PARAMETER_INT64,
    PARAMETER_NONE,
    PARAMETER_STRING,
    PARAMETER_UINT64,
    Parameter,
)
from inferd._native.request.request cimport request_fail
from inferd._native.status cimport STATUS_INVALID_ARGUMENT, STATUS_RESOURCE_EXHAUSTED
from inferd._native.text cimport clip, format_text

import secrets

cdef extern from *:
    """
    #define XXH_INLINE_ALL
    #include <xxhash.h>
    """
    uint64_t XXH3_64bits_withSeed(const void *data, size_t size, uint64_t seed) nogil

cdef uint64_t seed = secrets.randbits(64)  # so that a client cannot choose keys that collide


cdef enum Fault:
    GOOD
    RESERVED                 # its key begins with triton_, and is none that the server knows
    NEEDS_BOOL
    NEEDS_INT64
    NEEDS_NATURAL
    NEEDS_TEXT_OR_INT64
    NEEDS_ANY
    TOO_LONG                 # sequence_id: a sequence keeps it as long as it lives

cdef enum:
    LONGEST_ID = 4096        # bytes of a sequence's id


cdef inline bint is_text(Str s, const char *text) noexcept nogil:
    return s.size == strlen(text) and memcmp(s.data, text, s.size) == 0


cdef inline bint starts_with(Str s, const char *prefix) noexcept nogil:
    return s.size >= strlen(prefix) and memcmp(s.data, prefix, strlen(prefix)) == 0


cdef Fault take_parameter(Request *request, const Parameter *p) noexcept nogil:
    if is_text(p.key, "sequence_id"):
        if p.kind != PARAMETER_INT64 and p.kind != PARAMETER_STRING:
            return NEEDS_TEXT_OR_INT64
        if p.kind == PARAMETER_STRING and p.text.size > LONGEST_ID:
            return TOO_LONG
        request.correlation.text.data = p.text.data if p.kind == PARAMETER_STRING else NULL
        request.correlation.text.size = p.text.size if p.kind == PARAMETER_STRING else 0
        request.correlation.number = 0 if p.kind == PARAMETER_STRING else <uint64_t>p.integer
        request.correlation.given = request.correlation.number != 0 or request.correlation.text.size > 0
    elif is_text(p.key, "sequence_start") or is_text(p.key, "sequence_end"):
        if p.kind != PARAMETER_BOOL:
            return NEEDS_BOOL
        if is_text(p.key, "sequence_start"):
            request.sequence_start = p.integer != 0
        else:
            request.sequence_end = p.integer != 0
    elif is_text(p.key, "priority"):
        if p.kind != PARAMETER_UINT64 and (p.kind != PARAMETER_INT64 or p.integer < 0):
            return NEEDS_NATURAL
        request.terms.priority = <uint64_t>p.integer
    elif is_text(p.key, "timeout"):
        if p.kind != PARAMETER_INT64:
            return NEEDS_INT64
        request.terms.timeout_us = max(p.integer, 0)
    elif starts_with(p.key, "triton_"):
        if not is_text(p.key, "triton_enable_empty_final_response"):
            return RESERVED
        if p.kind != PARAMETER_BOOL:
            return NEEDS_BOOL
        request.empty_final = p.integer != 0
    elif p.kind == PARAMETER_NONE or p.kind == PARAMETER_UINT64:
        return NEEDS_ANY
    return GOOD


# ---------------------------------------------------------------------------------------------------------------------
# Malformed parameters: one that a later one with the same key replaces is ignored

cdef inline bint put_key(uint32_t *slots, uint32_t mask, const Parameter *parameters, uint32_t index) noexcept nogil:
    # False: a parameter with this key is there already
    cdef const Str *key = &parameters[index].key
    cdef const Str *found
    cdef uint32_t at = <uint32_t>XXH3_64bits_withSeed(key.data, key.size, seed) & mask
    while slots[at]:
        found = &parameters[slots[at] - 1].key
        if found.size == key.size and memcmp(found.data, key.data, key.size) == 0:
            return False
        at = (at + 1) & mask
    slots[at] = index + 1
    return True


cdef int64_t first_wrong(Request *request) noexcept nogil:
    # The index of the first malformed parameter that counts; the number of parameters if there is none; -1: no memory.
    cdef const Parameter *parameters = request.message.parameters
    cdef uint32_t count = request.message.parameter_count
    cdef uint32_t wrong = count
    cdef uint32_t size = 2
    cdef uint32_t *slots
    cdef uint32_t i = count
    while size < 2 * count:
        size *= 2
    slots = <uint32_t *>calloc(size, sizeof(uint32_t))
    if slots == NULL:
        return -1
    while i:
        i -= 1
        if put_key(slots, size - 1, parameters, i) and take_parameter(request, &parameters[i]) != GOOD:
            wrong = i
    free(slots)
    return wrong


cdef const char *expected(Fault fault) noexcept nogil:
    if fault == NEEDS_BOOL:
        return "bool_param"
    if fault == NEEDS_INT64:
        return "int64_param"
    if fault == NEEDS_NATURAL:
        return "int64_param >= 0 or uint64_param"
    if fault == NEEDS_TEXT_OR_INT64:
        return "int64_param or string_param"
    return "int64_param, bool_param, or string_param"


cdef bint wrong_parameter(Request *request, Str key, const char *expected) noexcept nogil:
    request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
        "invalid value type for '%.*s' parameter, expected %s", clip(key), key.data, expected))
    return False


cdef bint refuse_parameter(Request *request, const Parameter *p) noexcept nogil:
    cdef Fault fault = take_parameter(request, p)
    if fault == TOO_LONG:
        request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
            "invalid 'sequence_id' parameter: expected a text of at most %d bytes, got %zu", <int>LONGEST_ID,
            <size_t>p.text.size))
        return False
    if fault != RESERVED:
        return wrong_parameter(request, p.key, expected(fault))
    request_fail(request, STATUS_INVALID_ARGUMENT, format_text(
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified, got '%.*s'",
        clip(p.key), p.key.data))
    return False


# ---------------------------------------------------------------------------------------------------------------------

cdef bint take_all(Request *request) noexcept nogil:
    # False: some are malformed
    cdef bint good = True
    cdef uint32_t i
    for i in range(request.message.parameter_count):
        if take_parameter(request, &request.message.parameters[i]) != GOOD:
            good = False
    return good


cdef bint take_parameters(Request *request) noexcept nogil:
    cdef int64_t wrong
    if take_all(request):
        return True
    wrong = first_wrong(request)
    if wrong < 0:
        request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
        return False
    return wrong == request.message.parameter_count or refuse_parameter(request, &request.message.parameters[wrong])


cdef void take_correlation(Request *request) noexcept nogil:
    take_all(request)
