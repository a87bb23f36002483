# The wire of `worker/protocol.py` in C; tests/backends/python/test_wire.py compares the two.

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    WIRE_VERSION = 8
    PACKET = 64 << 10
    SLOT_MASK = 0xffff
    SLOTS = SLOT_MASK + 1
    BLS_WINDOW = 16

cdef enum Kind:
    CONFIGURE = 1
    EXECUTE = 2
    ALLOCATED = 3
    FINALIZE = 4
    FORGET = 5
    HELLO = 15
    READY = 16
    DONE = 17
    ALLOCATE = 18
    FINALIZED = 19
    BLS_RESPONSE = 32
    CREDIT = 33
    IS_READY = 34
    ANSWER = 35
    RESPONSE = 48
    BLS_REQUEST = 49
    BLS_CANCEL = 50
    BLS_CREDIT = 51
    RELEASE = 52
    FREE = 53
    LOG = 54
    METRIC = 55
    CALL = 56
    HEALTH = 57
    STATISTICS = 58

cdef enum:
    # flags of a head
    IN_ARENA = 1
    FAILED = 2
    FINAL = 4
    EMPTY = 8
    KEPT = 16
    DECOUPLED = 32
    TRUE_FLAG = 64
    KEPT_GRANTS = 128

cdef enum:
    # places of a tensor
    PLACE_INLINE = 0
    PLACE_ARENA = 1
    PLACE_CUDA = 2
    PLACE_REGION = 3
    PLACE_INPUT = 4          # plus the index of the input

cdef enum:
    # statuses of a response
    RESPONSE_OK = 0
    RESPONSE_ERROR = 1
    RESPONSE_OPEN = 2
    RESPONSE_RESCHEDULE = 3

cdef enum:
    # codes of a TritonError
    CODE_UNKNOWN = 0
    CODE_INTERNAL = 1
    CODE_NOT_FOUND = 2
    CODE_INVALID_ARG = 3
    CODE_UNAVAILABLE = 4
    CODE_UNSUPPORTED = 5
    CODE_ALREADY_EXISTS = 6
    CODE_CANCELLED = 7

cdef enum:
    WIRE_SEQUENCE_START = 1
    WIRE_SEQUENCE_END = 2
    ALL_OUTPUTS = 0xffffffff

cdef struct Head:
    uint8_t kind
    uint8_t flags
    uint16_t code
    uint32_t size            # of the record
    uint64_t id
    uint64_t offset

cdef struct ExecuteHead:
    uint32_t count
    uint32_t rows
    uint64_t grant_offset
    uint64_t grant_size

cdef struct RequestRecord:
    uint64_t number
    uint32_t flags
    uint16_t inputs
    uint16_t reserved
    uint32_t extra
    uint32_t reserved_too

cdef struct ExtraRecord:
    uint64_t timeout_us
    uint64_t priority
    uint64_t correlation
    uint32_t outputs
    uint32_t id_size
    uint32_t correlation_size
    uint32_t parameters_size
    uint32_t trace_size
    uint32_t reserved

cdef struct TensorRecord:
    uint16_t index
    uint8_t datatype
    uint8_t rank
    uint32_t place
    uint64_t offset
    uint64_t size

cdef struct CudaMemory:
    uint8_t handle[64]
    uint32_t device
    uint32_t reserved

cdef struct RegionMemory:
    uint64_t number
    uint64_t start
    uint64_t size
    uint32_t descriptor
    uint32_t keep

cdef struct ResponseRecord:
    uint8_t status
    uint8_t code
    uint16_t tensors
    uint32_t text_size
    uint32_t parameters_size
    uint32_t size            # of it all

cdef struct StatisticsRecord:
    uint32_t index
    uint32_t reserved
    uint64_t infer_ns
    uint64_t output_ns

cdef struct ParameterRecord:
    uint16_t name_size
    uint8_t kind
    uint8_t reserved
    uint32_t text_size
    uint64_t value

cdef struct BlsRecord:
    uint64_t parent
    uint64_t timeout_us
    uint32_t message_size
    uint32_t reserved

cdef inline size_t aligned(size_t size, size_t to) noexcept nogil:
    return (size + to - 1) & ~(to - 1)
