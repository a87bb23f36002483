"""Requests of the backend to other models, and its questions to the server. A part of _host.pyx."""

# ----------------------------------------------------------------------------------------------------------------------
# Requests

cdef object input_of(CallInput *given):
    # An input for the worker. Its data is not copied, unless it lies in several pieces.
    cdef Tensor *tensor = given.tensor
    cdef Piece *piece
    cdef uint32_t at
    pieces = []
    for at in range(given.piece_count):
        piece = &given.pieces[at]
        if piece.size:
            pieces.append(PyMemoryView_FromMemory(<char *>piece.base, <Py_ssize_t>piece.size, PyBUF_READ))
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    shape = tuple([tensor.shape[axis] for axis in range(tensor.rank)])
    return received(text_of(tensor.name), tensor.datatype, shape, data, 0, len(data))


cdef object message_of(TRITONSERVER_InferenceRequest *request):
    cdef CallInput *given = request.inputs
    cdef Name *output = request.outputs
    inputs = []
    outputs = []
    while given != NULL:
        inputs.append(input_of(given))
        given = given.next
    while output != NULL:
        outputs.append(text_of(output.text))
        output = output.next
    correlation = request.correlation_id if request.correlation_text == NULL else text_of(request.correlation_text)
    return pb_utils.InferenceRequest(
        request_id=text_of(request.id),
        correlation_id=correlation,
        inputs=inputs,
        requested_output_names=outputs,
        model_name=text_of(request.model),
        model_version=request.version,
        flags=request.flags,
        timeout=request.timeout,
        priority=request.priority,
        parameters=parameters_of(request.parameters),
    )


class Outgoing(Call):
    """A request of the backend that waits for responses, which go to the backend's callbacks.

    Args:
        model: the name of the model that executes the request.
        request: the address of the backend's request.
    """

    __slots__ = ("_request",)

    def __init__(self, model, request):
        super().__init__(model, True)
        self._request = request

    def deliver(self, response, final):
        """See Call. The backend's functions run on this thread, without the GIL."""
        self.final = final
        respond(<TRITONSERVER_InferenceRequest *><uintptr_t>self._request, self, response, final)


cdef int start(TRITONSERVER_InferenceRequest *request) except -1:
    runtime = current()
    if not runtime.initialized or runtime.finalizing:
        raise pb_utils.TritonModelException(
            "requests to other models are served when the instance has been initialized, until it is finalized"
        )
    message = message_of(request)
    call = Outgoing(message.model_name(), <uintptr_t>request)
    runtime.channel.expect()
    Py_INCREF(call)
    request.call = <void *>call
    try:
        runtime.channel.call(message, call, PARENT.get())
    except Exception:
        end(request)
        raise
    return 0


cdef void end(TRITONSERVER_InferenceRequest *request) noexcept:
    # The request waits for no more responses.
    cdef void *call = request.call
    request.call = NULL
    if call != NULL:
        Py_DECREF(<object>call)


# ----------------------------------------------------------------------------------------------------------------------
# Responses

cdef enum:
    MOST_OUTPUT_DIMENSIONS = 16  # as in the server


cdef int add_output(TRITONSERVER_InferenceResponse *made, tensor) except -1:
    cdef int64_t shape[MOST_OUTPUT_DIMENSIONS]
    cdef uint32_t rank = 0
    cdef Py_buffer view
    cdef TRITONSERVER_Error *failed
    encoded = tensor.name().encode()
    cdef const char *name = encoded
    cdef TRITONSERVER_DataType datatype = tensor.triton_dtype()
    dims = tensor.shape()
    if len(dims) > MOST_OUTPUT_DIMENSIONS:
        raise pb_utils.TritonModelException(f"output '{tensor.name()}' has too many dimensions: {len(dims)}")
    for dim in dims:
        shape[rank] = dim
        rank += 1
    PyObject_GetBuffer(wire_bytes(tensor), &view, PyBUF_SIMPLE)
    with nogil:
        failed = inferd_add_output(made, name, datatype, shape, rank, view.buf, <size_t>view.len)
    PyBuffer_Release(&view)
    return check(failed)


