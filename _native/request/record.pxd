# What is noted of single requests: for traces, the access log and the log of slow requests.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from _native.request.request cimport Request, Response
from _native.threads cimport Mutex
from _native.traceparent cimport TraceContext

cdef struct Sampling:
    # which requests are traced, of the server or of one model; guarded by the recorder's lock, counted on the loop
    int32_t on               # atomic; requests may be traced
    bint tensors             # with their data
    int64_t rate             # one in so many; 0: only those whose client asks
    int64_t left             # so many more; -1: any number
    int64_t seen             # since the last one that was traced

cdef enum:
    NOTED_TEXT = 64          # bytes of texts that are kept with a record

cdef struct Record:
    # one request, from its arrival to its end
    Record *next
    Recorder *recorder
    TraceContext context     # of its own span; `given`: its client has named the trace
    uint8_t parent[8]        # span above it; zero: none
    uint64_t number          # Triton's id of the trace, from 1
    uint64_t parent_number
    bint traced              # chosen when it came
    bint watched             # else its trace is kept if it has failed or was slow
    bint kept                # its trace is
    bint accessed            # chosen for the access log
    bint tensors
    bint inner               # made for another request
    bint single              # it took one response
    int64_t arrived_ns
    int64_t queued_ns
    int64_t taken_ns         # 0: no instance has seen it
    int64_t input_end_ns
    int64_t output_start_ns
    int64_t computed_ns
    int64_t ended_ns
    const char *why          # its batch left the queue, static text
    uint64_t batch           # number of the batch, of all in the process; 0: none
    uint32_t batch_rows
    uint32_t batch_requests
    uint32_t rows
    uint32_t responses       # that its sink has got
    int status               # STATUS_OK: as that of the final response
    bint cached              # answered from the response cache
    bint shared              # answered by the execution that another one caused
    TraceContext link        # to the span of that; `given`: it has one
    int64_t looked_ns        # in the response cache; 0: not
    int64_t found_ns         # it, or that it was not there
    int64_t placed_ns        # its sequence has got the slot that it waited for; 0: it did not wait
    char *baggage            # from malloc; NULL: there is none
    size_t baggage_size
    size_t received          # bytes of the message
    size_t sent              # of the tensors in the responses
    int64_t version
    char instance[NOTED_TEXT]
    char *texts              # from malloc: model, request id, error, cut to these sizes, each with a zero
    size_t text_sizes[3]
    size_t kept_bytes        # that it counts with in the recorder's
    void *data               # PyObject: what is known of its tensors, (inputs, outputs); NULL: nothing
    void *peer               # PyObject: the client's address; NULL: not known

cdef struct Recorder:
    # one for a server; on the loop, but for the list
    int32_t on               # atomic: some request may be recorded
    Sampling sampling        # of all models that have none of their own
    uint32_t access_rate     # one request in so many goes to the access log; 0: none
    uint32_t access_seen
    int64_t slow_ns          # requests that take longer are kept, and failed ones; 0: neither
    int64_t log_slow_ns      # slower ones are logged; 0: none
    uint64_t numbers
    uint64_t seed[2]
    Mutex guard              # of what follows
    Record *first
    Record *last
    uint32_t count
    size_t bytes             # of texts and tensors in the list, and of inputs of requests that have not ended
    uint64_t lost            # ended when there were too many, or too large ones, that nobody had taken

# On the loop, for a request that has come in and is decoded: begin a record if it may be wanted. `own` is the sampling
# of its model, NULL where that is the server's; `context` is what its client has said of a trace.
cdef void record_begin(Recorder *recorder, Request *request, const TraceContext *context, Sampling *own) noexcept nogil
# On the loop: the same for a request that is made on behalf of another, if that one has a record.
cdef void record_inner(Request *request, const Request *outer) noexcept nogil
# On the loop: a request with a record was looked up in the response cache, in this time.
cdef void record_looked_up(Request *request, int64_t begin_ns, int64_t end_ns, bint found) noexcept nogil
# On the loop: a request with a record gets the answer of this one, which was made for another.
cdef void record_shares(Request *request, const Request *work) noexcept nogil
# An instance has taken a request with a record and is about to execute it: keep its inputs, if they are wanted, before
# the model can write to them. From any thread.
cdef void record_taken(Request *request) noexcept nogil
# On the loop: a request with a record gets a response, or has got the last one.
cdef void record_response(Request *request, const Response *response) noexcept nogil
# A request with a record ends: keep the record if it is wanted.
cdef void record_end(Request *request) noexcept nogil


cdef class RecorderHandle:
    # owns a Recorder for Python
    cdef Recorder recorder
    cdef list own            # SamplingHandle of models that have or had their own


cdef class SamplingHandle:
    cdef Sampling sampling
