"""Records of single requests: the times of their steps, and the batch that they were in.

A request has a record if it was chosen for a trace or for the access log at its arrival. All requests have one if
traces or logs of failed or slow requests are kept, because only the end of a request shows whether it is one of these.
The executor of the request writes the times. When the request ends, the record goes into a list, which another thread
takes (`inferd._native.request.recorder`).
"""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, strlen

from inferd._native.atomic cimport load32
from inferd._native.clock cimport now_ns
from inferd._native.memory.resource cimport block_give
from inferd._native.protobuf.datatype cimport datatype_name
from inferd._native.request.request cimport REQUEST_KEPT, InputData, OutputData, Request, Response
from inferd._native.status cimport STATUS_CANCELLED, STATUS_OK
from inferd._native.threads cimport lock, unlock
from inferd._native.traceparent cimport TraceContext, is_baggage

cdef enum:
    MOST_RECORDS = 8192      # of requests that have ended, in the list
    MOST_BYTES = 64 << 20    # of their texts and tensors, and of the inputs of requests that have not ended
    MOST_TENSOR = 1 << 20    # bytes of one tensor that are kept
    MOST_NAME = 256          # bytes of a model's name or a request's id that are kept; clients choose how long they are
    MOST_ERROR = 1024        # bytes of an error's text


cdef inline uint64_t random64(Recorder *recorder) noexcept nogil:
    # xorshift128+: ids must differ, but need not be hard to guess
    cdef uint64_t a = recorder.seed[0]
    cdef uint64_t b = recorder.seed[1]
    recorder.seed[0] = b
    a ^= a << 23
    recorder.seed[1] = a ^ b ^ (a >> 17) ^ (b >> 26)
    return recorder.seed[1] + b


# ---------------------------------------------------------------------------------------------------------------------
# Beginning

cdef inline bint choose(Sampling *sampling, const TraceContext *context) noexcept nogil:
    # whether to trace a request: one in so many, and each whose client samples its trace
    if context != NULL and context.given:
        return context.flags & 1
    if sampling.rate == 0 or sampling.left == 0:
        return False
    sampling.seen += 1
    if sampling.seen < sampling.rate:
        return False
    sampling.seen = 0
    if sampling.left > 0:
        sampling.left -= 1
    return True


cdef Record *record_new(Recorder *recorder, Request *request) noexcept nogil:
    cdef Record *record = <Record *>calloc(1, sizeof(Record))
    cdef uint64_t id
    if record == NULL:
        return NULL
    record.recorder = recorder
    recorder.numbers += 1
    record.number = recorder.numbers
    record.arrived_ns = request.arrived_ns if request.arrived_ns else now_ns()
    id = random64(recorder) | 1
    memcpy(record.context.span, &id, 8)
    request.record = record
    request.drop_record = record_drop
    return record


cdef void record_begin(Recorder *recorder, Request *request, const TraceContext *context,
                       Sampling *own) noexcept nogil:
    cdef Sampling *sampling = own if own != NULL else &recorder.sampling
    cdef bint traced, accessed = False
    cdef Record *record
    cdef uint64_t half
    traced = load32(&sampling.on) and choose(sampling, context)
    if recorder.access_rate:
        recorder.access_seen += 1
        accessed = recorder.access_seen >= recorder.access_rate
        if accessed:
            recorder.access_seen = 0
    if not (traced or accessed or recorder.log_slow_ns or (recorder.slow_ns and load32(&sampling.on))):
        return
    record = record_new(recorder, request)
    if record == NULL:
        return
    record.traced = traced
    record.watched = recorder.slow_ns and load32(&sampling.on)
    record.accessed = accessed
    record.tensors = traced and sampling.tensors
    record.context.flags = traced
    if context != NULL and is_baggage(context.baggage, context.baggage_size):
        keep_baggage(record, context.baggage, context.baggage_size)
    if context != NULL and context.given:
        memcpy(record.context.trace, context.trace, 16)
        memcpy(record.parent, context.span, 8)
        record.context.given = True
        return
    half = random64(recorder) | 1
    memcpy(record.context.trace, &half, 8)
    half = random64(recorder)
    memcpy(record.context.trace + 8, &half, 8)


cdef void record_inner(Request *request, const Request *outer) noexcept nogil:
    cdef Record *above = <Record *>outer.record
    cdef Record *record
    if above == NULL:
        return
    above.shared = False  # it may have shared an execution that came too late; now it has one of its own
    above.link.given = False
    if not (above.traced or above.watched):
        return
    record = record_new(above.recorder, request)
    if record == NULL:
        return
    record.inner = True
    record.traced = above.traced
    record.watched = above.watched
    record.tensors = above.tensors
    record.context.flags = above.context.flags
    memcpy(record.context.trace, above.context.trace, 16)
    memcpy(record.parent, above.context.span, 8)
    record.parent_number = above.number
    if above.baggage != NULL:
        keep_baggage(record, <const uint8_t *>above.baggage, above.baggage_size)


