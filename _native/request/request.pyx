"""Requests and responses: making them, failing them, and comparing requests that may share a batch."""

from libc.stdint cimport int32_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from inferd._native.assertion cimport assert_that
from inferd._native.atomic cimport load32, spin_lock, spin_unlock, store32
from inferd._native.list cimport list_prepend, list_remove
from inferd._native.memory.resource cimport LIVE_REQUESTS, block_give, block_share, live_add
from inferd._native.memory.shm cimport placements_free
from inferd._native.protobuf.codec cimport (
    InferMessage,
    infer_message_clear,
    infer_message_copy_parameters,
    infer_message_free,
    infer_message_init,
)
from inferd._native.refusal cimport REFUSAL_QUEUE_TIMEOUT, Refusal, refusal_status
from inferd._native.request.signature cimport TensorSignature
from inferd._native.shape cimport bucket_of
from inferd._native.status cimport STATUS_RESOURCE_EXHAUSTED
from inferd._native.text cimport format_text
from inferd._native.threads cimport Mutex, lock, mutex_init, unlock

cdef enum:
    IDLE_REQUESTS = 4096     # requests that are kept for reuse with their arrays
    IDLE_TENSORS = 16        # the most tensors in arrays that are kept
    SPARE_LOG2 = 3           # an eighth of a client's time is for the way to the server and back

cdef int64_t FOREVER = 0x7fffffffffffffff

cdef int32_t idle_lock = 0   # a spin lock
cdef Request *idle = NULL
cdef int idle_count = 0


# ---------------------------------------------------------------------------------------------------------------------
# Responses

cdef void clear_response(Response *response) noexcept nogil:
    # free what it holds, except for its array of outputs
    cdef uint32_t i
    for i in range(response.output_count):
        block_give(response.outputs[i].block)
    block_give(response.parameter_block)
    block_give(response.ack)
    free(response.details)


cdef void response_fail(Response *response, int status, char *details) noexcept nogil:
    free(response.details)
    response.status = status if details != NULL else <int>STATUS_RESOURCE_EXHAUSTED
    response.details = details


cdef Response *response_new(Request *request) noexcept nogil:
    cdef uint32_t count = request.signature.output_count
    cdef Response *response = <Response *>calloc(1, sizeof(Response) + count * sizeof(OutputData))
    cdef uint32_t i
    if response == NULL:
        return NULL
    response.request = request
    response.outputs = <OutputData *>(response + 1)
    response.output_count = count
    for i in range(count):
        response.outputs[i].wanted = request.response.outputs[i].wanted
        response.outputs[i].classes = request.response.outputs[i].classes
    return response


cdef void response_free(Response *response) noexcept nogil:
    clear_response(response)
    free(response)


cdef void response_move(Response *to, Response *response) noexcept nogil:
    cdef OutputData *outputs = to.outputs
    cdef bint final = to.final
    clear_response(to)
    memcpy(outputs, response.outputs, response.output_count * sizeof(OutputData))
    to[0] = response[0]
    to.outputs = outputs
    to.final = final
    to.next = NULL
    free(response)


# ---------------------------------------------------------------------------------------------------------------------
# Requests

cdef Request *request_new() noexcept nogil:
    global idle, idle_count
    cdef Request *request
    spin_lock(&idle_lock)
    request = idle
    if request != NULL:
        idle = request.next
        idle_count -= 1
    spin_unlock(&idle_lock)
    if request == NULL:
        request = <Request *>calloc(1, sizeof(Request))
        if request == NULL:
            return NULL
        infer_message_init(&request.message)
    request.next = NULL
    request.response.request = request
    request.response.final = True
    request.origin.user = -1
    live_add(LIVE_REQUESTS, 1)
    return request


