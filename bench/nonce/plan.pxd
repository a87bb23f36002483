# The plan of a nonce: a model, and the tensors of one request to it.

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    MAX_TENSORS = 4
    MAX_RANK = 6
    MAX_NAME = 64
    MAX_ID = 40

cdef enum Fault:
    # intended errors of a request
    NO_FAULT = 0
    UNKNOWN_MODEL = 1         # NOT_FOUND
    SHORT_PAYLOAD = 2         # one byte less than the shape says
    EXCESS_PAYLOAD = 3        # one byte more
    UNKNOWN_DATATYPE = 4
    UNKNOWN_INPUT = 5
    FAULT_COUNT = 6

cdef struct Tensor:
    char input[MAX_NAME]
    char output[MAX_NAME]
    char datatype[8]
    uint32_t element_size     # 0: BYTES
    uint32_t contents_field
    bint is_signed
    bint is_bool
    bint packed_fixed         # FP32 and FP64 are packed fixed-size elements; other typed contents are varints
    uint32_t rank             # without the batch dimension

cdef struct Model:
    char name[MAX_NAME]
    uint32_t max_rows         # 0: no batch dimension
    Tensor tensors[MAX_TENSORS]
    uint32_t tensor_count

cdef struct Part:
    # one tensor of one request
    int64_t shape[MAX_RANK + 1]
    uint32_t rank
    uint64_t elements
    uint64_t payload_seed
    uint8_t *raw
    size_t size
    bint named                # its output is requested

cdef struct Plan:
    # one request, as determined by its nonce
    Model *model
    Part parts[MAX_TENSORS]
    bint any_named            # the request lists its outputs
    bint typed
    bint versioned
    Fault fault
    char id[MAX_ID]
    uint32_t id_size

cdef struct Catalogue:
    Model *models
    uint32_t model_count
    uint32_t fault_share      # of 65536
    uint32_t large_share
    uint32_t large_elements
    uint64_t early_ns         # how long before its deadline a call may be answered DEADLINE_EXCEEDED

# The request of a nonce, without its payloads.
cdef void plan_draw(Catalogue *catalogue, uint64_t nonce, Plan *plan) noexcept nogil
# Size of the payload, rounded up to a multiple of 8; for BYTES the maximum.
cdef uint64_t payload_bound(const Tensor *tensor, const Part *part) noexcept nogil
# Write the tensor's elements; `out` has room for payload_bound bytes. Returns the size of the payload.
cdef size_t payload_fill(const Tensor *tensor, const Part *part, uint8_t *out) noexcept nogil