cdef void keep_baggage(Record *record, const uint8_t *text, size_t size) noexcept nogil:
    # without memory the baggage is lost
    record.baggage = <char *>malloc(size)
    if record.baggage != NULL:
        memcpy(record.baggage, text, size)
        record.baggage_size = size


# ---------------------------------------------------------------------------------------------------------------------
# During the request

cdef void record_looked_up(Request *request, int64_t begin_ns, int64_t end_ns, bint found) noexcept nogil:
    cdef Record *record = <Record *>request.record
    record.looked_ns = begin_ns
    record.found_ns = end_ns
    record.cached = found


cdef void record_shares(Request *request, const Request *work) noexcept nogil:
    cdef Record *record = <Record *>request.record
    record.shared = True
    if work.record != NULL:
        record.link = (<const Record *>work.record).context
        record.link.given = True


# ---------------------------------------------------------------------------------------------------------------------
# Ending

cdef bint keep_texts(Record *record, const Request *request) noexcept nogil:
    cdef const char *details = request.response.details
    cdef size_t model = min(request.message.model_name.size, <size_t>MOST_NAME)
    cdef size_t id = min(request.id.size, <size_t>MOST_NAME)
    cdef size_t error = min(strlen(details), <size_t>MOST_ERROR) if details != NULL else 0
    cdef const char *name = <const char *>request.message.model_name.data
    if model == 0 and request.signature != NULL:
        name = <const char *>request.signature.name.data
        model = min(request.signature.name.size, <size_t>MOST_NAME)
    record.texts = <char *>calloc(1, model + id + error + 3)
    if record.texts == NULL:
        return False
    if model:
        memcpy(record.texts, name, model)
    if id:
        memcpy(record.texts + model + 1, request.id.data, id)
    if error:
        memcpy(record.texts + model + id + 2, details, error)
    record.text_sizes[0] = model
    record.text_sizes[1] = id
    record.text_sizes[2] = error
    return True


cdef inline bint has_input(const Request *request, uint32_t i) noexcept nogil:
    # Other inputs have no data here: the fields of an absent input are not set, and some data are on a device.
    return request.inputs[i].present and request.inputs[i].region == NULL


cdef size_t input_bytes(const Request *request) noexcept nogil:
    # the bytes that `keep_inputs` would copy
    cdef size_t total = 0
    cdef uint32_t i
    for i in range(request.signature.input_count):
        if has_input(request, i) and request.inputs[i].size <= MOST_TENSOR:
            total += request.inputs[i].size
    return total


cdef inline uint32_t output_count(const Response *response) noexcept nogil:
    return response.request.signature.output_count if response.outputs != NULL else 0


cdef inline bint has_output(const Response *response, uint32_t i) noexcept nogil:
    # the fields of other outputs are not set
    return response.outputs[i].wanted and response.outputs[i].block != NULL


cdef size_t output_bytes(const Response *response) noexcept nogil:
    # the bytes that `keep_outputs` would copy
    cdef size_t total = 0
    cdef uint32_t i
    for i in range(output_count(response)):
        if has_output(response, i) and response.outputs[i].size <= MOST_TENSOR:
            total += response.outputs[i].size
    return total


cdef bint reserve(Record *record, size_t size, bint listed) noexcept nogil:
    # reserve bytes before they are copied and, for `listed`, a place in the list; False: the limit is reached
    cdef Recorder *recorder = record.recorder
    cdef bint fits
    lock(&recorder.guard)
    fits = recorder.bytes + size <= MOST_BYTES and not (listed and recorder.count >= MOST_RECORDS)
    if fits:
        recorder.count += listed
        recorder.bytes += size
        record.kept_bytes += size
    elif listed:
        recorder.lost += 1
    unlock(&recorder.guard)
    return fits


cdef void record_taken(Request *request) noexcept nogil:
    if not request.on_device:  # else its inputs are not all in this memory yet
        record_inputs(request)


cdef void record_inputs(Request *request) noexcept nogil:
    cdef Record *record = <Record *>request.record
    if not record.tensors or record.data != NULL:
        return
    record.tensors = reserve(record, input_bytes(request), False)
    if record.tensors:
        with gil:
            keep_inputs(record, request)


