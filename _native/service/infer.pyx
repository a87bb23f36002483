"""ModelInfer: from the front doors to a submission, and from a response to the call that waits for it.

The native front door enters by `infer_unary` and gets responses by `deliver_stream`, without Python objects; its
streams are in `inferd._native.service.exchange`. All other requests enter by `InferService.submit`, and get responses
by a `Ticket` (`inferd._native.service.ticket`).
"""

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from inferd._native.atomic cimport add_own
from inferd._native.caching.coalescer cimport Coalescer, coalescer_clear, coalescer_drop, coalescer_forget
from inferd._native.execution.warmup cimport Outcome, warmup_requests
from inferd._native.front cimport PythonEvent, front_enter, front_leave, python_post
from inferd._native.memory.resource cimport Block, block_give, block_of_object, block_share
from inferd._native.memory.shm cimport Regions
from inferd._native.protobuf.codec cimport Str
from inferd._native.refusal cimport REFUSAL_LIMIT_EXCEEDED, REFUSAL_NONE, Refusal, refusal_count
from inferd._native.request.bridge cimport Bridge, BridgeHandle, bridge_abandon
from inferd._native.request.lane cimport Lane, LaneHandle
from inferd._native.request.record cimport Record
from inferd._native.request.recorder cimport RecorderHandle
from inferd._native.request.request cimport Request, Response, request_free, request_new
from inferd._native.service.access cimport ALLOWED, INFERENCE, AccessPolicy, Verdict, access_message
from inferd._native.service.authorizer cimport Authorizer, access_deny, access_note
from inferd._native.service.call_request cimport submit_for_call
from inferd._native.service.encoding cimport response_outgoing
from inferd._native.service.exchange cimport EXCHANGE, ExchangeDoor, exchange_deliver, exchange_stream, exchanges_drain
from inferd._native.service.forwarding cimport Forwarder, forwarder_claims
from inferd._native.service.model_waits cimport ModelAsk, model_ask_answer, model_ask_new, refuse_fn
from inferd._native.service.response_store cimport StoreBase, store_install
from inferd._native.service.submission cimport (
    Submission,
    submission_after_read,
    submission_awaits,
    submission_resume,
    submission_wake,
    submit_call,
    submit_request,
    submit_work,
)
from inferd._native.service.table cimport ModelTable, message_model, table_place
from inferd._native.service.ticket cimport CallOrigin, Ticket, ticket_new
from inferd._native.status cimport STATUS_OK, STATUS_RESOURCE_EXHAUSTED, STATUS_UNAVAILABLE
from inferd._native.text cimport format_text, text_or_no_memory
from inferd._native.timers cimport TimersHandle
from inferd._native.transport.endpoint cimport Endpoint
from inferd._native.transport.errorinfo cimport LoadReport, final_trailers, report_set, stream_refuse
from inferd._native.transport.io_thread cimport IoThreads, io_wake
from inferd._native.transport.nghttp2 cimport nghttp2_nv
from inferd._native.transport.outgoing cimport Outgoing
from inferd._native.transport.stream cimport Stream, stream_end, stream_reply
from inferd._native.transport.unary cimport UNARY, Unary

UNARY_PATH = "/inference.GRPCInferenceService/ModelInfer"
STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"

cdef CallOrigin UNKNOWN = CallOrigin()

cdef enum:
    STREAM_WINDOW = 128      # requests of a stream that may be open: enough to fill a large batch from one
    DROPPED = 1024           # responses that the cache frees at a time, while others wait for the front

cdef struct Door:
    # the context of the native ModelInfer
    Unary unary
    Submission *submission
    LoadReport report        # for load balancers, sent with each response
    uint64_t received        # bytes of the messages of requests
    uint64_t sent            # bytes of the messages of responses
    void *service            # the InferService; not a reference


# ---------------------------------------------------------------------------------------------------------------------
# The native front door

cdef Block *place_message(void *context, Stream *stream, const uint8_t *head, size_t head_size,
                          size_t size) noexcept nogil:
    # A caller that may not use the model gets none of its memory, and its call ends before the rest is sent.
    cdef Submission *submission = (<Door *>context).submission
    cdef Str name = message_model(head, head_size)
    cdef Verdict verdict = ALLOWED
    if name.data == NULL:
        return NULL
    if submission.access != NULL:
        verdict = access_message(submission.access, stream.caller, INFERENCE, name)
    if verdict == ALLOWED:
        return table_place(submission.table, name, size)
    access_deny(submission.access, stream, verdict, name)
    return NULL


