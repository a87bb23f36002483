# One inference request and its responses.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from inferd._native.memory.resource cimport Block
from inferd._native.memory.registry cimport Region
from inferd._native.memory.shm cimport Placement
from inferd._native.protobuf.codec cimport InferMessage, Parameter, Str
from inferd._native.protobuf.datatype cimport Datatype
from inferd._native.refusal cimport Refusal
from inferd._native.request.signature cimport MAX_RANK, Signature
from inferd._native.request.statistics cimport Phases
from inferd._native.timers cimport Timer

cdef struct InputData:
    # one input of this request; `present` is False for an absent optional input
    bint present
    const uint8_t *data
    size_t size
    Block *block             # contains `data`: the block of the message (shared), or typed contents that were converted
    bint exclusive           # nobody else can see these bytes, so the model may write to them
    int64_t shape[MAX_RANK]  # as the client sent it, batch dimension included
    uint32_t rank
    const Region *region     # the region on a device that has the data, at `address`; `data` is NULL then. Else NULL.
    uint64_t address

cdef struct OutputData:
    # one output of a response; its batch sets it, the response's sink sends it
    bint wanted              # the client has asked for it
    uint32_t classes         # the requested top-k classification; 0: the tensor itself
    Datatype datatype
    const uint8_t *data
    size_t size
    Block *block             # contains `data`, one reference
    int64_t shape[MAX_RANK]
    uint32_t rank
    bint placed              # already where the client wants it; `data` must not be read

cdef struct Response:
    # one response: the only one, or one of many of a decoupled model
    Request *request
    Response *next           # in the bridge
    bint final               # no response follows: the request ends with it
    bint empty               # contains nothing but the fact that it is final
    int status
    char *details            # error text from malloc; NULL: there is none
    Refusal refusal          # the refusal that the error is; REFUSAL_NONE: the usual one of the status
    OutputData *outputs
    uint32_t output_count    # of the request's signature
    Parameter *parameters    # of the response; they and their bytes are in `parameter_block`
    uint32_t parameter_count
    Block *parameter_block
    Block *ack               # given back when the transport has taken the response; NULL: nobody waits for that

cdef struct Correlation:
    # the sequence of a request; Triton's correlation id
    bint given
    Str text                 # data == NULL: the id is a number
    uint64_t number
    uint64_t owner           # the caller whose sequence it is; 0: unknown callers, who share their sequences

cdef struct Origin:
    # The call that a request serves, as far as is known. The front door makes it; then it does not change, and is
    # passed whole to every request that is made to answer the call: twins, parts, steps, calls of models. The trace and
    # the peer of the call are in the Record (record_inner). Its forwarded headers are parameters, which request_inherit
    # passes on.
    uint64_t caller          # id of a token, see inferd._native.service.access; 0: none
    int64_t user             # of the process at a unix socket; -1: unknown
    uint64_t identity        # from the connection; 0: unknown
    uint64_t client          # number of the client with all its connections; 0: unknown
    uint64_t audience        # the only caller that may get the response if responses are cached or shared; 0: all may
    uint64_t stream          # number of the stream on which the request arrived; 0: none

cdef struct Terms:
    # A client's wishes about time and order. The front door makes them, and they are passed on as the origin is. Only
    # the terms of a request that serves several change: with the requests that wait for it
    # (inferd._native.caching.coalescer).
    int64_t asked_ns         # when the client asked
    int64_t executable_ns    # when it could first be executed; the time in queues counts from here
    int64_t deadline_ns      # of the client; 0: none
    int64_t due_ns           # when execution must begin for the response to be there by the deadline; 0: no limit
    int64_t timeout_us       # longest wait in the queue; 0: the model's default
    uint64_t priority        # 0: the model's default

cdef struct Sequenced:
    # data of sequence schedulers, zero for other requests; see inferd._native.sequences.sequence
    void *sequence           # the sequence in its lane; NULL: none
    InputData *states        # of the sequence: signature.state_count old states, and as many new ones
    bint unasked             # made by the lane itself: neither answered nor counted
    bint null                # made by the lane itself, for an idle row of a batch
    int32_t end_reason       # EndReason
    bint again               # to be rescheduled when its batch is finished