cdef void request_free(Request *request) noexcept nogil:
    assert_that(request.state != REQUEST_QUEUED and request.state != REQUEST_WAITING)
    assert_that(not request.admitted and request.order_entry == NULL)
    if request.record != NULL:
        request.drop_record(request)
    global idle, idle_count
    cdef uint32_t i
    cdef bint keep
    cdef InputData *inputs = request.inputs
    cdef OutputData *outputs = request.response.outputs
    cdef uint32_t capacity = request.tensor_capacity
    if request.signature != NULL:
        for i in range(request.signature.input_count):
            block_give(request.inputs[i].block)
    clear_response(&request.response)
    if request.held != NULL:
        response_free(request.held)
    block_give(request.block)
    if request.placements != NULL:
        placements_free(request.placements)
    infer_message_clear(&request.message)
    # only the arrays stay, for the next user
    memset(&request.message + 1, 0, sizeof(Request) - sizeof(InferMessage))
    request.inputs = inputs
    request.response.outputs = outputs
    request.tensor_capacity = capacity
    live_add(LIVE_REQUESTS, -1)
    spin_lock(&idle_lock)
    keep = idle_count < IDLE_REQUESTS and capacity <= IDLE_TENSORS
    if keep:
        request.next = idle
        idle = request
        idle_count += 1
    spin_unlock(&idle_lock)
    if not keep:
        infer_message_free(&request.message)
        free(inputs)
        free(outputs)
        free(request)


cdef void request_fail(Request *request, int status, char *details) noexcept nogil:
    response_fail(&request.response, status, details)


cdef void request_refuse(Request *request, Refusal refusal, char *details) noexcept nogil:
    request_fail(request, refusal_status(refusal), details)
    request.response.refusal = refusal


cdef void request_expired(Request *request) noexcept nogil:
    request_refuse(request, REFUSAL_QUEUE_TIMEOUT, format_text(
        "Request timeout expired: waited %lld us in the queue of model '%s' version %s, as long as it may",
        <long long>(request.expires_ns - request.terms.executable_ns) // 1000, request.signature.name.data,
        request.signature.version_text.data))


# ---------------------------------------------------------------------------------------------------------------------
# Being abandoned

cdef Mutex following          # protects `told` and `owner` of all requests; held while `told` runs
mutex_init(&following, NULL)


cdef void request_follow(Request *request, abandon_fn told, void *owner) noexcept nogil:
    lock(&following)
    request.abandonment.told = told
    request.abandonment.owner = owner
    if load32(&request.abandonment.happened):
        told(request, owner)
    unlock(&following)


cdef void request_unfollow(Request *request) noexcept nogil:
    lock(&following)
    request.abandonment.told = NULL
    unlock(&following)


cdef void request_abandon(Request *request) noexcept nogil:
    lock(&following)
    store32(&request.abandonment.happened, 1)
    if request.abandonment.told != NULL:
        request.abandonment.told(request, request.abandonment.owner)
    unlock(&following)
    stop_abandoned()


cdef struct WatchedList:
    # see inferd._native.list
    Watched *first
    Watched *last

# The front holds this lock while it calls `stop`, which may take the GIL. Other threads must release the GIL before
# they wait for the lock.
cdef Mutex watching
cdef WatchedList all_watched
mutex_init(&watching, NULL)


cdef bint all_abandoned(const Watched *watched) noexcept nogil:
    cdef uint32_t i
    for i in range(watched.count):
        if not load32(&watched.requests[i].abandonment.happened):
            return False
    return True


cdef bint requests_watch(Watched *watched) noexcept nogil:
    cdef bint waited_for
    watched.stopped = False
    lock(&watching)
    waited_for = not all_abandoned(watched)
    if waited_for:
        list_prepend(&all_watched, watched)
    unlock(&watching)
    return waited_for


cdef void requests_unwatch(Watched *watched) noexcept nogil:
    lock(&watching)
    list_remove(&all_watched, watched)
    unlock(&watching)


cdef void stop_abandoned() noexcept nogil:
    # all_abandoned is quick: it ends at the first request that is not abandoned
    cdef Watched *watched
    lock(&watching)
    watched = all_watched.first
    while watched != NULL:
        if not watched.stopped and all_abandoned(watched):
            watched.stopped = True
            watched.stop(watched.owner)
        watched = watched.next
    unlock(&watching)


# ---------------------------------------------------------------------------------------------------------------------