cdef inline Door *door_of(const Stream *stream) noexcept nogil:
    return <Door *>(<const Unary *>stream.method.context).context


cdef void infer_unary(void *context, Stream *stream, Block *block, const uint8_t *data, size_t size,
                      int64_t timeout_ns) noexcept nogil:
    cdef Request *request = request_new()
    if request == NULL:
        block_give(block)
        stream_refuse(stream, REFUSAL_LIMIT_EXCEEDED, format_text("no memory for the request"))
        return
    (<Door *>context).received += size
    request.single = True
    request.deliver = deliver_stream
    request.sink = stream
    stream.call = request
    submit_for_call((<Door *>context).submission, request, stream, block, data, size, timeout_ns)


cdef void deliver_stream(void *sink, Response *response, int status, const char *details) noexcept nogil:
    # Called once, because the bridge holds responses that a model sends before the final one. Until this call the
    # request has the stream as its sink, and the stream has the request; the one that ends first tells the other.
    cdef Stream *stream = <Stream *>sink
    cdef Outgoing *message
    cdef const LoadReport *report = &door_of(stream).report
    stream.call = NULL
    if status != STATUS_OK:
        fail(stream, status, details, response.refusal if response != NULL else REFUSAL_NONE, report)
        return
    message = response_outgoing(response, False)
    if message == NULL:
        refusal_count(REFUSAL_LIMIT_EXCEEDED)
        fail(stream, STATUS_RESOURCE_EXHAUSTED, "no memory for the response, or it exceeds 4 GiB",
             REFUSAL_LIMIT_EXCEEDED, report)
        return
    door_of(stream).sent += message.left
    add_own(&(<Lane *>response.request.lane).sent, <int64_t>message.left)
    if report.size:
        stream.sender.trailers = final_trailers(STATUS_OK, "", REFUSAL_NONE, report, &stream.sender.trailer_count)
    stream_reply(stream, message)


cdef void fail(Stream *stream, int status, const char *details, Refusal refusal,
               const LoadReport *report) noexcept nogil:
    cdef size_t count
    cdef nghttp2_nv *trailers = final_trailers(status, details, refusal, report, &count)
    stream_end(stream, status, details, trailers, count)


cdef void abandon(void *call) noexcept nogil:
    bridge_abandon(<Request *>call)


cdef void push_work(void *context, Request *work) noexcept nogil:
    submit_work(<Submission *>context, work)


cdef void note_denied(AccessPolicy *access, const Request *request) noexcept nogil:
    cdef const Stream *stream = NULL
    if request.deliver == deliver_stream:
        stream = <const Stream *>request.sink
    elif request.deliver == exchange_deliver:
        stream = exchange_stream(request.sink)
    if stream != NULL:
        access_note(access, stream, request.response.details)
        return
    with gil:
        note_ticket(<Authorizer>access.authorizer, <Ticket>request.sink, request.response.details, request.origin.user)


cdef void note_ticket(Authorizer authorizer, Ticket ticket, const char *text, int64_t user):
    authorizer.note(ticket.call.peer, STREAM_PATH if ticket.call.stream else UNARY_PATH,
                    text_or_no_memory(text).decode("utf-8", "replace"), user)


cdef struct StreamOver:
    PythonEvent event        # the first member
    uint64_t number          # of a native stream


cdef void stream_over(void *context, uint64_t number) noexcept nogil:
    cdef Door *door = <Door *>context
    cdef StreamOver *over = <StreamOver *>calloc(1, sizeof(StreamOver))
    if over == NULL:
        return  # the sequences of the stream then end only when they have been idle for long enough
    over.event.run = tell_stream_over
    over.event.owner = door.service
    over.number = number
    python_post(&door.submission.bridge.timers.python, &over.event)


cdef int tell_stream_over(PythonEvent *event) except -1:
    cdef InferService service = <InferService>event.owner
    cdef uint64_t number = (<StreamOver *>event).number
    front_leave()
    free(event)
    if service.on_stream_over is not None:
        service.on_stream_over(number)
    return 0


cdef void warmup_over(Outcome *outcome) noexcept nogil:
    cdef Bridge *bridge = <Bridge *>outcome.bridge
    python_post(&bridge.timers.python, &outcome.event)


cdef int tell_warmup_over(PythonEvent *event) except -1:
    cdef Warmup warmup = <Warmup>event.owner
    front_leave()
    warmup.finish()
    return 0


