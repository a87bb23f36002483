"""ModelInfer: from the bytes of a request message to a lane, and from a finished request to the bytes of its answer.

The native front door comes in through `infer_unary` and leaves through `deliver_stream`, without a Python object on the
way. Everything else (the other front door, streams, tests) uses `InferService.submit`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strlen

from _native.access cimport ALLOWED, Gate, Judge, Verdict, gate_model, gate_status, gate_text
from _native.bridge cimport Bridge, BridgeHandle, bridge_abandon, bridge_return, bridge_watch
from _native.clock cimport now_ns
from _native.codec cimport (
    PARAMETER_BOOL,
    Parameter,
    ResponseHead,
    ResponseOutput,
    Str,
    raw_prefix_size,
    raw_prefix_write,
    response_head_size,
    response_head_write,
)
from _native.connection cimport Endpoint
from _native.errorinfo cimport LoadReport, final_trailers, report_set
from _native.http2 cimport Stream, stream_end, stream_fail, stream_reply
from _native.lane cimport LANE_FULL, PUSHED, Lane, Pushed, lane_push, lane_wake
from _native.memory cimport Block, block_give, block_of_object
from _native.nghttp2 cimport nghttp2_nv
from _native.outgoing cimport Outgoing, outgoing_add, outgoing_new, write_message_prefix
from _native.request cimport (
    STATUS_OK,
    STATUS_RESOURCE_EXHAUSTED,
    STATUS_UNAVAILABLE,
    OutputData,
    Request,
    request_bind,
    request_decode,
    request_fail,
    request_free,
    request_new,
)
from _native.table cimport ModelTable, Table, table_find
from _native.text cimport format_text
from _native.wire cimport varint_size, write_varint

cdef enum:
    COPY_BELOW = 8192        # answers smaller than this are written as one piece
    REFERENCE_FROM = 4096    # outputs from this size on are sent by reference
    TOUCHED = 16             # lanes whose instances are woken together
    FEW_OUTPUTS = 16

cdef int64_t FOREVER = 0x7fffffffffffffff

cdef struct InferContext:
    Table *table
    Bridge *bridge
    uint32_t max_inflight    # requests in the house; 0: any number
    Gate *gate               # who may use which model; NULL: everybody every
    LoadReport report        # what answers carry for balancers
    Lane *touched[TOUCHED]   # have got requests since wake_touched
    uint32_t touched_count


# ---------------------------------------------------------------------------------------------------------------------
# In

cdef void wake_touched(void *context) noexcept nogil:
    cdef InferContext *self = <InferContext *>context
    cdef uint32_t i
    for i in range(self.touched_count):
        lane_wake(self.touched[i])
    self.touched_count = 0


cdef inline void touch(InferContext *self, Lane *lane) noexcept nogil:
    cdef uint32_t i
    for i in range(self.touched_count):
        if self.touched[i] == lane:
            return
    if self.touched_count == TOUCHED:
        wake_touched(self)
    self.touched[self.touched_count] = lane
    self.touched_count += 1


cdef bint prepare(InferContext *self, Request *request, Block *block, const uint8_t *data, size_t size,
                  uint64_t caller) noexcept nogil:
    # decode, find the model, check; False: the request carries its error
    cdef Lane *lane
    cdef int status = STATUS_OK
    cdef char *details = NULL
    if not request_decode(request, block, data, size):
        return False
    if self.gate != NULL and not may_use(self.gate, request, caller):
        return False
    lane = table_find(self.table, request.message.model_name, request.message.model_version, &status, &details)
    if lane == NULL:
        request_fail(request, status, details)
        return False
    request.lane = lane
    return request_bind(request, &lane.signature)


cdef bint may_use(const Gate *gate, Request *request, uint64_t caller) noexcept nogil:
    cdef Verdict verdict = gate_model(gate, caller, request.message.model_name)
    if verdict != ALLOWED:
        request_fail(request, gate_status(gate, verdict), gate_text(gate, verdict, 0, request.message.model_name))
    return verdict == ALLOWED


cdef void start(InferContext *self, Request *request, Block *block, const uint8_t *data, size_t size,
                int64_t timeout_ns, uint64_t caller) noexcept nogil:
    # Send a request on its way; its sink is set. It comes back over the bridge, whatever happens.
    cdef int64_t now = now_ns()
    cdef Pushed pushed
    request.bridge = self.bridge
    request.arrived_ns = now
    request.queued_ns = now
    if self.max_inflight and self.bridge.in_house >= self.max_inflight:
        request.block = block
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Exceeds maximum queue size: the server has %u requests in the house, which is its limit",
            self.bridge.in_house))
        request.reason = "SERVER_FULL"
        bridge_return(self.bridge, request, request)
        return
    request.admitted = True
    self.bridge.in_house += 1
    if not prepare(self, request, block, data, size, caller):
        bridge_return(self.bridge, request, request)
        return
    if timeout_ns >= 0:
        request.deadline_ns = now + timeout_ns if timeout_ns < FOREVER - now else FOREVER
        if not bridge_watch(self.bridge, request):
            request_fail(request, STATUS_RESOURCE_EXHAUSTED, NULL)
            bridge_return(self.bridge, request, request)
            return
    pushed = lane_push(<Lane *>request.lane, request)
    if pushed != PUSHED:
        refuse(request, pushed)
        bridge_return(self.bridge, request, request)
        return
    touch(self, <Lane *>request.lane)


cdef void refuse(Request *request, Pushed pushed) noexcept nogil:
    # the lane did not take it
    if pushed == LANE_FULL:
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Exceeds maximum queue size: model '%s' version %s has %u requests waiting, which is its limit",
            request.signature.name.data, request.signature.version_text.data, (<Lane *>request.lane).max_queue))
        request.reason = "QUEUE_FULL"
    else:
        request_fail(request, STATUS_UNAVAILABLE, format_text(
            "Request for unknown model: '%s' version %s is not at ready state",
            request.signature.name.data, request.signature.version_text.data))


# ---------------------------------------------------------------------------------------------------------------------
# Out

cdef struct Answer:
    # the parts of an encoded ModelInferResponse and their sizes
    ResponseHead head
    ResponseOutput few[FEW_OUTPUTS]
    ResponseOutput *outputs
    size_t head_size
    size_t size              # of the whole message


cdef bint answer_measure(Answer *answer, const Request *request, const Parameter *parameter) noexcept nogil:
    cdef OutputData *out
    cdef ResponseOutput *described
    cdef uint32_t i
    answer.outputs = answer.few
    if request.signature.output_count > FEW_OUTPUTS:
        answer.outputs = <ResponseOutput *>malloc(request.signature.output_count * sizeof(ResponseOutput))
        if answer.outputs == NULL:
            return False
    answer.head.model_name = request.signature.name
    answer.head.model_version = request.signature.version_text
    answer.head.id = request.message.id
    answer.head.outputs = answer.outputs
    answer.head.output_count = 0
    answer.head.parameters = parameter
    answer.head.parameter_count = 1 if parameter != NULL else 0
    answer.size = 0
    for i in range(request.signature.output_count):
        out = &request.outputs[i]
        if not out.wanted:
            continue
        described = &answer.outputs[answer.head.output_count]
        described.name = request.signature.outputs[i].name
        described.datatype = out.datatype
        described.shape = out.shape
        described.rank = out.rank
        answer.head.output_count += 1
        answer.size += raw_prefix_size(out.size) + out.size
    answer.head_size = response_head_size(&answer.head)
    answer.size += answer.head_size
    return True


cdef inline void answer_done(Answer *answer) noexcept nogil:
    if answer.outputs != answer.few:
        free(answer.outputs)


cdef uint8_t *answer_write(const Answer *answer, const Request *request, uint8_t *at) noexcept nogil:
    # the whole message in one run
    cdef const OutputData *out
    cdef uint32_t i
    at = response_head_write(&answer.head, at)
    for i in range(request.signature.output_count):
        out = &request.outputs[i]
        if out.wanted:
            at = raw_prefix_write(out.size, at)
            if out.size:  # else `data` may be NULL, which memcpy forbids
                memcpy(at, out.data, out.size)
            at += out.size
    return at


cdef Outgoing *answer_by_reference(const Answer *answer, const Request *request) noexcept nogil:
    # header and small outputs copied, large outputs referenced where the model left them
    cdef Outgoing *message
    cdef const OutputData *out
    cdef uint8_t *start
    cdef uint8_t *at
    cdef size_t room = 5 + answer.head_size
    cdef uint32_t i
    for i in range(request.signature.output_count):
        out = &request.outputs[i]
        if out.wanted:
            room += raw_prefix_size(out.size) + (out.size if out.size < REFERENCE_FROM else 0)
    message = outgoing_new(2 * answer.head.output_count + 1, room)
    if message == NULL:
        return NULL
    start = message.room
    write_message_prefix(start, answer.size)
    at = response_head_write(&answer.head, start + 5)
    for i in range(request.signature.output_count):
        out = &request.outputs[i]
        if not out.wanted:
            continue
        at = raw_prefix_write(out.size, at)
        if out.size < REFERENCE_FROM:
            if out.size:
                memcpy(at, out.data, out.size)
            at += out.size
        else:
            outgoing_add(message, message.home, start, <size_t>(at - start))
            outgoing_add(message, out.block, out.data, out.size)
            start = at
    if at != start:
        outgoing_add(message, message.home, start, <size_t>(at - start))
    return message


cdef Outgoing *encode(const Request *request) noexcept nogil:
    # the framed gRPC message of a successful request; NULL when there is no memory
    cdef Answer answer
    cdef Outgoing *message
    if not answer_measure(&answer, request, NULL):
        return NULL
    if answer.size >> 32:  # the length of a gRPC message has four bytes
        message = NULL
    elif answer.size >= COPY_BELOW:
        message = answer_by_reference(&answer, request)
    else:
        message = outgoing_new(1, 5 + answer.size)
        if message != NULL:
            write_message_prefix(message.room, answer.size)
            answer_write(&answer, request, message.room + 5)
            outgoing_add(message, message.home, message.room, 5 + answer.size)
    answer_done(&answer)
    return message


# ---------------------------------------------------------------------------------------------------------------------
# The native front door

cdef void infer_unary(void *context, Stream *stream, Block *block, const uint8_t *data, size_t size,
                      int64_t timeout_ns) noexcept nogil:
    cdef Request *request = request_new()
    if request == NULL:
        block_give(block)
        stream_fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the request")
        return
    request.deliver = deliver_stream
    request.sink = stream
    stream.call = request
    start(<InferContext *>context, request, block, data, size, timeout_ns, stream.caller)


cdef void deliver_stream(void *sink, Request *request, int status, const char *details) noexcept nogil:
    cdef Stream *stream = <Stream *>sink
    cdef Outgoing *message
    cdef const LoadReport *report = &(<InferContext *>stream.method.context).report
    stream.call = NULL
    if status != STATUS_OK:
        fail(stream, status, details, request.reason if request != NULL else NULL, report)
        return
    message = encode(request)
    if message == NULL:
        fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the response, or it exceeds 4 GiB", NULL, report)
        return
    if report.size:
        stream.trailers = final_trailers(STATUS_OK, "", NULL, report, &stream.trailer_count)
    stream_reply(stream, message)


cdef void fail(Stream *stream, int status, const char *details, const char *reason,
               const LoadReport *report) noexcept nogil:
    cdef size_t count
    cdef nghttp2_nv *trailers = final_trailers(status, details, reason, report, &count)
    stream_end(stream, status, details, trailers, count)


cdef void stream_gone(void *call) noexcept nogil:
    bridge_abandon(<Request *>call)


# ---------------------------------------------------------------------------------------------------------------------
# Python

cdef Parameter FINAL_RESPONSE
memset(&FINAL_RESPONSE, 0, sizeof(Parameter))
FINAL_RESPONSE.key.data = "triton_final_response"
FINAL_RESPONSE.key.size = 21
FINAL_RESPONSE.kind = PARAMETER_BOOL
FINAL_RESPONSE.integer = 1

cdef enum:
    STREAM_ERROR_MESSAGE = 1 << 3 | 2     # tags of ModelStreamInferResponse
    STREAM_INFER_RESPONSE = 2 << 3 | 2


cdef bytes encode_unary(const Request *request):
    cdef Answer answer
    cdef bytes out
    if not answer_measure(&answer, request, NULL):
        raise MemoryError
    try:
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>answer.size)
        answer_write(&answer, request, <uint8_t *>PyBytes_AS_STRING(out))
    finally:
        answer_done(&answer)
    return out


cdef bytes encode_streamed(const Request *request):
    # ModelStreamInferResponse.infer_response; a model that is not decoupled sends one response, which is its last
    cdef Answer answer
    cdef bytes out
    cdef uint8_t *at
    if not answer_measure(&answer, request, &FINAL_RESPONSE):
        raise MemoryError
    try:
        out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(1 + varint_size(answer.size) + answer.size))
        at = <uint8_t *>PyBytes_AS_STRING(out)
        at[0] = STREAM_INFER_RESPONSE
        answer_write(&answer, request, write_varint(at + 1, answer.size))
    finally:
        answer_done(&answer)
    return out


cdef bytes encode_stream_error(const char *details, Str id):
    # ModelStreamInferResponse with error_message, and the request's id in infer_response
    cdef ResponseHead head
    cdef size_t text_size = strlen(details)
    cdef size_t head_size
    cdef bytes out
    cdef uint8_t *at
    memset(&head, 0, sizeof(ResponseHead))
    head.id = id
    head_size = response_head_size(&head)
    out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(
        2 + varint_size(text_size) + text_size + varint_size(head_size) + head_size))
    at = <uint8_t *>PyBytes_AS_STRING(out)
    at[0] = STREAM_ERROR_MESSAGE
    at = write_varint(at + 1, text_size)
    memcpy(at, details, text_size)
    at += text_size
    at[0] = STREAM_INFER_RESPONSE
    response_head_write(&head, write_varint(at + 1, head_size))
    return out


cdef void deliver_python(void *sink, Request *request, int status, const char *details) noexcept nogil:
    with gil:
        (<Ticket>sink).answer(request, status, details)


cdef class Ticket:
    """A submitted request, for cancelling it."""

    cdef Request *request
    cdef object deliver
    cdef bint stream
    cdef readonly str reason     # of an error, for google.rpc.ErrorInfo; empty for the usual one of its status

    def __init__(self):
        raise TypeError("Ticket cannot be created from Python")

    cdef void answer(self, Request *request, int status, const char *details) noexcept:
        cdef object deliver = self.deliver
        cdef object response = None
        cdef Str id
        cdef str text = details.decode("utf-8", "replace") if details != NULL and status != STATUS_OK else ""
        try:
            if status == STATUS_OK:
                response = encode_streamed(request) if self.stream else encode_unary(request)
            elif self.stream:
                id = self.request.message.id
                response = encode_stream_error(details, id)
        except MemoryError:
            status = STATUS_RESOURCE_EXHAUSTED
            text = "no memory for the response"
        if request != NULL and request.reason != NULL:
            self.reason = request.reason.decode("ascii")
        self.request = NULL
        self.deliver = None
        Py_DECREF(self)
        deliver(status, text, response)

    def cancel(self) -> None:
        """The answer is no longer wanted: it will not be delivered, and queued work does not run."""
        cdef Request *request = self.request
        if request != NULL:
            self.request = NULL
            self.deliver = None
            bridge_abandon(request)
            Py_DECREF(self)


cdef class InferService:
    """Takes requests in and sends answers out, on one event loop.

    Args:
        table: the models.
        bridge: the way back to the loop; the owner registers its descriptors.
        max_inflight: requests that may be in the house; further ones are refused. 0 for any number.
    """

    cdef InferContext context
    cdef ModelTable table
    cdef BridgeHandle bridge
    cdef Judge judge

    def __init__(self, ModelTable table not None, BridgeHandle bridge not None, *, max_inflight: int = 0):
        self.table = table
        self.bridge = bridge
        self.context.table = &table.table
        self.context.bridge = &bridge.bridge
        self.context.max_inflight = max_inflight

    @property
    def in_house(self) -> int:
        """Requests that were admitted and are not over."""
        return self.bridge.in_house

    def guard(self, Judge judge not None) -> None:
        """Have every request pass this judge of who may use which model."""
        self.judge = judge
        self.context.gate = &judge.gate

    def set_load_report(self, encoded: bytes) -> None:
        """Send this OrcaLoadReport with every native answer from now on; none when empty."""
        if not report_set(&self.context.report, encoded):
            raise ValueError(f"the load report of {len(encoded)} bytes is too long for a header")

    def install(self, Endpoint endpoint not None) -> None:
        """Serve ModelInfer natively on an endpoint, which must not outlive this object."""
        endpoint.add_native(b"/inference.GRPCInferenceService/ModelInfer", infer_unary, stream_gone, &self.context)
        endpoint.host.after_receive = wake_touched
        endpoint.host.after_context = &self.context

    def submit(self, message: bytes, deliver, *, timeout_ns: int = -1, stream: bool = False,
               uint64_t caller=0) -> Ticket:
        """Decode, check and queue one encoded ModelInferRequest.

        Args:
            message: its bytes.
            deliver: called once on the loop, never from inside this method, as deliver(status, details, response): a
                gRPC status code, the error text, and the encoded ModelInferResponse (None after an error).
            timeout_ns: the client's deadline from now; negative for none.
            stream: deliver an encoded ModelStreamInferResponse instead, also for errors.
            caller: who asks, as `_native.access.Judge.judge` found.
        """
        cdef Ticket ticket = Ticket.__new__(Ticket)
        cdef Request *request = request_new()
        cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(message)
        cdef Block *block = block_of_object(message, data, len(message))
        if request == NULL or block == NULL:
            block_give(block)
            if request != NULL:
                request_free(request)
            raise MemoryError("no memory for the request")
        ticket.request = request
        ticket.deliver = deliver
        ticket.stream = stream
        ticket.reason = ""
        Py_INCREF(ticket)
        request.deliver = deliver_python
        request.sink = <void *>ticket
        start(&self.context, request, block, data, len(message), timeout_ns, caller)
        wake_touched(&self.context)
        return ticket
