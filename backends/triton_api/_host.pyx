"""The host of a backend that was compiled for Triton: loads its library, gives it requests and takes its responses.

Runs in a worker process. The extension that this is a part of exports the functions of Triton's API and is loaded under
the name of Triton's library, before the backend's: see `backends.triton_api.backend`.
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from backends.triton_api.objects cimport (
    c_bool,
    CallInput,
    inferd_add_answered,
    inferd_add_parameter,
    inferd_drop,
    inferd_free_tensors,
    inferd_host,
    inferd_message,
    inferd_new_answer,
    inferd_start_answer,
    MOST_DIMENSIONS,
    Name,
    Piece,
    Tensor,
    TRITONBACKEND_Backend,
    TRITONBACKEND_Input,
    TRITONBACKEND_Model,
    TRITONBACKEND_ModelInstance,
    TRITONBACKEND_Request,
    TRITONBACKEND_Response,
    TRITONSERVER_DataType,
    TRITONSERVER_DataTypeByteSize,
    TRITONSERVER_Error,
    TRITONSERVER_ERROR_INTERNAL,
    TRITONSERVER_ERROR_INVALID_ARG,
    TRITONSERVER_ERROR_UNAVAILABLE,
    TRITONSERVER_ErrorDelete,
    TRITONSERVER_ErrorNew,
    TRITONSERVER_InferenceRequest,
    TRITONSERVER_InferenceResponse,
    TRITONSERVER_LOG_VERBOSE,
    TRITONSERVER_LogLevel,
    TRITONSERVER_Message,
    TRITONSERVER_Metric,
    TRITONSERVER_MetricArgs,
    TRITONSERVER_MetricFamily,
    TRITONSERVER_MetricKind,
    TRITONSERVER_Parameter,
    TRITONSERVER_PARAMETER_BOOL,
    TRITONSERVER_PARAMETER_DOUBLE,
    TRITONSERVER_PARAMETER_INT,
    TRITONSERVER_PARAMETER_STRING,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    TRITONSERVER_TYPE_BYTES,
)

import atexit
from threading import Lock

import triton_python_backend_utils as pb_utils
from inferd_worker.channel import Call
from inferd_worker.runtime import PARENT, current
from inferd_worker.tensor import received, wire_bytes

cdef extern from "<dlfcn.h>" nogil:
    int RTLD_NOW, RTLD_LOCAL
    void *dlopen(const char *path, int flags)
    void *dlsym(void *library, const char *name)
    char *dlerror()


ctypedef TRITONSERVER_Error *(*handle_fn)(void *) noexcept nogil
ctypedef TRITONSERVER_Error *(*execute_fn)(
    TRITONBACKEND_ModelInstance *, TRITONBACKEND_Request **, uint32_t) noexcept nogil

cdef dict KINDS = {"AUTO": 0, "CPU": 1, "GPU": 2, "MODEL": 3}
cdef bint verbose = False

# ----------------------------------------------------------------------------------------------------------------------
# Errors

cdef str text_of(const char *text):
    return (<bytes>text).decode("utf-8", "backslashreplace")


cdef object taken(TRITONSERVER_Error *error):
    # A backend's error as a TritonError, freed.
    made = error_of(error)
    TRITONSERVER_ErrorDelete(error)
    return made


cdef object error_of(TRITONSERVER_Error *error):
    code = error.code if 0 <= error.code <= 7 else TRITONSERVER_ERROR_INTERNAL
    return pb_utils.TritonError(text_of(error.text), code)


cdef object failure(str text):
    # A response that is an error.
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))


cdef int check(TRITONSERVER_Error *error) except -1:
    if error != NULL:
        raise pb_utils.TritonModelException(taken(error).message())
    return 0


cdef TRITONSERVER_Error *refusal(error) noexcept:
    wrong = isinstance(error, pb_utils.TritonModelException)
    text = (str(error) if wrong else f"{type(error).__name__}: {error}").encode("utf-8", "replace")
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG if wrong else TRITONSERVER_ERROR_INTERNAL, text)


# ----------------------------------------------------------------------------------------------------------------------
# Outputs

cdef class Memory:
    """Memory that a backend has written an output to."""

    cdef void *_base
    cdef Py_ssize_t _size

    def __dealloc__(self):
        free(self._base)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self._base, self._size, 0, flags)


cdef object output_of(Tensor *tensor):
    # A tensor of the worker's on the memory of the backend's, which is taken.
    name = text_of(tensor.name)
    shape = tuple([tensor.shape[axis] for axis in range(tensor.rank)])
    cdef size_t size = tensor.attributes.byte_size if tensor.base != NULL else 0
    elements = 1
    for dim in shape:
        elements *= dim
    if tensor.datatype == TRITONSERVER_TYPE_BYTES:
        check_strings(name, <const unsigned char *>tensor.base, size, elements)
    elif size != elements * TRITONSERVER_DataTypeByteSize(tensor.datatype):
        raise pb_utils.TritonModelException(
            f"the backend gave output '{name}' {size} bytes, its shape {list(shape)} has "
            f"{elements * TRITONSERVER_DataTypeByteSize(tensor.datatype)}"
        )
    if size == 0:
        return received(name, tensor.datatype, shape, b"", 0, 0)
    cdef Memory memory = Memory()
    memory._base = tensor.base
    memory._size = size
    tensor.base = NULL
    return received(name, tensor.datatype, shape, memory, 0, size)


cdef int check_strings(str name, const unsigned char *at, size_t size, elements) except -1:
    # Each string has its length in four bytes before it, and all of them fill the tensor.
    cdef size_t found = 0
    cdef size_t left = size
    cdef uint32_t length
    while left >= 4:
        memcpy(&length, at + (size - left), 4)
        if length > left - 4:
            break
        left -= 4 + <size_t>length
        found += 1
    if left or found != elements:
        raise pb_utils.TritonModelException(
            f"the backend gave output '{name}' {size} bytes that are not the {elements} strings of its shape"
        )
    return 0


cdef dict parameters_of(TRITONSERVER_Parameter *parameter):
    found = {}
    while parameter != NULL:
        name = text_of(parameter.name)
        if parameter.type == TRITONSERVER_PARAMETER_INT:
            found[name] = parameter.integer
        elif parameter.type == TRITONSERVER_PARAMETER_BOOL:
            found[name] = bool(parameter.flag)
        elif parameter.type == TRITONSERVER_PARAMETER_DOUBLE:
            found[name] = parameter.number
        else:
            found[name] = text_of(<const char *>parameter.text)
        parameter = parameter.next
    return found or None


# ----------------------------------------------------------------------------------------------------------------------
# Requests

cdef class StateNames:
    """The outputs that are states of sequences, also for the sources in C."""

    cdef readonly frozenset names
    cdef const char **pointers
    cdef list _texts

    def __cinit__(self, names):
        self.names = frozenset(names)
        self._texts = [name.encode() for name in self.names]
        self.pointers = <const char **>calloc(len(self._texts) + 1, sizeof(char *))
        if self.pointers == NULL:
            raise MemoryError
        for at, text in enumerate(self._texts):
            self.pointers[at] = <const char *>(<bytes>text)

    def __dealloc__(self):
        free(self.pointers)


cdef class Exchange:
    """A request as the backend knows it, and what has become of it.

    The backend has one reference to it as long as it has the request, a factory or a response.
    """

    cdef TRITONBACKEND_Request c
    cdef object request
    cdef object sender
    cdef object ready  # the response, if it was sent while the backend executes
    cdef list kept  # what the structures for the backend point to
    cdef Py_buffer *views
    cdef Py_ssize_t view_count
    cdef bint decoupled
    cdef bint executing
    cdef bint released
    cdef bint answered  # for good
    cdef bint rescheduled
    cdef str wrong  # why the backend's release of it is an error to its client

    def __cinit__(self, request, bint decoupled, StateNames states):
        self.request = request
        self.decoupled = decoupled
        self.sender = request.get_response_sender() if decoupled else None
        self.executing = True
        self.kept = [states]
        self.c.state_names = states.pointers
        self._describe(states.names)
        self._take_inputs()
        self._take_parameters()

    def __dealloc__(self):
        self._free_inputs()
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
        sequence = request.correlation_id()
        if isinstance(sequence, str):
            self.c.correlation_text = self._text(sequence)
        else:
            self.c.correlation_id = sequence
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
        self.c.input_count = <uint32_t>len(inputs)
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
        # The backend has done with the inputs: their memory is the server's again.
        self.released = True
        self._free_inputs()
        self.request._inputs = ()
        if flags != TRITONSERVER_REQUEST_RELEASE_RESCHEDULE or self.answered:
            return
        if self.executing:
            self.request.set_release_flags(flags)
            self.rescheduled = True
        else:
            self.wrong = "the backend rescheduled the request after its execution, expected before that returns"

    cdef object _response(self, TRITONBACKEND_Response *response, TRITONSERVER_Error *error):
        if error != NULL:
            return pb_utils.InferenceResponse(error=error_of(error))
        outputs = []
        cdef Tensor *tensor = response.outputs
        while tensor != NULL:
            outputs.append(output_of(tensor))
            tensor = tensor.next
        return pb_utils.InferenceResponse(outputs, parameters=parameters_of(response.parameters))

    cdef list _updated(self):
        # The states that the backend has updated since any last left, in the order in which they were made.
        found = []
        cdef Tensor *tensor = self.c.states
        while tensor != NULL:
            if tensor.updated:
                tensor.updated = False
                found.append(output_of(tensor))
            tensor = tensor.next
        found.reverse()
        return found

    cdef object _with_states(self, response):
        # The response that leaves now: with the states, or an error for those that are none.
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
        if self.rescheduled:
            raise pb_utils.TritonModelException("the request has been rescheduled")
        # Before anything that lets other threads run: they may send, too.
        self.answered = final or not self.decoupled
        try:
            made = self._response(response, error)
        except pb_utils.TritonModelException as wrong:
            made = failure(str(wrong))
        self._answer(made, final)
        return 0

    cdef int _answer(self, response, bint final) except -1:
        cdef bint last = final or not self.decoupled
        self.answered = self.answered or last
        if self.executing and not self.decoupled:
            self.ready = response  # goes with those of the others
            return 0
        if self.sender is None:
            self.sender = self.request.get_response_sender()
        response = self._with_states(response)
        self.c.sent = last
        self.sender.send(response, 1 if last else 0)
        return 0

    cdef int end(self, str why) except -1:
        # No more responses will come: fine for a decoupled model, an error for another.
        if not self.decoupled:
            return self._answer(failure(why), True)
        self.answered = True
        self.sender.send(None, 1)
        return 0

    cdef int abandon(self) except -1:
        # The backend has let go of the request and of everything that could answer it.
        if not self.answered and not self.rescheduled:
            self._answer(failure(self.wrong or "the backend released the request without a final response"), True)
        return 0

    cdef object executed(self, failed):
        # The response that goes back with the batch; None: another way, or later.
        if failed is not None and not self.released:  # the request has stayed the server's
            if not self.answered:
                self._answer(pb_utils.InferenceResponse(error=failed), True)
            self.c.released = True
            self.release(0)
            inferd_drop(&self.c)
        # The sender says that it is answered later. It is made while a response of another thread still goes to
        # `ready`, so that there are never two.
        if self.ready is None and not self.rescheduled and self.sender is None:
            self.sender = self.request.get_response_sender()
        self.executing = False
        if self.rescheduled:
            self._go_round()
        if self.ready is None:
            return None
        self.c.sent = True
        return self._with_states(self.ready)

    cdef int _go_round(self) except -1:
        # The request comes again, with the states as they are now.
        try:
            self.request._states = self._updated()
        except pb_utils.TritonModelException as wrong:
            self.rescheduled = False
            self.request.set_release_flags(TRITONSERVER_REQUEST_RELEASE_ALL)
            self._answer(failure(str(wrong)), True)
        return 0


# ----------------------------------------------------------------------------------------------------------------------
# What the functions of the API ask for, on any thread

cdef void host_log(TRITONSERVER_LogLevel level, const char *file, int line, const char *text) noexcept with gil:
    logger = pb_utils.Logger
    levels = (logger.INFO, logger.WARNING, logger.ERROR, logger.VERBOSE)
    place = text_of(file).rpartition("/")[2] if file != NULL else ""
    try:
        said = text_of(text) if text != NULL else ""
        logger.log(f"{place}:{line}: {said}", levels[level if 0 <= level < 4 else 0])
    except Exception:  # there is nobody to tell it
        pass


cdef c_bool host_logs(TRITONSERVER_LogLevel level) noexcept nogil:
    return level != TRITONSERVER_LOG_VERBOSE or verbose


cdef c_bool host_is_cancelled(void *owner) noexcept with gil:
    try:
        return (<Exchange>owner).request.is_cancelled()
    except Exception:
        return False


cdef void host_released(void *owner, uint32_t flags) noexcept with gil:
    (<Exchange>owner).release(flags)


cdef TRITONSERVER_Error *host_send(
    void *owner, TRITONBACKEND_Response *response, uint32_t flags, TRITONSERVER_Error *error
) noexcept with gil:
    try:
        (<Exchange>owner).send(response, flags, error)
    except BaseException as raised:
        return refusal(raised)
    return NULL


cdef void host_forget(void *owner) noexcept with gil:
    exchange = <Exchange>owner
    try:
        exchange.abandon()
    except Exception:  # the server has gone, or the client has
        pass
    Py_DECREF(exchange)


inferd_host.log = host_log
inferd_host.logs = host_logs
inferd_host.is_cancelled = host_is_cancelled
inferd_host.released = host_released
inferd_host.send = host_send
inferd_host.forget = host_forget


include "metrics.pxi"
include "calls.pxi"

# ----------------------------------------------------------------------------------------------------------------------
# What destructors and threads of a library still ask for when the interpreter is about to go

cdef TRITONSERVER_Error *gone() noexcept nogil:
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNAVAILABLE, "the instance has ended")


cdef void late_log(TRITONSERVER_LogLevel level, const char *file, int line, const char *text) noexcept nogil:
    pass


cdef void late_let_go(void *measured) noexcept nogil:
    pass


cdef TRITONSERVER_Error *late_measure(TRITONSERVER_Metric *metric, const char *what, double *value) noexcept nogil:
    return NULL


cdef c_bool late_is_cancelled(void *owner) noexcept nogil:
    return True


cdef void late_released(void *owner, uint32_t flags) noexcept nogil:
    pass


cdef void late_forget(void *owner) noexcept nogil:
    pass


cdef TRITONSERVER_Error *late_send(
    void *owner, TRITONBACKEND_Response *response, uint32_t flags, TRITONSERVER_Error *error
) noexcept nogil:
    return gone()


cdef TRITONSERVER_Error *late_call(TRITONSERVER_InferenceRequest *request) noexcept nogil:
    return gone()


cdef void late_cancel(TRITONSERVER_InferenceRequest *request) noexcept nogil:
    pass


def retire():
    """Ask the interpreter nothing any more."""
    inferd_host.log = late_log
    inferd_host.let_go = late_let_go
    inferd_host.measure = late_measure
    inferd_host.is_cancelled = late_is_cancelled
    inferd_host.released = late_released
    inferd_host.forget = late_forget
    inferd_host.send = late_send
    inferd_host.call = late_call
    inferd_host.cancel = late_cancel


atexit.register(retire)

# ----------------------------------------------------------------------------------------------------------------------
# The backend

cdef class CompiledBackend:
    """A backend's library with one model, and one instance of that.

    Args:
        library: its path.
        name: of the backend.
        config: what its configuration is, as JSON.
        logs_verbosely: the server wants verbose messages.

    Raises:
        TritonModelException: the library cannot be loaded or is no backend, or the backend refuses, with its reason.
    """

    cdef void *_library
    cdef TRITONBACKEND_Backend _backend
    cdef TRITONBACKEND_Model _model
    cdef TRITONBACKEND_ModelInstance _instance
    cdef execute_fn _execute
    cdef handle_fn _ready
    cdef list _kept
    cdef list _ends  # names of the functions that end what has begun
    cdef StateNames _states
    cdef object _asking  # a lock: held while the instance is asked whether it is ready

    def __init__(self, str library, str name, str config, bint logs_verbosely):
        global verbose
        verbose = logs_verbosely
        self._kept = []
        self._ends = []
        self._states = StateNames(())
        self._asking = Lock()
        cdef const char *path = self._text(library)
        with nogil:
            self._library = dlopen(path, RTLD_NOW | RTLD_LOCAL)
        if self._library == NULL:
            raise pb_utils.TritonModelException(f"backend '{name}' cannot be loaded: {text_of(dlerror())}")
        self._execute = <execute_fn>dlsym(self._library, "TRITONBACKEND_ModelInstanceExecute")
        if self._execute == NULL:
            raise pb_utils.TritonModelException(
                f"backend '{name}': '{library}' does not define TRITONBACKEND_ModelInstanceExecute, so it is no "
                "backend for Triton's C API"
            )
        self._ready = <handle_fn>dlsym(self._library, "TRITONBACKEND_ModelInstanceReady")
        self._backend.name = self._text(name)
        self._backend.folder = self._text(library.rpartition("/")[0])
        self._backend.config = self._message(config)
        self._begin("TRITONBACKEND_Initialize", &self._backend)
        self._ends.append("TRITONBACKEND_Finalize")

    cdef const char *_text(self, str text) except NULL:
        encoded = text.encode()
        self._kept.append(encoded)
        return <const char *>encoded

    cdef TRITONSERVER_Message *_message(self, str text) except NULL:
        encoded = text.encode()
        cdef TRITONSERVER_Message *message = inferd_message(encoded, len(encoded))
        if message == NULL:
            raise MemoryError
        return message

    cdef int _begin(self, str name, void *handle) except -1:
        cdef handle_fn begin = <handle_fn>dlsym(self._library, self._text(name))
        cdef TRITONSERVER_Error *error = NULL
        if begin != NULL:
            with nogil:
                error = begin(handle)
        return check(error)

    def load(self, str name, str folder, uint64_t version, str config, bint completes):
        """Initialize the model.

        Args:
            name: of the model.
            folder: of the model.
            version: its number.
            config: its configuration as JSON.
            completes: whether the backend may complete that.

        Raises:
            TritonModelException: the backend refuses, with its reason.
        """
        self._model.backend = &self._backend
        self._model.name = self._text(name)
        self._model.folder = self._text(folder)
        self._model.version = version
        self._model.config = self._message(config)
        self._model.completes = completes
        self._begin("TRITONBACKEND_ModelInitialize", &self._model)
        self._ends.append("TRITONBACKEND_ModelFinalize")

    def config(self):
        """The model's configuration as JSON, as the backend has completed it."""
        return self._model.config.text[:self._model.config.size].decode()

    def start(self, str name, str kind, int32_t device, states):
        """Initialize the instance.

        Args:
            name: of the instance.
            kind: CPU, GPU or MODEL.
            device: the number of the GPU.
            states: names of the outputs that are states of sequences.

        Raises:
            TritonModelException: the backend refuses, with its reason.
        """
        self._states = StateNames(states)
        self._instance.model = &self._model
        self._instance.name = self._text(name)
        self._instance.kind = KINDS[kind]
        self._instance.device = device
        policy = f"gpu_{device}" if kind == "GPU" else "cpu"
        self._instance.host_policy = self._message(f'{{"{policy}":{{}}}}')
        self._begin("TRITONBACKEND_ModelInstanceInitialize", &self._instance)
        self._ends.append("TRITONBACKEND_ModelInstanceFinalize")

    @property
    def says_ready(self):
        """Whether it can be asked if it is ready."""
        return self._ready != NULL

    def is_ready(self):
        """Whether the instance is ready.

        Raises:
            TritonModelException: it is not, with its reason.
        """
        cdef TRITONSERVER_Error *error
        with self._asking:
            if not self._ends:
                return False
            with nogil:
                error = self._ready(&self._instance)
        check(error)
        return True

    def execute(self, list requests, bint decoupled):
        """Give the backend a batch.

        Returns:
            A response for each request; None for one that is answered by its sender, or rescheduled.
        """
        cdef uint32_t count = <uint32_t>len(requests)
        cdef TRITONBACKEND_Request **given
        cdef TRITONSERVER_Error *error
        cdef Exchange exchange
        exchanges = [Exchange(request, decoupled, self._states) for request in requests]
        given = <TRITONBACKEND_Request **>calloc(count + 1, sizeof(void *))
        if given == NULL:
            raise MemoryError
        cdef uint32_t at = 0
        for exchange in exchanges:
            Py_INCREF(exchange)
            exchange.c.references = 1
            exchange.c.owner = <void *>exchange
            given[at] = &exchange.c
            at += 1
        with nogil:
            error = self._execute(&self._instance, given, count)
        free(given)
        failed = taken(error) if error != NULL else None
        responses = []
        for exchange in exchanges:
            responses.append(exchange.executed(failed))
        return responses

    def close(self):
        """Finalize what was initialized. What the backend says against it is logged."""
        with self._asking:  # nobody asks an instance that is finalized
            while self._ends:
                self._end(self._ends.pop())

    cdef int _end(self, str name) except -1:
        cdef handle_fn end = <handle_fn>dlsym(self._library, self._text(name))
        cdef void *handle = &self._instance
        cdef TRITONSERVER_Error *error
        if end == NULL:
            return 0
        if name == "TRITONBACKEND_Finalize":
            handle = &self._backend
        elif name == "TRITONBACKEND_ModelFinalize":
            handle = &self._model
        with nogil:
            error = end(handle)
        if error != NULL:
            pb_utils.Logger.log_error(f"{name}: {taken(error).message()}")
        return 0
