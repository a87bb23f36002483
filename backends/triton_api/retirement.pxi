"""The functions that the C sources call when the interpreter has ended. A part of _host.pyx.

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


cdef void late_report(void *owner, int kind, uint32_t index, uint64_t infer_ns, uint64_t output_ns) noexcept nogil:
    pass


cdef TRITONSERVER_Error *late_new_family(
    TRITONSERVER_MetricFamily **family, TRITONSERVER_MetricKind kind, const char *name, const char *description
) noexcept nogil:
    return gone()


cdef TRITONSERVER_Error *late_new_metric(
    TRITONSERVER_Metric **metric, TRITONSERVER_MetricFamily *family, const TRITONSERVER_Parameter **labels,
    uint64_t count, const TRITONSERVER_MetricArgs *arguments
) noexcept nogil:
    return gone()


cdef TRITONSERVER_Error *late_kind_of(void *measured, TRITONSERVER_MetricKind *kind) noexcept nogil:
    return gone()


cdef TRITONSERVER_Error *late_call(TRITONSERVER_InferenceRequest *request) noexcept nogil:
    return gone()


cdef void late_cancel(TRITONSERVER_InferenceRequest *request) noexcept nogil:
    pass


cdef TRITONSERVER_Error *late_question(const char *model, int64_t version, c_bool *answer) noexcept nogil:
    return gone()


cdef TRITONSERVER_Error *late_load_model(
    const char *model, const TRITONSERVER_Parameter **parameters, uint64_t count
) noexcept nogil:
    return gone()


cdef TRITONSERVER_Error *late_unload_model(const char *model, c_bool dependents) noexcept nogil:
    return gone()


def retire():
    """Replace every function of the host that needs the interpreter."""
    inferd_host.log = late_log
    inferd_host.let_go = late_let_go
    inferd_host.measure = late_measure
    inferd_host.new_family = late_new_family
    inferd_host.new_metric = late_new_metric
    inferd_host.kind_of = late_kind_of
    inferd_host.is_cancelled = late_is_cancelled
    inferd_host.released = late_released
    inferd_host.forget = late_forget
    inferd_host.send = late_send
    inferd_host.report = late_report
    inferd_host.call = late_call
    inferd_host.cancel = late_cancel
    inferd_host.is_ready = late_question
    inferd_host.is_decoupled = late_question
    inferd_host.load_model = late_load_model
    inferd_host.unload_model = late_unload_model


atexit.register(retire)
