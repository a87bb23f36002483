"""A request on its way through the backend, and its responses. A part of _host.pyx."""

cdef enum:
    MOST_SEQUENCES = 1024  # for which an instance keeps memory of states; more get new memory with each request
    SEQUENCE_END = 2


cdef class SharedState:
    """The memory of a state of one sequence, where the state's input and output have the same memory."""

    cdef Shared c
    cdef bint busy  # a request has it

    def __dealloc__(self):
        free(self.c.base)
        free(self.c.before)


cdef class ModelTraits:
    """The parts of a model's configuration that its requests depend on, for Python and for the C sources.

    Args:
        model: the model's name.
        states: for each state of its sequences the names of input and output, and whether they have the same memory.
        decoupled: whether a request may have any number of responses.
        iterative: whether a request may be rescheduled.
    """

    cdef readonly frozenset names
    cdef readonly dict shared  # by name of the input, the places of states whose input and output have the same memory
    cdef bint decoupled
    cdef bint iterative
    cdef const char **pointers
    cdef bytes _model
    cdef list _texts
    cdef dict _sequences  # by id, the SharedStates of a sequence by place; the sequence used last is last

    def __cinit__(self, str model, states, bint decoupled, bint iterative):
        states = list(states)
        self.names = frozenset(output for _, output, _ in states)
        self.shared = {given: at for at, (given, _, same) in enumerate(states) if same}
        self.decoupled = decoupled
        self.iterative = iterative
        self._model = model.encode()
        self._texts = [output.encode() for _, output, _ in states]
        self._sequences = {}
        self.pointers = <const char **>calloc(len(self._texts) + 1, sizeof(char *))
        if self.pointers == NULL:
            raise MemoryError
        for at, text in enumerate(self._texts):
            self.pointers[at] = <const char *>(<bytes>text)

    cdef SharedState state_of(self, sequence, int place):
        # The memory of a sequence's state, for one request. Sequences of several clients may have the same id.
        cdef SharedState found
        of_sequence = self._sequences.pop(sequence, {})
        self._sequences[sequence] = of_sequence
        found = of_sequence.get(place)
        if found is None or found.busy:
            found = of_sequence[place] = SharedState()
        found.busy = True
        if len(self._sequences) > MOST_SEQUENCES:
            del self._sequences[next(iter(self._sequences))]
        return found

    cdef void forget(self, sequence) noexcept:
        self._sequences.pop(sequence, None)

    def __dealloc__(self):
        free(self.pointers)


