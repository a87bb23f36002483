# The cache key: whether two requests for the same model version are identical.

from libc.stdint cimport uint64_t

from inferd._native.request.request cimport Request

cdef enum:
    KEY_PARAMETERS = 64          # requests with more parameters neither share an execution nor use the cache
    KEY_SMALL = 4096             # inputs of up to so many bytes are always compared byte by byte

cdef struct Digest:
    uint64_t low
    uint64_t high

# The digest of everything that the response depends on: the callers that may get it, version, inputs with shapes and
# bytes, requested outputs, parameters that the model sees; not the id, and no parameters for the scheduler.
cdef Digest key_digest(const Request *request) noexcept nogil
# Compare the same for bound requests with at most KEY_PARAMETERS parameters and equal digests. Equal digests are
# enough for the bytes of larger inputs, unless `whole`.
cdef bint key_same(const Request *a, const Request *b, bint whole) noexcept nogil
# What the key of a bound request covers, for a digest that other processes understand: ([(input, datatype, shape,
# bytes)], [(output, classes)], [(parameter, kind, value)]). Bytes are views of the request's. The order does not depend
# on the order that the client chose.
cdef tuple key_parts(const Request *request)
