"""Cache keys: the parts of a request that its response depends on, as a digest and for comparison.

The digest is XXH3 with 128 bits (https://xxhash.com) and a secret seed, different in each process. Two different keys
have the same digest with a probability of 2^-128, and without the seed a client cannot search for such a pair. But the
hash is not designed to resist a client that learns the seed. So everything small is compared as well, and large inputs
if the operator wants it.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from inferd._native.assertion cimport CHECKED
from inferd._native.memory.resource cimport block_view
from inferd._native.protobuf.codec cimport PARAMETER_DOUBLE, PARAMETER_STRING, Parameter, Str, parameter_find
from inferd._native.protobuf.datatype cimport datatype_name
from inferd._native.request.request cimport InputData, OutputData, Request
from inferd._native.request.signature cimport Signature

import secrets

cdef extern from *:
    """
    #define XXH_INLINE_ALL
    #include <xxhash.h>
    """
    ctypedef struct XXH3_state_t:
        pass
    ctypedef struct XXH128_hash_t:
        uint64_t low64
        uint64_t high64
    void XXH3_INITSTATE(XXH3_state_t *state) nogil
    int XXH3_128bits_reset_withSeed(XXH3_state_t *state, uint64_t seed) nogil
    int XXH3_128bits_update(XXH3_state_t *state, const void *data, size_t size) nogil
    XXH128_hash_t XXH3_128bits_digest(const XXH3_state_t *state) nogil

cdef uint64_t seed = secrets.randbits(64)


cdef struct Head:
    # the head of one tensor in the digest; without padding
    uint64_t index
    uint64_t size
    uint64_t detail          # rank of an input, classes of an output


cdef inline bint is_text(Str s, const char *text, size_t size) noexcept nogil:
    return s.size == size and memcmp(s.data, text, size) == 0


cdef bint is_for_scheduler(Str key) noexcept nogil:
    return (is_text(key, "priority", 8) or is_text(key, "timeout", 7)
            or is_text(key, "triton_enable_empty_final_response", 34))


cdef inline bint counts(const Request *request, const Parameter *p) noexcept nogil:
    # whether the model sees it: no later value of the same key replaces it
    return not is_for_scheduler(p.key) and parameter_find(
        request.message.parameters, request.message.parameter_count, p.key.data, p.key.size) == p


cdef void add_parameter(XXH3_state_t *state, const Parameter *p) noexcept nogil:
    cdef uint64_t fixed[5]
    memset(fixed, 0, sizeof(fixed))
    fixed[0] = p.key.size
    fixed[1] = <uint64_t>p.kind
    fixed[2] = <uint64_t>p.integer
    memcpy(&fixed[3], &p.real, sizeof(double))
    fixed[4] = p.text.size
    XXH3_128bits_update(state, fixed, sizeof(fixed))
    XXH3_128bits_update(state, p.key.data, p.key.size)
    XXH3_128bits_update(state, p.text.data, p.text.size)


cdef Digest parameters_digest(const Request *request) noexcept nogil:
    # a sum, because parameters come in any order
    cdef XXH3_state_t state
    cdef XXH128_hash_t one
    cdef Digest sum = Digest(0, 0)
    cdef uint32_t i
    for i in range(request.message.parameter_count):
        if counts(request, &request.message.parameters[i]):
            XXH3_128bits_reset_withSeed(&state, seed)
            add_parameter(&state, &request.message.parameters[i])
            one = XXH3_128bits_digest(&state)
            sum.low += one.low64
            sum.high += one.high64
    return sum


cdef Digest key_digest(const Request *request) noexcept nogil:
    cdef XXH3_state_t state
    cdef XXH128_hash_t hash
    cdef Head head
    cdef Digest parameters
    cdef const InputData *input
    cdef const OutputData *output
    cdef bint small = True
    cdef uint32_t i
    XXH3_INITSTATE(&state)
    XXH3_128bits_reset_withSeed(&state, seed)
    XXH3_128bits_update(&state, &request.lane, sizeof(request.lane))
    XXH3_128bits_update(&state, &request.origin.audience, sizeof(request.origin.audience))
    for i in range(request.signature.input_count):
        input = &request.inputs[i]
        if input.present:
            head = Head(i, input.size, input.rank)
            XXH3_128bits_update(&state, &head, sizeof(head))
            XXH3_128bits_update(&state, input.shape, input.rank * sizeof(int64_t))
            XXH3_128bits_update(&state, input.data, input.size)
            small = small and input.size <= KEY_SMALL
    for i in range(request.signature.output_count):
        output = &request.response.outputs[i]
        if output.wanted:
            head = Head(i, 0, output.classes)
            XXH3_128bits_update(&state, &head, sizeof(head))
    if request.message.parameter_count:
        parameters = parameters_digest(request)
        if parameters.low or parameters.high:  # parameters for the scheduler do not change the digest
            XXH3_128bits_update(&state, &parameters, sizeof(parameters))
    hash = XXH3_128bits_digest(&state)
    if CHECKED and small:  # so few digests that the comparison has to tell requests apart
        hash.low64 &= 3
        hash.high64 = 0
    return Digest(hash.low64, hash.high64)


# ---------------------------------------------------------------------------------------------------------------------

cdef bint same_parameter(const Parameter *p, const Parameter *q) noexcept nogil:
    return (q != NULL and p.kind == q.kind and p.integer == q.integer
            and memcmp(&p.real, &q.real, sizeof(double)) == 0
            and p.text.size == q.text.size and memcmp(p.text.data, q.text.data, p.text.size) == 0)


cdef bint has_parameters(const Request *a, const Request *b) noexcept nogil:
    # every parameter of b that counts is one of a
    cdef const Parameter *p
    cdef uint32_t i
    for i in range(b.message.parameter_count):
        p = &b.message.parameters[i]
        if counts(b, p) and not same_parameter(p, parameter_find(
                a.message.parameters, a.message.parameter_count, p.key.data, p.key.size)):
            return False
    return True


cdef bint same_input(const InputData *a, const InputData *b, bint whole) noexcept nogil:
    if not a.present or not b.present:
        return a.present == b.present
    return (a.size == b.size and a.rank == b.rank and memcmp(a.shape, b.shape, a.rank * sizeof(int64_t)) == 0
            and (a.size == 0 or a.data == b.data or (a.size > KEY_SMALL and not whole)
                 or memcmp(a.data, b.data, a.size) == 0))


cdef bint key_same(const Request *a, const Request *b, bint whole) noexcept nogil:
    cdef const OutputData *x
    cdef const OutputData *y
    cdef uint32_t i
    if a.lane != b.lane or a.origin.audience != b.origin.audience:
        return False
    for i in range(a.signature.output_count):
        x = &a.response.outputs[i]
        y = &b.response.outputs[i]
        if x.wanted != y.wanted or (x.wanted and x.classes != y.classes):
            return False
    for i in range(a.signature.input_count):
        if not same_input(&a.inputs[i], &b.inputs[i], whole):
            return False
    return has_parameters(a, b) and has_parameters(b, a)


# ---------------------------------------------------------------------------------------------------------------------

cdef str text_of(Str s):
    return s.data[:s.size].decode("utf-8", "surrogateescape")


cdef tuple parameter_part(const Parameter *p):
    if p.kind == PARAMETER_STRING:
        return text_of(p.key), <int>p.kind, text_of(p.text)
    if p.kind == PARAMETER_DOUBLE:
        return text_of(p.key), <int>p.kind, p.real.hex()
    return text_of(p.key), <int>p.kind, p.integer


cdef tuple key_parts(const Request *request):
    cdef const Signature *signature = request.signature
    cdef const InputData *input
    cdef list inputs = []
    cdef list outputs = []
    cdef uint32_t i
    for i in range(signature.input_count):
        input = &request.inputs[i]
        if input.present:
            inputs.append((text_of(signature.inputs[i].name),
                           datatype_name(signature.inputs[i].datatype).decode("ascii"),
                           [input.shape[k] for k in range(input.rank)],
                           block_view(input.block, input.data, input.size) if input.size else b""))
    for i in range(signature.output_count):
        if request.response.outputs[i].wanted:
            outputs.append((text_of(signature.outputs[i].name), request.response.outputs[i].classes))
    parameters = [parameter_part(&request.message.parameters[i]) for i in range(request.message.parameter_count)
                  if counts(request, &request.message.parameters[i])]
    return inputs, outputs, sorted(parameters)