cdef class Exchange:
    """A request as the backend knows it, and the state of its response.

    The backend holds one reference while it has the request, a response factory or a response.
    """

    cdef TRITONBACKEND_Request c
    cdef object request
    cdef object sender
    cdef object ready  # the response that the backend sent during its execution
    cdef list kept  # objects that the structures for the backend point to
    cdef ModelTraits model
    cdef OutputGrant grant
    cdef list states  # SharedStates that this request has, of its sequence
    cdef object sequence
    cdef Py_buffer *views
    cdef Py_ssize_t view_count
    cdef bint decoupled
    cdef bint executing
    cdef bint released
    cdef bint answered  # its final response has been sent
    cdef bint rescheduled
    cdef str wrong  # the error for the client, if the backend released the request wrongly

    def __cinit__(self, request, ModelTraits model, OutputGrant grant):
        self.request = request
        self.grant = grant
        self.c.grant = &grant.c
        self.decoupled = model.decoupled
        self.sender = request.get_response_sender() if model.decoupled else None
        self.executing = True
        self.kept = []
        self.model = model
        self.states = []
        self.sequence = request.correlation_id()
        self.c.model = <const char *>model._model
        self.c.state_names = model.pointers
        self.c.shared = <Shared **>calloc(len(model._texts) + 1, sizeof(Shared *))
        if self.c.shared == NULL:
            raise MemoryError
        self.c.reschedulable = model.iterative
        self._describe(model.names)
        self._take_inputs()
        self._take_parameters()

    def __dealloc__(self):
        cdef SharedState state
        for state in self.states or ():
            state.busy = False
        self._free_inputs()
        free(self.c.shared)
        free(self.c.outputs)
        free(self.c.parameters)
        inferd_free_tensors(self.c.states)

    cdef const char *_text(self, str text) except NULL:
        encoded = text.encode("utf-8", "replace")
        self.kept.append(encoded)
        return <const char *>encoded

    cdef int _describe(self, states) except -1:
        request = self.request
        self.c.id = self._text(request.request_id())
        if isinstance(self.sequence, str):
            self.c.correlation_text = self._text(self.sequence)
        else:
            self.c.correlation_id = self.sequence
        self.c.timeout = request.timeout()
        self.c.flags = request.flags()
        names = [name for name in request.requested_output_names() if name not in states]
        self.c.outputs = <const char **>calloc(len(names) + 1, sizeof(char *))
        if self.c.outputs == NULL:
            raise MemoryError
        for name in names:
            self.c.outputs[self.c.output_count] = self._text(name)
            self.c.output_count += 1
        return 0

    cdef int _take_inputs(self) except -1:
        inputs = self.request.inputs()
        self.c.inputs = <TRITONBACKEND_Input *>calloc(len(inputs) + 1, sizeof(TRITONBACKEND_Input))
        self.views = <Py_buffer *>calloc(len(inputs) + 1, sizeof(Py_buffer))
        if self.c.inputs == NULL or self.views == NULL:
            raise MemoryError
        cdef Tensor *tensor
        for each in inputs:
            PyObject_GetBuffer(wire_bytes(each), &self.views[self.view_count], PyBUF_SIMPLE)
            tensor = &self.c.inputs[self.view_count].tensor
            tensor.base = self.views[self.view_count].buf
            tensor.attributes.byte_size = self.views[self.view_count].len
            self.view_count += 1
            tensor.name = self._text(each.name())
            tensor.datatype = each.triton_dtype()
            for dim in each.shape():
                if tensor.rank == <uint32_t>MOST_DIMENSIONS:
                    raise pb_utils.TritonModelException(f"input '{each.name()}' has too many dimensions")
                tensor.shape[tensor.rank] = dim
                tensor.rank += 1
            if tensor.name and each.name() in self.model.shared:
                self._share(tensor, self.model.shared[each.name()])
        self.c.input_count = <uint32_t>len(inputs)
        return 0

    cdef int _share(self, Tensor *tensor, int place) except -1:
        # The state has the memory that it had in the last request of the sequence.
        cdef SharedState state = self.model.state_of(self.sequence, place)
        cdef size_t size = tensor.attributes.byte_size
        self.states.append(state)
        free(state.c.before)
        state.c.before = NULL
        if not inferd_resize(&state.c, size):
            raise MemoryError
        memcpy(state.c.base, tensor.base, size)
        tensor.base = state.c.base
        self.c.shared[place] = &state.c
        return 0

    cdef int _take_parameters(self) except -1:
        given = self.request._parameters
        if not given:
            return 0
        self.c.parameters = <TRITONSERVER_Parameter *>calloc(len(given), sizeof(TRITONSERVER_Parameter))
        if self.c.parameters == NULL:
            raise MemoryError
        cdef TRITONSERVER_Parameter *parameter
        for name, value in given.items():
            parameter = &self.c.parameters[self.c.parameter_count]
            parameter.name = <char *>self._text(name)
            if isinstance(value, bool):
                parameter.type = TRITONSERVER_PARAMETER_BOOL
                parameter.flag = value
            elif isinstance(value, int) and value < 1 << 63:
                parameter.type = TRITONSERVER_PARAMETER_INT
                parameter.integer = value
            elif isinstance(value, float):
                parameter.type = TRITONSERVER_PARAMETER_DOUBLE
                parameter.number = value
            else:
                parameter.type = TRITONSERVER_PARAMETER_STRING
                parameter.text = <void *>self._text(str(value))
            self.c.parameter_count += 1
        return 0

    cdef void _free_inputs(self) noexcept:
        while self.view_count:
            self.view_count -= 1
            PyBuffer_Release(&self.views[self.view_count])
        free(self.views)
        self.views = NULL
        free(self.c.inputs)
        self.c.inputs = NULL
        self.c.input_count = 0

    cdef void release(self, uint32_t flags) noexcept:
        # The backend no longer uses the inputs; their memory belongs to the server again.
        self.released = True
        self._free_inputs()
        self._part()
        self.request._inputs = ()
        if flags != TRITONSERVER_REQUEST_RELEASE_RESCHEDULE or self.answered:
            return
        if self.executing:
            self.request.set_release_flags(flags)
            self.rescheduled = True
        else:
            self.wrong = "the backend rescheduled the request after its execution, expected before that returns"

    cdef void _part(self) noexcept:
        # If this request no longer needs the memory of states, another request of the sequence may have it.
        cdef SharedState state
        if not self.states or self.executing or not self.released or not (self.answered or self.rescheduled):
            return
        for state in self.states:
            state.busy = False
        if self.c.flags & SEQUENCE_END:
            self.model.forget(self.sequence)

    cdef object _response(self, TRITONBACKEND_Response *response, TRITONSERVER_Error *error):
        if error != NULL:
            return pb_utils.InferenceResponse(error=error_of(error))
        outputs = []
        cdef Tensor *tensor = response.outputs
        while tensor != NULL:
            outputs.append(output_of(tensor, self.grant))
            tensor = tensor.next
        return pb_utils.InferenceResponse(outputs, parameters=parameters_of(response.parameters))

    cdef list _updated(self):
        # The states that the backend has updated since the last response left, in the order in which it made them.
        found = []
        cdef Tensor *tensor = self.c.states
        while tensor != NULL:
            if tensor.updated:
                tensor.updated = False
                found.append(output_of(tensor, self.grant))
            tensor = tensor.next
        found.reverse()
        return found

    cdef object _with_states(self, response):
        # The response as it leaves: with the updated states, or an error if one of them is not valid.
        if response.has_error():
            return response
        try:
            response.output_tensors().extend(self._updated())
        except pb_utils.TritonModelException as wrong:
            return failure(str(wrong))
        return response

    cdef int send(self, TRITONBACKEND_Response *response, uint32_t flags, TRITONSERVER_Error *error) except -1:
        cdef bint final = flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response == NULL:
            if final and not self.answered and not self.rescheduled:
                self.end("the backend ended the request without a response")
            return 0
        if self.answered:
            raise pb_utils.TritonModelException("the request has had its final response")
        # The response of this round may follow the release; that of the next round has an exchange of its own.
        if self.rescheduled and (final or not self.decoupled or not self.executing):
            raise pb_utils.TritonModelException("the request has been rescheduled")
        # Set this before anything that lets other threads run: they may send, too.
        self.answered = final or not self.decoupled
        if self._send_written(response, final, error):
            return 0
        try:
            made = self._response(response, error)
        except pb_utils.TritonModelException as wrong:
            made = failure(str(wrong))
        self._answer(made, final)
        return 0

    cdef bint _send_written(self, TRITONBACKEND_Response *response, bint final, TRITONSERVER_Error *error) except -1:
        # The short way for responses of decoupled models, of which there may be many. False: the other way is needed.
        if not self.decoupled or error != NULL or response.parameters != NULL or self.c.states != NULL:
            return False
        record = written(response.outputs, self.sender._runtime.channel, self.sender._wanted)
        if record is None:
            return False
        self.c.sent = final
        self.sender.send_written(record, final)
        self._part()
        return True

    cdef int _answer(self, response, bint final) except -1:
        cdef bint last = final or not self.decoupled
        self.answered = self.answered or last
        if self.executing and not self.decoupled:
            self.ready = response  # execute() returns it with those of the other requests
            return 0
        if self.sender is None:
            self.sender = self.request.get_response_sender()
        response = self._with_states(response)
        self.c.sent = last
        self.sender.send(response, 1 if last else 0)
        self._part()
        return 0

    cdef int end(self, str why) except -1:
        # No more responses will come. A decoupled model may end so; for another model this is an error.
        if not self.decoupled:
            return self._answer(failure(why), True)
        self.answered = True
        self.sender.send(None, 1)
        self._part()
        return 0

    cdef int abandon(self) except -1:
        # The backend has released the request, and every factory and response of it.
        if not self.answered and not self.rescheduled:
            self._answer(failure(self.wrong or "the backend released the request without a final response"), True)
        return 0

    cdef object executed(self, failed):
        # The response that goes back with the batch; None if a sender sends it later, or the request is rescheduled.
        if failed is not None and not self.released:  # the backend failed, and left the request to the server
            if not self.answered:
                self._answer(pb_utils.InferenceResponse(error=failed), True)
            self.c.released = True
            self.release(0)
            inferd_drop(&self.c)
        # A sender tells the worker that the response comes later. It is made before `executing` is reset: until then a
        # response of another thread goes to `ready`, so a request never gets two responses.
        if self.ready is None and not self.rescheduled and self.sender is None:
            self.sender = self.request.get_response_sender()
        self.executing = False
        if self.rescheduled:
            self._go_round()
        if self.ready is None:
            self._part()
            return None
        self.c.sent = True
        response = self._with_states(self.ready)
        self._part()
        return response

    cdef int _go_round(self) except -1:
        # The server sends the request again, with the present states.
        try:
            self.request._states = self._updated()
        except pb_utils.TritonModelException as wrong:
            self.rescheduled = False
            self.request.set_release_flags(TRITONSERVER_REQUEST_RELEASE_ALL)
            self._answer(failure(str(wrong)), True)
        return 0
