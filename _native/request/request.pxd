# One inference request and its responses.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from _native.memory.resource cimport Block
from _native.memory.shm cimport Placement, Region
from _native.protobuf.codec cimport InferMessage, Parameter, Str
from _native.protobuf.datatype cimport Datatype
from _native.request.signature cimport MAX_RANK, Signature
from _native.timers cimport Timer

cdef struct InputData:
    # the data of one input in this request; absent optional inputs have present == False
    bint present
    const uint8_t *data
    size_t size
    Block *block             # holds `data`: the message's block (shared) or converted typed contents
    bint exclusive           # nobody else can see these bytes: who executes the request may write to them
    int64_t shape[MAX_RANK]  # as the client sent it, batch dimension included
    uint32_t rank
    const Region *region     # of a device, where the data still lie, at `address`; `data` is NULL then. NULL: nowhere.
    uint64_t address

cdef struct OutputData:
    # one output of a response; set by the batch, sent by the sink
    bint wanted
    uint32_t classes         # top-k classification asked for; 0: the tensor itself
    Datatype datatype
    const uint8_t *data
    size_t size
    Block *block             # holds `data`, one reference
    int64_t shape[MAX_RANK]
    uint32_t rank
    bint placed              # it is where the client wants it already, and `data` must not be looked at

cdef struct Response:
    # one answer to a request: the only one, or one of many from a decoupled model
    Request *request
    Response *next           # in the bridge
    bint final               # nothing comes after it: the request ends with it
    bint empty               # it says only that it is the final one
    int status
    char *details            # error text from malloc; NULL when there is none
    const char *reason       # of the error in google.rpc.ErrorInfo; NULL: the usual one of the status
    OutputData *outputs
    uint32_t output_count    # of the request's signature
    Parameter *parameters    # of the response; in `parameter_block`, as are the bytes that they point to
    uint32_t parameter_count
    Block *parameter_block
    Block *ack               # given back when the client's side has done with the response; NULL: nobody asks

cdef struct Correlation:
    # which sequence a request belongs to; Triton's correlation id
    bint given
    Str text                 # data == NULL: it is a number
    uint64_t number
    uint64_t owner           # whose sequence it is; 0: of those who are not known, and share their sequences

cdef struct Asker:
    # who sends a request, as far as the front door knows
    int64_t user             # of the process at a unix socket; -1: not known
    uint64_t identity        # that the connection tells; 0: it tells none
    uint64_t client          # to which all its connections belong; 0: not known
    uint64_t audience        # those who may get the answer, if answers are kept or shared; 0: everybody
    uint64_t stream          # on which the request came; 0: none

cdef struct Sequenced:
    # what a scheduler of sequences keeps with a request, zero with any other; see _native.sequences.sequence
    void *sequence           # that its lane has put it into; NULL: none
    InputData *states        # of the sequence: signature.state_count that it is in, and as many that it goes to
    bint unasked             # made by the lane itself: neither answered nor counted
    bint null                # and stands for an idle row of a batch
    int32_t end_reason       # EndReason
    bint again               # to be rescheduled when its batch is finished

cdef struct Phases:
    # where the time of an executed request went, in nanoseconds; the last three are those of its whole batch
    uint64_t queue
    uint64_t input
    uint64_t infer
    uint64_t output

cdef enum RequestState:
    REQUEST_NEW              # belongs to whoever makes it
    REQUEST_QUEUED           # with its lane
    REQUEST_WAITING          # for another request's answer
    REQUEST_TAKEN            # in a batch; belongs to the instance until its final response passes the bridge

# Told, on the loop, that nobody waits for the answer of a request any more that an instance has. Must be quick.
ctypedef void (*abandon_fn)(Request *request, void *owner) noexcept nogil

# Told, on the loop and perhaps with the GIL, that nobody waits any more for anything that is executed together. Must be
# quick.
ctypedef void (*stop_fn)(void *owner) noexcept nogil

# Takes a waiting request out of where it waits, on the loop; it is the caller's then.
ctypedef void (*leave_fn)(Request *request) noexcept nogil

# Called on the loop for each response, in order; the last one is final. `response` is NULL when the request ends
# before an instance answered, which `status` and `details` say. The sink copies or shares what it keeps.
ctypedef void (*deliver_fn)(void *sink, Response *response, int status, const char *details) noexcept nogil

cdef struct Abandonment:
    # that nobody waits for the answer any more, and whom to tell
    int32_t happened         # atomic
    abandon_fn told          # of the instance that executes the request; see request_follow
    void *owner              # its argument

