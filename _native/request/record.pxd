# Records of single requests: for traces, the access log and the log of slow requests.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.memory.resource cimport Block
from inferd._native.request.request cimport Request, Response
from inferd._native.threads cimport Mutex
from inferd._native.traceparent cimport TraceContext

cdef struct Sampling:
    # Which requests are traced, of the server or of one model; used in the front. A request whose client samples its
    # trace is traced in any case, and does not count for the fields below.
    int32_t on               # requests may be traced
    bint tensors             # traces contain tensors
    int64_t rate             # one request in so many is chosen; 0: none
    int64_t left             # requests that may still be chosen; -1: any number
    int64_t seen             # requests since the last one that was chosen

cdef enum:
    NOTED_TEXT = 64          # bytes of texts in a record

cdef struct Record:
    # one request, from its arrival to its end
    Record *next
    Recorder *recorder
    TraceContext context     # of its own span; `given`: the client has sent a trace context
    uint8_t parent[8]        # the span above it; zero: none
    uint64_t number          # Triton's id of the trace, from 1
    uint64_t parent_number
    bint traced              # chosen for a trace at its arrival
    bint watched             # its trace is kept also if it fails or is slow
    bint kept                # its trace is kept
    bint accessed            # chosen for the access log
    bint tensors             # its trace contains tensors
    bint inner               # made on behalf of another request
    bint single              # its sink takes one response
    int64_t arrived_ns
    int64_t queued_ns
    int64_t taken_ns         # 0: no instance has taken it
    int64_t input_end_ns
    int64_t output_start_ns
    int64_t computed_ns
    int64_t first_ns         # of a decoupled model: when its first response was delivered; 0: there was none
    int64_t ended_ns
    const char *why          # the reason for which its batch left the queue, static text
    uint64_t batch           # number of the batch in this process; 0: none
    uint32_t batch_rows
    uint32_t batch_requests
    uint32_t rows
    uint32_t responses       # that its sink has received
    int status               # STATUS_OK: see the final response
    bint cached              # answered from the response cache
    bint shared              # answered by an execution that another request caused
    bint stepped             # executed by the steps of an ensemble
    TraceContext link        # to the span of the execution that it shares; `given`: there is one
    int64_t looked_ns        # when the lookup in the response cache began; 0: there was none
    int64_t found_ns         # end of the lookup
    int64_t placed_ns        # when its sequence got the slot that it waited for; 0: it did not wait
    char *baggage            # from malloc; NULL: there is none
    size_t baggage_size
    size_t received          # bytes of the message
    size_t sent              # of the tensors in the responses
    int64_t version
    char instance[NOTED_TEXT]
    char *texts              # from malloc: model, request id, error, cut to these sizes, each with a zero
    size_t text_sizes[3]
    size_t kept_bytes        # its part of Recorder.bytes
    void *data               # PyObject: its tensors, (inputs, outputs); NULL: none are kept
    Block *peer              # contains the client's address; NULL: unknown

cdef struct Recorder:
    # one for a server; used in the front, except for the list
    int32_t on               # atomic: some requests may be recorded
    Sampling sampling        # of all models without their own
    uint32_t access_rate     # one request in so many goes to the access log; 0: none
    uint32_t access_seen
    int64_t slow_ns          # traces of slower and of failed requests are kept; 0: of neither
    int64_t log_slow_ns      # slower requests are logged; 0: none
    uint64_t numbers
    uint64_t seed[2]
    Mutex guard              # protects the fields below
    Record *first
    Record *last
    uint32_t count
    size_t bytes             # of texts and tensors in the list, and of inputs of requests that have not ended
    uint64_t lost            # records that were discarded because the list was full, by number or by bytes

# In the front, for a request that has arrived and is decoded: begin a record if one may be needed. `own` is the
# sampling of its model, NULL for the server's; `context` is the client's trace context.
cdef void record_begin(Recorder *recorder, Request *request, const TraceContext *context, Sampling *own) noexcept nogil
# In the front: the same for a request that is made on behalf of another one, if that has a record.
cdef void record_inner(Request *request, const Request *outer) noexcept nogil
# In the front: note the lookup of a request with a record in the response cache.
cdef void record_looked_up(Request *request, int64_t begin_ns, int64_t end_ns, bint found) noexcept nogil
# In the front: a request with a record gets the response to `work`, which was made for another one.
cdef void record_shares(Request *request, const Request *work) noexcept nogil
# From any thread: an instance is about to execute a request with a record. Copies its inputs, if they are needed,
# before the model can write to them; those of a request with inputs on a device are not copied.
cdef void record_taken(Request *request) noexcept nogil
# From any thread: copy the inputs of a request with a record, all of which the instance can read now.
cdef void record_inputs(Request *request) noexcept nogil
# In the front: a request with a record gets a response.
cdef void record_response(Request *request, const Response *response) noexcept nogil
# A request with a record ends: keep the record if it is needed.
cdef void record_end(Request *request) noexcept nogil
# Free a record that is in no list, and that no request has.
cdef void record_free(Record *record) noexcept nogil