cdef class Warmup:
    # The warm-up of a lane that is not served yet.
    cdef Outcome outcome
    cdef object done

    cdef void finish(self) noexcept:
        cdef object done = self.done
        text = ""
        if self.outcome.status:
            text = text_or_no_memory(self.outcome.details).decode("utf-8", "replace")
            free(self.outcome.details)
        Py_DECREF(self)  # the reference from warm_up()
        done(text)


cdef ModelAsk *model_missed(void *context, void *waiter, refuse_fn refuse, Str name, bint by_model,
                            const char *asked_by) noexcept nogil:
    cdef Door *door = <Door *>context
    cdef ModelAsk *ask = model_ask_new(waiter, refuse, name, by_model, asked_by)
    if ask != NULL:
        ask.event.run = ask_to_load
        ask.event.owner = door.service
        python_post(&door.submission.bridge.timers.python, &ask.event)
    return ask


cdef int ask_to_load(PythonEvent *event) except -1:
    cdef ModelAsk *ask = <ModelAsk *>event
    cdef InferService service = <InferService>event.owner
    cdef str refusal = ""
    cdef bytes reason
    cdef int status = STATUS_OK
    try:
        waits = ask.waiter != NULL
        model = ask.model.decode("utf-8", "replace")
        asked_by = ask.asked_by.decode() if ask.asked_by != NULL else ""
        by_model = bool(ask.by_model)
    finally:
        front_leave()
    try:
        refusal = service.load(model, by_model, asked_by) if waits else ""
    except MemoryError:  # a request whose model nobody loads would wait for ever
        status = STATUS_RESOURCE_EXHAUSTED
    reason = refusal.encode("utf-8", "replace")
    if reason:
        status = STATUS_UNAVAILABLE
    front_enter()
    model_ask_answer(ask, status, format_text("%s", <const char *>reason) if reason else NULL)
    submission_wake(&service.submission)
    service.leave()
    return 0