cdef bint request_reserve(Request *request, const Signature *signature) noexcept nogil:
    cdef uint32_t wanted = max(signature.input_count, signature.output_count)
    cdef uint32_t i
    if wanted > request.tensor_capacity:
        free(request.inputs)
        free(request.response.outputs)
        request.inputs = <InputData *>malloc(wanted * sizeof(InputData))
        request.response.outputs = <OutputData *>malloc(wanted * sizeof(OutputData))
        request.tensor_capacity = wanted
        if request.inputs == NULL or request.response.outputs == NULL:
            free(request.inputs)
            free(request.response.outputs)
            request.inputs = NULL
            request.response.outputs = NULL
            request.tensor_capacity = 0
            request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
            return False
    for i in range(signature.input_count):
        request.inputs[i].present = False
        request.inputs[i].block = NULL
        request.inputs[i].exclusive = False
        request.inputs[i].region = NULL
    for i in range(signature.output_count):
        request.response.outputs[i].wanted = False
        request.response.outputs[i].classes = 0
        request.response.outputs[i].block = NULL
        request.response.outputs[i].placed = False
    request.response.output_count = signature.output_count
    request.signature = signature
    return True


cdef void terms_begin(Terms *terms, int64_t now) noexcept nogil:
    memset(terms, 0, sizeof(Terms))
    terms.asked_ns = now
    terms.executable_ns = now


cdef void terms_limit(Terms *terms, int64_t now, int64_t timeout_ns) noexcept nogil:
    cdef int64_t deadline = now + timeout_ns if timeout_ns < FOREVER - now else FOREVER
    if terms.deadline_ns == 0 or deadline < terms.deadline_ns:
        terms.deadline_ns = deadline
        terms.due_ns = deadline - ((deadline - now) >> SPARE_LOG2)


cdef void terms_lend(Terms *terms, const Terms *outer, int64_t now) noexcept nogil:
    terms[0] = outer[0]
    terms.executable_ns = now
    terms.priority = 0
    terms.timeout_us = 0


cdef bint request_inherit(Request *request, const Request *outer) noexcept nogil:
    request.id = outer.id
    request.origin = outer.origin
    request.terms = outer.terms
    request.inner = True
    request.is_warmup = outer.is_warmup
    return infer_message_copy_parameters(&request.message, &outer.message)


cdef Request *request_twin(const Request *request) noexcept nogil:
    cdef Request *twin = request_new()
    cdef uint32_t i
    if twin == NULL:
        return NULL
    if not (request_reserve(twin, request.signature) and request_inherit(twin, request)):
        request_free(twin)
        return NULL
    twin.block = block_share(request.block) if request.block != NULL else NULL
    twin.lane = request.lane
    twin.is_step = request.is_step
    twin.rows = request.rows
    twin.on_device = request.on_device
    twin.arrived_ns = request.arrived_ns
    for i in range(request.signature.input_count):
        twin.inputs[i] = request.inputs[i]
        twin.inputs[i].exclusive = False
        if twin.inputs[i].block != NULL:
            block_share(twin.inputs[i].block)
    for i in range(request.signature.output_count):
        twin.response.outputs[i].wanted = request.response.outputs[i].wanted
        twin.response.outputs[i].classes = request.response.outputs[i].classes
    return twin


cdef bint same_shape(const Signature *signature, const TensorSignature *tensor, const InputData *a,
                     const InputData *b) noexcept nogil:
    # except for the batch dimension; padded lengths are equal if they have the same bucket
    cdef uint32_t batches = signature.max_batch_size > 0
    cdef uint32_t i
    if not tensor.padded:
        for i in range(batches, batches + tensor.rank):  # so few that the call of memcmp would cost more
            if a.shape[i] != b.shape[i]:
                return False
        return True
    i = tensor.pad_axis + batches  # its only variable dimension
    return (bucket_of(signature.buckets, signature.bucket_count, a.shape[i])
            == bucket_of(signature.buckets, signature.bucket_count, b.shape[i]))


cdef bint request_alike(const Request *a, const Request *b) noexcept nogil:
    cdef const Signature *signature = a.signature
    cdef const TensorSignature *tensor
    cdef const InputData *x
    cdef const InputData *y
    cdef uint32_t i
    for i in range(signature.input_count):
        tensor = &signature.inputs[i]
        x = &a.inputs[i]
        y = &b.inputs[i]
        if x.present != y.present:
            return False
        if not x.present or tensor.ragged:
            continue
        if tensor.values and (x.size != y.size or memcmp(x.data, y.data, x.size) != 0):
            return False
        if tensor.variable and not same_shape(signature, tensor, x, y):
            return False
    return True