cdef void record_response(Request *request, const Response *response) noexcept nogil:
    cdef Record *record = <Record *>request.record
    cdef uint32_t i
    if response.final:
        record.ended_ns = now_ns()  # now: the work that follows from the response does not count
    if request.sink == NULL or response.empty or response.status != STATUS_OK:
        return
    record.responses += 1
    if record.responses == 1 and request.signature != NULL and request.signature.decoupled:
        record.first_ns = now_ns()
    for i in range(output_count(response) if request.signature != NULL else 0):
        if has_output(response, i):
            record.sent += response.outputs[i].size


cdef void forget_earlier(Record *record) noexcept nogil:
    # The record of a request that is executed several times describes the time since it last entered the queue.
    if record.placed_ns < record.queued_ns:
        record.placed_ns = 0
    if record.taken_ns < record.queued_ns:  # it has left the queue without another batch
        record.taken_ns = 0
        record.input_end_ns = 0
        record.output_start_ns = 0
        record.computed_ns = 0
        record.batch = 0


cdef void record_end(Request *request) noexcept nogil:
    cdef Record *record = <Record *>request.record
    cdef Recorder *recorder = record.recorder
    cdef int64_t now = record.ended_ns if record.ended_ns else now_ns()
    cdef bint tensors = record.tensors and request.signature != NULL
    cdef bint slow, late
    cdef size_t size
    if record.status == STATUS_OK:
        record.status = request.response.status
    if record.status == STATUS_OK and request.sink == NULL and request.state != REQUEST_KEPT:
        record.status = STATUS_CANCELLED
    slow = record.watched and (record.status != STATUS_OK or now - record.arrived_ns > recorder.slow_ns)
    late = recorder.log_slow_ns and now - record.arrived_ns > recorder.log_slow_ns and not record.inner
    record.kept = record.traced or slow
    if not (record.kept or record.accessed or late) or not keep_texts(record, request):
        record_drop(request)
        return
    record.ended_ns = now
    record.queued_ns = request.queued_ns
    if record.taken_ns == 0:
        record.taken_ns = request.taken_ns
    forget_earlier(record)
    record.rows = request.rows
    record.single = request.single
    if request.signature != NULL:
        record.version = request.signature.version
    size = record.text_sizes[0] + record.text_sizes[1] + record.text_sizes[2] + record.baggage_size
    if tensors:
        size += output_bytes(&request.response) + (input_bytes(request) if record.data == NULL else 0)
    if not reserve(record, size, True):
        record_drop(request)
        return
    if tensors:
        with gil:
            if record.data == NULL:  # no instance has taken the request
                keep_inputs(record, request)
            if record.data != NULL:  # else there was no memory
                keep_outputs(record, &request.response)
    request.record = NULL
    record.next = NULL
    lock(&recorder.guard)
    if recorder.last == NULL:
        recorder.first = record
    else:
        recorder.last.next = record
    recorder.last = record
    unlock(&recorder.guard)


cdef void record_drop(Request *request) noexcept nogil:
    cdef Record *record = <Record *>request.record
    if record.kept_bytes:
        lock(&record.recorder.guard)
        record.recorder.bytes -= record.kept_bytes
        unlock(&record.recorder.guard)
    record_free(record)
    request.record = NULL


cdef void record_free(Record *record) noexcept nogil:
    if record == NULL:
        return
    if record.data != NULL:
        with gil:
            Py_DECREF(<object>record.data)
    block_give(record.peer)
    free(record.texts)
    free(record.baggage)
    free(record)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors, as Python objects

cdef dict tensor(str name, str datatype, const int64_t *shape, uint32_t rank, const uint8_t *data, size_t size):
    return {
        "name": name, "datatype": datatype, "shape": [shape[i] for i in range(rank)],
        "data": (<const char *>data)[:size] if data != NULL and size <= MOST_TENSOR else None,
    }


cdef void keep_inputs(Record *record, const Request *request) noexcept:
    # before the model can write to them
    cdef const InputData *into
    cdef uint32_t i
    cdef list inputs = []
    for i in range(request.signature.input_count):
        into = &request.inputs[i]
        if has_input(request, i):
            inputs.append(tensor(request.signature.inputs[i].name.data.decode("utf-8", "replace"),
                                 datatype_name(request.signature.inputs[i].datatype).decode(),
                                 into.shape, into.rank, into.data, into.size))
    found = (inputs, [])
    Py_INCREF(found)
    record.data = <void *>found


cdef void keep_outputs(Record *record, const Response *response) noexcept:
    # keep the outputs of the final response in the record
    cdef const OutputData *out
    cdef uint32_t i
    cdef list outputs = (<tuple>record.data)[1]
    for i in range(output_count(response)):
        out = &response.outputs[i]
        if has_output(response, i):
            outputs.append(tensor(response.request.signature.outputs[i].name.data.decode("utf-8", "replace"),
                                  datatype_name(out.datatype).decode(), out.shape, out.rank, out.data, out.size))
