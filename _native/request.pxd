# One ModelInfer from its decoded message to its outputs.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from _native.codec cimport InferMessage, Str
from _native.datatype cimport Datatype
from _native.memory cimport Block
from _native.signature cimport MAX_RANK, Signature

cdef enum:
    # gRPC status codes that the native path answers with
    STATUS_OK = 0
    STATUS_CANCELLED = 1
    STATUS_INVALID_ARGUMENT = 3
    STATUS_DEADLINE_EXCEEDED = 4
    STATUS_NOT_FOUND = 5
    STATUS_RESOURCE_EXHAUSTED = 8
    STATUS_UNIMPLEMENTED = 12
    STATUS_INTERNAL = 13
    STATUS_UNAVAILABLE = 14

cdef struct InputData:
    # the data of one input in this request; absent optional inputs have present == False
    bint present
    const uint8_t *data
    size_t size
    Block *block             # holds `data`: the message's block (shared) or converted typed contents
    const int64_t *shape     # as the client sent it, batch dimension included
    uint32_t rank

cdef struct OutputData:
    # one output of this request; set by the batch, sent by the sink
    bint wanted
    uint32_t classes         # top-k classification asked for; 0: the tensor itself
    Datatype datatype
    const uint8_t *data
    size_t size
    Block *block             # holds `data`, one reference
    int64_t shape[MAX_RANK]
    uint32_t rank

cdef enum RequestState:
    REQUEST_NEW              # belongs to whoever makes it
    REQUEST_QUEUED           # linked in its lane
    REQUEST_TAKEN            # in a batch; belongs to the instance until it passes the bridge

ctypedef void (*deliver_fn)(void *sink, Request *request, int status, const char *details) noexcept nogil

cdef struct Request:
    InferMessage message
    Block *block             # the bytes that `message` points into
    void *lane               # Lane of the model version; NULL until found. Counts as in flight there.
    const Signature *signature
    InputData *inputs        # signature.input_count of them
    OutputData *outputs      # signature.output_count of them
    uint32_t tensor_capacity
    uint32_t rows            # batch dimension; 1 without one

    int status
    char *details            # error text from malloc; NULL when there is none
    const char *reason       # of the error in google.rpc.ErrorInfo; NULL: the usual one of the status

    RequestState state       # guarded by the lane's lock
    Request *previous        # in the lane
    Request *next            # in the lane, then in the bridge
    int64_t arrived_ns
    int64_t queued_ns
    int64_t deadline_ns      # monotonic; 0: none
    uint32_t timer_slot      # 1-based place in the bridge's heap of deadlines; 0: none

    bint admitted            # counted in the bridge as in the house
    void *bridge             # Bridge that this request returns through
    deliver_fn deliver       # called on the loop with the answer, at most once; see bridge.pxd
    void *sink               # NULL once the sink has left

cdef Request *request_new() noexcept nogil
cdef void request_free(Request *request) noexcept nogil

# Take over `block` (also on failure) and decode `size` bytes at `data` in it. False: status and details are set.
cdef bint request_decode(Request *request, Block *block, const uint8_t *data, size_t size) noexcept nogil
# Check the decoded message against a signature and fill inputs, outputs and rows. False: status and details are set.
cdef bint request_bind(Request *request, const Signature *signature) noexcept nogil
# Set an error; `details` is from malloc (format_text) and is taken over; NULL stands for "out of memory".
cdef void request_fail(Request *request, int status, char *details) noexcept nogil

# Whether the two requests may share a batch: the same inputs with, but for the batch dimension, the same shapes.
cdef bint request_alike(const Request *a, const Request *b) noexcept nogil
