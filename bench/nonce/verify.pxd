# Checks a response against its plan.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t

from inferd_client.driver.workload cimport Verdict
from bench.nonce.plan cimport Plan

# Compare a serialized ModelInferResponse with an identity model's response to the plan's request.
cdef Verdict verify_response(const uint8_t *data, size_t size, const Plan *plan) noexcept nogil
