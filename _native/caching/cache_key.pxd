# Whether two requests ask the same of the same model version.

from libc.stdint cimport uint64_t

from _native.request.request cimport Request

cdef enum:
    KEY_PARAMETERS = 64          # a request with more parameters than that is never compared
    KEY_SMALL = 4096             # bytes of an input that are compared in any case

cdef struct Digest:
    uint64_t low
    uint64_t high

# Of who may get the answer, and of everything that can make a difference to it: version, inputs with their shapes and
# bytes, outputs asked for, parameters that the model sees. Not of the id, and not of what only the scheduler reads.
cdef Digest key_digest(const Request *request) noexcept nogil
# The same things, compared; of bound requests with at most KEY_PARAMETERS parameters and equal digests, which
# stand for the bytes of larger inputs unless `whole`.
cdef bint key_same(const Request *a, const Request *b, bint whole) noexcept nogil
# The same things for a digest that others than this process understand: ([(input, datatype, shape, bytes)], [(output,
# classes)], [(parameter, kind, value)]), where bytes are views of the request's, and nothing depends on an order that
# the client chose.
cdef tuple key_parts(const Request *request)