cdef enum RequestState:
    # see inferd._native.request.life, which alone changes it
    REQUEST_NEW              # belongs to its maker
    REQUEST_WAITING          # belongs to what `wait` names: a model that is loaded, or the response to another request
    REQUEST_QUEUED           # belongs to its lane
    REQUEST_TAKEN            # belongs to its executor, until its final response has passed the bridge
    REQUEST_KEPT             # has ended, and is kept with its response
    REQUEST_ENDED            # its final response has passed the bridge
    REQUEST_STATES

# Called in the front: nobody waits any more for the response to a request that is executed. Must be quick.
ctypedef void (*abandon_fn)(Request *request, void *owner) noexcept nogil

# Called in the front, perhaps with the GIL: nobody waits any more for any of the requests that are executed together.
# Must be quick.
ctypedef void (*stop_fn)(void *owner) noexcept nogil

cdef struct Wait:
    # The functions of a kind of object for which requests wait. Called in the front, while the request waits.

    # Remove the request from where it waits; it then belongs to the caller.
    void (*leave)(Request *request) noexcept nogil
    # The request has waited until request.expires_ns. True: it has left, and the caller refuses it. False: it continues
    # to wait. NULL: there is no such time.
    bint (*expire)(Request *request) noexcept nogil
    # The request has these terms from now on. False: they no longer matter. NULL: they never do.
    bint (*reconsider)(Request *request, const Terms *terms) noexcept nogil

# Called in the front for each response, in order; the last one is final. `response` is NULL if the request ends without
# a response of an instance; see `status` and `details`. The sink copies or shares what it keeps.
ctypedef void (*deliver_fn)(void *sink, Response *response, int status, const char *details) noexcept nogil

cdef struct Abandonment:
    # that nobody waits for the response any more, and the function to call then
    int32_t happened         # nobody waits; atomic
    abandon_fn told          # set by the thread that executes the request; see request_follow
    void *owner              # its argument

cdef struct Request:
    InferMessage message     # empty for a request that the server itself makes
    Block *block             # contains the bytes that `message` points into
    void *lane               # Lane of the model version, which counts the request as in flight; NULL: not found yet
    const Signature *signature
    InputData *inputs        # signature.input_count inputs
    Response response        # the final one
    uint32_t tensor_capacity
    uint32_t rows            # batch dimension; 1 without one

    # from the parameters of the message
    Str id
    Correlation correlation
    bint sequence_start
    bint sequence_end
    bint empty_final         # the client of a decoupled model also wants the empty final response
    bint single              # its sink takes one response; always so if the model is not decoupled
    Response *held           # a response that is held until it is known to be the only one; see bridge_deliver
    bint is_step             # a step of an ensemble: outputs may be missing, and its phases go to the ensemble
    bint is_warmup           # made by the server to warm models up: not counted as traffic
    bint inner               # made to answer another request, which watches the deadline of both
    bint shared              # answers several that wait: each of these has a limit in the queue, this one has none
    bint uncounted           # statistics count the requests that wait for its response; of this one, the execution only

    Origin origin
    Terms terms
    Placement *placements    # of its tensors in shared memory; NULL: none
    bint on_device           # an input may still be on a device: see InputData.region

    Sequenced sequenced

    RequestState state       # the lane's lock protects it
    Request *previous        # in the list where it waits
    Request *next            # in that list, or in a chain
    int64_t arrived_ns       # when it could first be executed here: statistics count from here
    int64_t queued_ns        # when it entered the queue where it waits, or waited last
    int64_t taken_ns         # 0: it is not in a batch yet
    int64_t responded_ns     # of a decoupled model: when the last response passed the bridge; 0: none has
    uint32_t responses       # the number of responses that have passed the bridge
    int64_t expires_ns       # end of the time in the queue, monotonic; 0: no limit
    bint yields              # at that time it goes behind others instead of being refused
    uint32_t place           # in its lane; for the scheduler
    bint follows             # an earlier part of the same request is in the queue: max_queue does not apply
    Timer timer              # fires at the deadline, or when the time in the queue ends
    void *order_entry        # OrderEntry of its response if responses leave in order; NULL: they do not

    void *record             # Record of this request; NULL: not recorded
    void (*drop_record)(Request *request) noexcept nogil
    Phases phases            # of its executions so far, summed; set for inner requests and for repeated executions
    void *run                # of the ensemble that made it; NULL: ended, or not made by an ensemble

    bint admitted            # counted in Bridge.admitted_count
    Abandonment abandonment
    uint64_t number          # by which its executor finds it
    void *bridge             # the Bridge through which it returns
    deliver_fn deliver
    void *sink               # NULL once the sink has left
    const Wait *wait         # of a waiting request; NULL: it does not wait
    void *awaited            # the object for which a waiting request waits; see wait