cdef class InferService:
    """Takes requests, and delivers their responses, on one event loop.

    `on_stream_over`, when set, is called with the number of each native stream that is over; its sequences end then.

    Args:
        table: the models.
        bridge: the way back to the front; the owner registers its descriptors.
        max_inflight: requests that may be in flight; further ones are refused. None: any number.
    """

    cdef Submission submission
    cdef Door door
    cdef ExchangeDoor exchanges
    cdef ModelTable table
    cdef BridgeHandle bridge
    cdef Authorizer authorizer
    cdef Regions regions
    cdef Forwarder forwarder
    cdef StoreBase store
    cdef RecorderHandle recorder
    cdef object load
    cdef bytes stopping
    cdef public object on_stream_over

    def __init__(self, ModelTable table not None, BridgeHandle bridge not None, *, max_inflight: int | None = None):
        self.table = table
        self.bridge = bridge
        self.submission.table = &table.table
        self.submission.bridge = &bridge.bridge
        self.submission.max_inflight = UINT32_MAX if max_inflight is None else max_inflight
        self.submission.denied = note_denied
        self.submission.coalescer.push = push_work
        self.submission.coalescer.push_context = &self.submission
        self.door.submission = &self.submission
        self.door.unary.context = &self.door
        self.door.unary.run = infer_unary
        self.door.unary.abandon = abandon
        self.door.unary.place = place_message
        self.exchanges.submission = &self.submission
        self.exchanges.window = STREAM_WINDOW
        self.exchanges.report = &self.door.report
        self.exchanges.over = stream_over
        self.exchanges.over_context = <void *>&self.door
        self.door.service = <void *>self
        bridge.bridge.after = submission_wake
        bridge.bridge.after_context = &self.submission

    def __dealloc__(self):
        front_enter()
        coalescer_clear(&self.submission.coalescer)
        front_leave()

    cdef void leave(self) noexcept:
        # leave the front after an operation that may have made output
        if self.bridge.io is not None:
            io_wake(&self.bridge.io.io)
        front_leave()

    def deliver_on(self, IoThreads io) -> None:
        """Let an I/O thread that does not run deliver responses; None: the event loop delivers again."""
        self.bridge.deliver_on(io)

    def keep_responses(self, size: int, *, ttl: float = 0.0, entry: int = 0, compare: bool = False) -> None:
        """Keep responses in a cache of at most `size` bytes, each for `ttl` seconds (0: for any time).

        A response that takes more than `entry` bytes (0: a quarter of the cache) is not kept. With `compare` the cache
        keeps large inputs and compares them byte by byte; else it compares their digests.
        """
        cdef size_t limit = size
        cdef size_t largest = min(size, entry) if entry else size // 4
        cdef int64_t ttl_ns = <int64_t>(ttl * 1e9)
        front_enter()
        self.submission.coalescer.limit = limit
        self.submission.coalescer.largest = largest
        self.submission.coalescer.compares = compare
        self.submission.coalescer.ttl_ns = ttl_ns
        front_leave()

    def keep_responses_in(self, StoreBase store not None) -> None:
        """Keep responses in this store instead."""
        self.store = store
        store_install(store, &self.submission)

    def forget(self, LaneHandle lane not None) -> None:
        """Discard the cached responses of a version that ends. Call this before its handle is freed."""
        front_enter()
        submission_wake(&self.submission)  # so that the submission refers to no lane
        coalescer_forget(&self.submission.coalescer, lane.lane)
        while coalescer_drop(&self.submission.coalescer, lane.lane, DROPPED):
            front_leave()
            front_enter()
        self.leave()

    def reuse(self) -> dict[str, int]:
        """Figures of coalescing and of the response cache.

        `followers` are requests that got the response to an identical one in flight. `hits`, `misses` and `evictions`
        count; `entries` and `bytes` are in the cache now.
        """
        cdef Coalescer coalescer
        front_enter()
        coalescer = self.submission.coalescer
        front_leave()
        return {"followers": coalescer.followers, "hits": coalescer.hits, "misses": coalescer.misses,
                "evictions": coalescer.evictions, "entries": coalescer.entries, "bytes": coalescer.size}

    @property
    def admitted_count(self) -> int:
        """Requests that were admitted and have not ended."""
        return self.bridge.admitted_count

    @property
    def timers(self) -> TimersHandle:
        """The timers of the front. The owner of the bridge fires them when it drains the bridge."""
        return self.bridge.timers

    @property
    def stream_window(self) -> int:
        """Requests of one native stream that may be read and not yet answered."""
        return self.exchanges.window

    @stream_window.setter
    def stream_window(self, requests: int) -> None:
        self.exchanges.window = requests

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of the messages that native ModelInfer and ModelStreamInfer have received and sent."""
        cdef uint64_t received, sent
        front_enter()
        received = self.door.received + self.exchanges.received
        sent = self.door.sent + self.exchanges.sent
        front_leave()
        return received, sent

    @property
    def entrance(self) -> object:
        """A capsule "inferd.submission" around the Submission, for makers of requests; valid as long as this object."""
        return PyCapsule_New(&self.submission, "inferd.submission", NULL)

    def guard(self, Authorizer authorizer not None) -> None:
        """Let this authorizer decide which callers may use which models."""
        self.authorizer = authorizer
        self.submission.access = &authorizer.access

    def set_callers_apart(self, *, sequences: bool, responses: bool) -> None:
        """Set what known callers (by a token, a certificate, or as a user) do not share.

        Args:
            sequences: each caller has its own sequence ids, which is the default.
            responses: no caller gets the response to a request of another one, from the cache or by coalescing.
        """
        self.submission.sequences_shared = not sequences
        self.submission.responses_apart = responses

    def forward(self, Forwarder forwarder not None) -> None:
        """Accept parameters whose names this forwarder claims from headers only, not from messages."""
        self.forwarder = forwarder
        self.submission.is_header = forwarder_claims
        self.submission.is_header_context = <void *>forwarder

    def use_regions(self, Regions regions not None, *, shared: bool, max_copied: int) -> None:
        """Let requests refer to regions of shared memory.

        Args:
            regions: the registered regions.
            shared: every caller may use the regions of the scope SHARED; otherwise a known user may use its own.
            max_copied: the most bytes of one input that are copied out of a region.
        """
        self.regions = regions
        self.submission.regions.registry = regions.registry
        self.submission.regions.shared = shared
        self.submission.regions.max_copied = max_copied

    def set_load_report(self, encoded: bytes) -> None:
        """Send this OrcaLoadReport with every native response from now on; none if it is empty."""
        cdef bint fits
        front_enter()
        fits = report_set(&self.door.report, encoded)
        front_leave()
        if not fits:
            raise ValueError(f"the load report of {len(encoded)} bytes is too long for a header")

    def warm_up(self, LaneHandle lane not None, dict tensors not None, uint32_t count, done) -> None:
        """Execute `count` requests of a version that is not served yet; requests that its scheduler makes count, too.

        Args:
            tensors: of each request: shape and bytes by name.
            done: called on the event loop with the text of the first error; it is empty if there was none.

        Raises:
            ValueError: the tensors do not fit the model.
        """
        cdef Warmup warmup = Warmup.__new__(Warmup)
        cdef Request *request
        cdef Request *following
        memset(&warmup.outcome, 0, sizeof(Outcome))
        warmup.done = done
        warmup.outcome.over = warmup_over
        warmup.outcome.bridge = &self.bridge.bridge
        warmup.outcome.event.run = tell_warmup_over
        warmup.outcome.event.owner = <void *>warmup
        request = warmup_requests(lane.lane, tensors, count, &self.bridge.bridge, &warmup.outcome)
        Py_INCREF(warmup)
        front_enter()
        while request != NULL:
            following = request.next
            submit_request(&self.submission, request)
            request = following
        submission_wake(&self.submission)
        front_leave()

    def record(self, RecorderHandle recorder not None) -> None:
        """Record single requests, when the recorder is switched on."""
        self.recorder = recorder
        self.submission.recorder = &recorder.recorder

    def load_on_demand(self, load) -> None:
        """Let requests for models that are not loaded wait until `resume`.

        Args:
            load: called on the event loop for each such request, soon after its submission, with the name of the model,
                whether another model made the request, and the model whose load waits for the response (empty: no load
                does). It returns an error text, with which the request is refused; empty: the request waits.
        """
        self.load = load
        self.submission.missed = model_missed
        self.submission.missed_context = &self.door

    def resume(self, name: str | None, status: int = 0, text: str = "") -> None:
        """Submit the requests that wait for this model (None: for any) again, or refuse them with this status and text.

        A request whose model is still not loaded is refused, as without `load_on_demand`. Steps of ensembles that wait
        for the model go on, or fail.
        """
        cdef bytes encoded = b"" if name is None else name.encode()
        cdef bytes details = text.encode()
        cdef Str model = Str(encoded, <uint32_t>len(encoded))
        cdef int refused = status
        cdef bint one = name is not None
        front_enter()
        submission_resume(&self.submission, &model if one else NULL, refused, details)
        submission_wake(&self.submission)
        self.leave()

    def awaits(self, name: str) -> bool:
        """Whether a request, or a step of an ensemble, waits for this model."""
        cdef bytes encoded = name.encode()
        cdef bint awaited
        front_enter()
        awaited = submission_awaits(&self.submission, Str(encoded, <uint32_t>len(encoded)))
        front_leave()
        return awaited

    def install(self, Endpoint endpoint not None) -> None:
        """Serve ModelInfer and ModelStreamInfer natively on an endpoint, which must not outlive this object."""
        endpoint.add_native(UNARY_PATH.encode(), &UNARY, &self.door.unary)
        endpoint.add_native(STREAM_PATH.encode(), &EXCHANGE, &self.exchanges)
        endpoint.host.after_read = submission_after_read
        endpoint.host.end_round = submission_wake
        endpoint.host.round_context = &self.submission
        endpoint.host.traced = True

    def drain(self, text: str) -> None:
        """The server stops: native streams end when the requests that have come are answered.

        Args:
            text: the error text for streams whose clients have not half-closed.
        """
        self.stopping = text.encode()
        front_enter()
        exchanges_drain(&self.exchanges, self.stopping)
        self.leave()

    def submit(self, message: bytes, deliver, CallOrigin call=UNKNOWN, *, timeout_ns: int = -1) -> Ticket:
        """Decode, check and queue one encoded ModelInferRequest.

        Args:
            message: its bytes.
            deliver: called on the event loop, never from inside this method, as deliver(status, details, response): a
                gRPC status code, the error text, and the encoded ModelInferResponse (None after an error). Once, except
                in a stream for decoupled models: its last response is delivered when the ticket is `done`, and is None
                if it only ends the request.
            call: where it comes from. In a stream `deliver` gets encoded ModelStreamInferResponses, also for errors.
            timeout_ns: the client's deadline from now; negative for none.
        """
        cdef int64_t left = timeout_ns  # here, because a conversion may raise, and must not in the front
        cdef size_t size = len(message)
        cdef bytes whole = message + call.forwarded if call.forwarded else message
        cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(whole)
        cdef Block *block = block_of_object(whole, data, len(whole))
        cdef Request *request = request_new() if block != NULL else NULL
        cdef Ticket ticket
        if request == NULL:
            block_give(block)
            raise MemoryError("no memory for the request")
        try:
            ticket = ticket_new(request, deliver, call)
        except MemoryError:
            request_free(request)
            block_give(block)
            raise
        front_enter()
        submit_call(&self.submission, request, block, data, size, len(call.forwarded), left, call.caller,
                    &call.context)
        if request.record != NULL and call.address != NULL:
            (<Record *>request.record).peer = block_share(call.address)
        submission_wake(&self.submission)
        self.leave()
        return ticket