cdef struct Request:
    InferMessage message     # empty for a request that the server itself makes
    Block *block             # the bytes that `message` points into
    void *lane               # Lane of the model version; NULL until found. Counts as in flight there.
    const Signature *signature
    InputData *inputs        # signature.input_count of them
    Response response        # the final one
    uint32_t tensor_capacity
    uint32_t rows            # batch dimension; 1 without one

    # from the parameters of the message
    Str id
    uint64_t priority        # 0: the model's default
    int64_t timeout_us       # longest wait in the queue; 0: the model's default
    Correlation correlation
    bint sequence_start
    bint sequence_end
    bint empty_final         # the client of a decoupled model wants the empty final response, too
    bint single              # its sink takes one response only, as that of any request whose model is not decoupled
    Response *held           # the model's response to it, until it is known to be the only one; see bridge_deliver
    bint is_step             # of an ensemble: an output that the model leaves out is no error, and phases are told
    bint is_warmup           # made by the server itself to warm its models up: no traffic, not counted

    Asker asker
    Placement *placements    # of its tensors in shared memory; NULL: there are none
    bint on_device           # some input may still lie on a device: see InputData.region

    Sequenced sequenced

    RequestState state       # guarded by the lane's lock
    Request *previous        # where it waits
    Request *next            # there, or in a chain
    int64_t arrived_ns
    int64_t queued_ns
    int64_t taken_ns         # when it was taken into a batch; 0: it was not yet
    int64_t responded_ns     # when its last response passed the bridge, if its model is decoupled; 0: there was none
    uint32_t responses       # so many have
    int64_t deadline_ns      # of the client, monotonic; 0: none
    int64_t expires_ns       # how long it may wait in the queue, monotonic; 0: as long as it takes
    bint yields              # then it waits on behind others instead of being refused
    uint32_t place           # in its lane; the scheduler's
    Timer timer              # of deadline and expiry
    void *order_entry        # OrderEntry of the answer, where answers leave in order; NULL: none

    void *record             # Record of what happens to it; NULL: nobody wants to know
    void (*drop_record)(Request *request) noexcept nogil
    Phases phases
    void *run                # of the ensemble that it is for; NULL: over, or for another model

    bint admitted            # counted in the bridge as in the house
    bint kept                # somebody keeps it beyond its final response, and frees it
    Abandonment abandonment
    uint64_t number          # by which who executes it knows it
    void *bridge             # Bridge that this request returns through
    deliver_fn deliver
    void *sink               # NULL once the sink has left
    leave_fn leave           # of a waiting request
    void *awaited            # by a waiting request; see leave

cdef struct Requests:
    # a list of them; see _native.list
    Request *first
    Request *last

cdef Request *request_new() noexcept nogil
cdef void request_free(Request *request) noexcept nogil
# Make room for the tensors of a model, none present and no output wanted. False: status and details are set.
cdef bint request_reserve(Request *request, const Signature *signature) noexcept nogil

# What a request says of itself, beside its tensors, holds for one that is made to answer it: id, priority, timeout,
# client, audience, parameters, and whether the server has made it to warm up. The bytes stay those of `outer`. False:
# no memory.
cdef bint request_inherit(Request *request, const Request *outer) noexcept nogil
# Another request with the same cache key, which shares the data; without sink, deadline and place, and with inputs that
# are not exclusive. NULL: no memory.
cdef Request *request_twin(const Request *request) noexcept nogil

# Set the error that the request ends with; `details` is from malloc (format_text) and is taken over; NULL stands for
# "out of memory".
cdef void request_fail(Request *request, int status, char *details) noexcept nogil
# The same for one that has waited in its queue for as long as it may.
cdef void request_expired(Request *request) noexcept nogil

# From the thread that executes it: have `told` called when the request is abandoned, or at once if it is already.
cdef void request_follow(Request *request, abandon_fn told, void *owner) noexcept nogil
# The opposite: when it returns, `told` does not run and will not.
cdef void request_unfollow(Request *request) noexcept nogil
# On the loop: nobody waits any more.
cdef void request_abandon(Request *request) noexcept nogil

cdef struct Watched:
    # requests that are executed together by one who can stop in between
    Request **requests
    uint32_t count
    stop_fn stop
    void *owner
    bint stopped             # `stop` was called
    Watched *previous
    Watched *next

# From the thread that executes them, without the GIL: have `stop` called once all are abandoned. False: they are
# already, and are not watched. What it costs does not depend on how many they are.
cdef bint requests_watch(Watched *watched) noexcept nogil
# The opposite, without the GIL: when it returns, `stop` does not run and will not.
cdef void requests_unwatch(Watched *watched) noexcept nogil

# A further response to a request of a decoupled model, with the outputs wanted that the request wants; NULL when there
# is no memory. It goes over the bridge, or back by response_free.
cdef Response *response_new(Request *request) noexcept nogil
cdef void response_free(Response *response) noexcept nogil
cdef void response_fail(Response *response, int status, char *details) noexcept nogil
# What one response says, said by another of the same request. `response` is gone.
cdef void response_move(Response *to, Response *response) noexcept nogil

# Whether the two requests may share a batch: the same inputs with, but for the batch dimension, the same shapes, and
# shape tensors of the same values.
cdef bint request_alike(const Request *a, const Request *b) noexcept nogil