cdef struct Requests:
    # a list of them; see inferd._native.list
    Request *first
    Request *last

cdef Request *request_new() noexcept nogil
cdef void request_free(Request *request) noexcept nogil
# Make room for the tensors of a model; no input is present yet, and no output wanted. False: status and details are
# set.
cdef bint request_reserve(Request *request, const Signature *signature) noexcept nogil

# Set the terms of a request without limits that was asked now.
cdef void terms_begin(Terms *terms, int64_t now) noexcept nogil
# Set a deadline `timeout_ns` after `now`; an earlier deadline stays.
cdef void terms_limit(Terms *terms, int64_t now, int64_t timeout_ns) noexcept nogil
# Set the terms of a call that a model makes to serve a request with the terms `outer`. The call has the deadline of
# that request, but a priority and a timeout of its own.
cdef void terms_lend(Terms *terms, const Terms *outer, int64_t now) noexcept nogil

# Copy everything but tensors from `outer`, which the request is made to answer: id, origin, terms, parameters, and
# is_warmup. Texts stay in the block of `outer`. False: no memory.
cdef bint request_inherit(Request *request, const Request *outer) noexcept nogil
# A new request with the same cache key, origin, terms and data. It has no sink, no placements, and its inputs are not
# exclusive. NULL: no memory.
cdef Request *request_twin(const Request *request) noexcept nogil

# Set the error with which the request ends. The request then owns `details`, which is from malloc (format_text); NULL
# means "out of memory".
cdef void request_fail(Request *request, int status, char *details) noexcept nogil
# Set the status and the reason of a refusal as the error.
cdef void request_refuse(Request *request, Refusal refusal, char *details) noexcept nogil
# Refuse a request that has waited in its queue for the allowed time.
cdef void request_expired(Request *request) noexcept nogil

# From the thread that executes the request: have `told` called when the request is abandoned; now if it is already.
cdef void request_follow(Request *request, abandon_fn told, void *owner) noexcept nogil
# Stop following. After the return `told` does not run any more.
cdef void request_unfollow(Request *request) noexcept nogil
# In the front: nobody waits for the response any more.
cdef void request_abandon(Request *request) noexcept nogil

cdef struct Watched:
    # requests that are executed together by an executor that can stop in between
    Request **requests
    uint32_t count
    stop_fn stop
    void *owner
    bint stopped             # `stop` was called
    Watched *previous
    Watched *next

# From the thread that executes the requests, without the GIL: have `stop` called when all are abandoned. False: all are
# abandoned already, and are not watched.
cdef bint requests_watch(Watched *watched) noexcept nogil
# Stop watching, without the GIL. After the return `stop` does not run any more.
cdef void requests_unwatch(Watched *watched) noexcept nogil

# A further response to a request of a decoupled model, with the same outputs wanted; NULL if there is no memory. It
# goes over the bridge, or is freed by response_free.
cdef Response *response_new(Request *request) noexcept nogil
cdef void response_free(Response *response) noexcept nogil
cdef void response_fail(Response *response, int status, char *details) noexcept nogil
# Move the contents of a response into another one of the same request, and free `response`.
cdef void response_move(Response *to, Response *response) noexcept nogil

# Whether the two requests may share a batch: they have the same inputs with the same shapes, except for the batch
# dimension, and shape tensors with the same values.
cdef bint request_alike(const Request *a, const Request *b) noexcept nogil
