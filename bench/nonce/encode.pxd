# Encodes the requests of plans as protobuf.

from libc.stdint cimport uint8_t

from bench.nonce.plan cimport Plan

# Serialize a ModelInferRequest; the payloads are in place, and the caller has made room. Returns its end.
cdef uint8_t *put_request(uint8_t *out, const Plan *plan) noexcept nogil