cdef int add_parameter(TRITONSERVER_InferenceResponse *made, str name, value) except -1:
    cdef c_bool flag
    cdef int64_t integer
    cdef double number
    encoded = name.encode()
    if isinstance(value, bool):
        flag = value
        return check(inferd_add_parameter(made, encoded, TRITONSERVER_PARAMETER_BOOL, &flag))
    if isinstance(value, int) and value < 1 << 63:
        integer = value
        return check(inferd_add_parameter(made, encoded, TRITONSERVER_PARAMETER_INT, &integer))
    if isinstance(value, float):
        number = value
        return check(inferd_add_parameter(made, encoded, TRITONSERVER_PARAMETER_DOUBLE, &number))
    text = str(value).encode("utf-8", "replace")
    return check(inferd_add_parameter(made, encoded, TRITONSERVER_PARAMETER_STRING, <const char *>text))


cdef int fill(TRITONSERVER_InferenceResponse *made, response) except -1:
    cdef TRITONSERVER_Error *failed
    error = response.error()
    if error is not None:
        made.error = TRITONSERVER_ErrorNew(error.code(), error.message().encode("utf-8", "replace"))
        return 0
    with nogil:
        failed = inferd_start_response(made)
    check(failed)
    for tensor in response.output_tensors():
        add_output(made, tensor)
    for name, value in (response._parameters or {}).items():
        add_parameter(made, name, value)
    return 0


cdef TRITONSERVER_InferenceResponse *response_of(TRITONSERVER_InferenceRequest *request, response) noexcept:
    cdef TRITONSERVER_InferenceResponse *made = inferd_new_response(request)
    try:
        fill(made, response)
    except Exception as wrong:
        made.error = refusal(wrong)
    return made


cdef int respond(TRITONSERVER_InferenceRequest *request, call, response, bint final) except -1:
    cdef TRITONSERVER_InferenceResponse *made = NULL
    cdef uint32_t flags = TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
    # A decoupled model may end without a response: then the backend gets the final flag only.
    if not final or response.has_error() or response.output_tensors() or response._parameters:
        made = response_of(request, response)
    with nogil:
        request.respond(made, flags, request.respond_data)
    if final:
        end(request)
        with nogil:
            request.release(request, TRITONSERVER_REQUEST_RELEASE_ALL, request.release_data)
    else:
        current().channel.consumed(call)
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# Functions that the C sources call

cdef TRITONSERVER_Error *host_call(TRITONSERVER_InferenceRequest *request) noexcept with gil:
    try:
        start(request)
    except Exception as wrong:
        return refusal(wrong)
    return NULL


cdef void host_cancel(TRITONSERVER_InferenceRequest *request) noexcept with gil:
    if request.call == NULL:
        return
    call = <object>request.call
    try:
        if not call.final:
            current().channel.cancel(call)
    except Exception:  # the server has ended
        pass


cdef str version_of(int64_t version):
    return str(version) if version >= 0 else ""


cdef TRITONSERVER_Error *host_is_ready(const char *model, int64_t version, c_bool *ready) noexcept with gil:
    try:
        ready[0] = pb_utils.is_model_ready(text_of(model), version_of(version))
    except Exception as wrong:
        return refusal(wrong)
    return NULL


cdef TRITONSERVER_Error *host_is_decoupled(const char *model, int64_t version, c_bool *decoupled) noexcept with gil:
    try:
        question = {"name": text_of(model), "version": version_of(version)}
        decoupled[0] = bool(current().channel.ask("is_decoupled", question))
    except Exception as wrong:
        return refusal(wrong)
    return NULL


cdef TRITONSERVER_Error *host_load_model(
    const char *model, const TRITONSERVER_Parameter **parameters, uint64_t count
) noexcept with gil:
    config = ""
    files = {}
    try:
        for at in range(count):
            name = text_of(parameters[at].name)
            if parameters[at].text == NULL:
                raise pb_utils.TritonModelException(f"parameter '{name}' of a load is neither a text nor bytes")
            content = (<const char *>parameters[at].text)[:parameters[at].size]
            if name == "config":
                config = content.decode()
            else:
                files[name] = content
        pb_utils.load_model(text_of(model), config, files or None)
    except Exception as wrong:
        return refusal(wrong)
    return NULL


cdef TRITONSERVER_Error *host_unload_model(const char *model, c_bool dependents) noexcept with gil:
    try:
        pb_utils.unload_model(text_of(model), dependents)
    except Exception as wrong:
        return refusal(wrong)
    return NULL


inferd_host.call = host_call
inferd_host.cancel = host_cancel
inferd_host.is_ready = host_is_ready
inferd_host.is_decoupled = host_is_decoupled
inferd_host.load_model = host_load_model
inferd_host.unload_model = host_unload_model
