"""The functions that the C sources call instead when the interpreter ends. A part of _host.pyx.

Destructors and threads of the backend's library may still call the API then.
"""

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
