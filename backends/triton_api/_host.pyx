"""The host of a backend that was compiled for Triton: loads its library, gives it requests and takes its responses.

The host runs in a worker process. Its extension exports the functions of Triton's API, which the C sources beside it
define. The worker loads the extension under the name of Triton's library before it loads the backend's library: see
`inferd.backends.triton_api.backend`. The extension is one module, so its parts in Cython are included here:

- errors.pxi: errors of the backend as exceptions, and back
- outputs.pxi: tensors and parameters of responses
- exchange.pxi: one request, from the worker to the backend and back
- callbacks.pxi: functions that the C sources call about requests and logs
- metrics.pxi: metrics that the backend makes
- calls.pxi: requests of the backend to other models
- retirement.pxi: functions that the C sources call when the interpreter has ended
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from inferd.backends.python._wire cimport PLACE_INLINE, RESPONSE_OK, ResponseRecord, TensorRecord, aligned
from inferd.backends.triton_api.objects cimport (
    MOST_DIMENSIONS,
    SENT_IN_RECORD,
    TRITONSERVER_ERROR_INTERNAL,
    TRITONSERVER_ERROR_INVALID_ARG,
    TRITONSERVER_ERROR_UNAVAILABLE,
    TRITONSERVER_LOG_VERBOSE,
    TRITONSERVER_PARAMETER_BOOL,
    TRITONSERVER_PARAMETER_DOUBLE,
    TRITONSERVER_PARAMETER_INT,
    TRITONSERVER_PARAMETER_STRING,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    TRITONSERVER_TYPE_BYTES,
    CallInput,
    Grant,
    Name,
    Piece,
    Shared,
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
    TRITONSERVER_ErrorDelete,
    TRITONSERVER_ErrorNew,
    TRITONSERVER_InferenceRequest,
    TRITONSERVER_InferenceResponse,
    TRITONSERVER_LogLevel,
    TRITONSERVER_Message,
    TRITONSERVER_Metric,
    TRITONSERVER_MetricArgs,
    TRITONSERVER_MetricFamily,
    TRITONSERVER_MetricKind,
    TRITONSERVER_Parameter,
    c_bool,
    inferd_add_output,
    inferd_add_parameter,
    inferd_close_grant,
    inferd_drop,
    inferd_free_tensors,
    inferd_host,
    inferd_message,
    inferd_new_response,
    inferd_open_grant,
    inferd_resize,
    inferd_start_response,
    inferd_uses_grant,
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

include "errors.pxi"
include "outputs.pxi"
include "exchange.pxi"
include "callbacks.pxi"
include "metrics.pxi"
include "calls.pxi"
include "retirement.pxi"


cdef class CompiledBackend:
    """A backend's library with one model, and one instance of that.

    Args:
        library: the path of the library.
        name: the backend's name.
        config: the backend's configuration as JSON.
        logs_verbosely: whether the server logs verbose messages.

    Raises:
        TritonModelException: the library cannot be loaded or is no backend, or the backend refused, with its reason.
    """

    cdef void *_library
    cdef TRITONBACKEND_Backend _backend
    cdef TRITONBACKEND_Model _model
    cdef TRITONBACKEND_ModelInstance _instance
    cdef execute_fn _execute
    cdef handle_fn _ready
    cdef list _kept
    cdef list _ends  # names of the functions that finalize what has been initialized, in reverse order
    cdef ModelTraits _traits
    cdef object _asking  # a lock, held while the backend is asked whether the instance is ready

    def __init__(self, str library, str name, str config, bint logs_verbosely):
        global verbose
        verbose = logs_verbosely
        self._kept = []
        self._ends = []
        self._traits = ModelTraits("", (), False, False)
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
            name: the model's name.
            folder: the model's folder.
            version: the number of the version.
            config: the model's configuration as JSON.
            completes: whether the backend may complete the configuration.

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

    def start(self, str name, str kind, int32_t device, states, bint decoupled, bint iterative):
        """Initialize the instance.

        Args:
            name: the instance's name.
            kind: CPU, GPU or MODEL.
            device: the number of the GPU.
            states, decoupled, iterative: see ModelTraits.

        Raises:
            TritonModelException: the backend refuses, with its reason.
        """
        self._traits = ModelTraits(text_of(self._model.name), states, decoupled, iterative)
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
        """Whether the backend can say if its instance is ready."""
        return self._ready != NULL

    def is_ready(self):
        """Whether the instance is ready.

        Raises:
            TritonModelException: the instance is not ready, with its reason.
        """
        cdef TRITONSERVER_Error *error
        with self._asking:
            if not self._ends:
                return False
            with nogil:
                error = self._ready(&self._instance)
        check(error)
        return True

    def execute(self, list requests):
        """Give the backend a batch.

        Returns:
            A response for each request; None if a sender sends it later, or the backend has rescheduled the request.
        """
        cdef uint32_t count = <uint32_t>len(requests)
        cdef TRITONBACKEND_Request **given
        cdef TRITONSERVER_Error *error
        cdef Exchange exchange
        cdef OutputGrant grant = OutputGrant(None if self._traits.decoupled else current().outputs)
        exchanges = [Exchange(request, self._traits, grant) for request in requests]
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
        grant.close()
        free(given)
        failed = taken(error) if error != NULL else None
        try:
            return [(<Exchange>each).executed(failed) for each in exchanges]
        finally:
            grant.keep()

    def close(self):
        """Finalize instance, model and backend, as far as they are initialized. Errors of the backend are logged."""
        with self._asking:  # so that is_ready() does not ask an instance that is finalized
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
